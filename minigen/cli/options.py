"""The options of every command that loads a model: said once, given to each."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from minigen.llm import LLM

DEFAULT_MODEL = "smollm2-135m"  # hub.DEFAULT_MODEL, without its imports; a test compares them

Load = Callable[[], "LLM"]


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def engine_options(
    model: Annotated[
        str,
        _option(
            "Model",
            "A short name, a directory, a .gguf file, or a Hugging Face id (org/repo).",
            "--model",
            "-m",
        ),
    ] = DEFAULT_MODEL,
    weights: Annotated[
        str, _option("Model", "auto, float32, bfloat16, int8 or int4: the form of weights.")
    ] = "auto",
    threads: Annotated[
        int | None, _option("Model", "CPU threads; torch's own choice if absent.")
    ] = None,
    max_num_seqs: Annotated[int, _option("Engine", "Answers that run at once, at most.")] = 16,
    max_num_batched_tokens: Annotated[
        int, _option("Engine", "Tokens that one step computes, at most.")
    ] = 2048,
    block_size: Annotated[int, _option("Engine", "Tokens in a block of the KV cache.")] = 16,
    num_blocks: Annotated[
        int | None, _option("Engine", "Blocks of the KV cache, in place of --kv-cache-memory.")
    ] = None,
    kv_cache_memory: Annotated[
        str | None, _option("Engine", "Memory of the KV cache, as in 512M; 1GiB if absent.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, _option("Engine", "auto, bfloat16 or int8: the form of keys and values.")
    ] = "auto",
    enable_prefix_caching: Annotated[
        bool, _option("Engine", "Share the KV cache of prompts that begin with the same tokens.")
    ] = True,
    prefix_cache: Annotated[
        str | None, _option("Engine", "A prefix cache of your own, as file.py:Name.")
    ] = None,
    scheduler: Annotated[
        str, _option("Engine", "continuous, static, dynamic, or file.py:Name of your own.")
    ] = "continuous",
    allocator: Annotated[
        str | None, _option("Engine", "An allocator of your own, as file.py:Name.")
    ] = None,
    sampler: Annotated[
        str | None, _option("Engine", "A sampler of your own, as file.py:Name.")
    ] = None,
    attention_backend: Annotated[
        str, _option("Engine", "auto, torch, triton, or file.py:Name of your own.")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int, _option("Engine", "Processes that hold a share of the model each.")
    ] = 1,
    device: Annotated[str, _option("Engine", "cpu or cuda.")] = "cpu",
) -> None:
    """What a command that loads a model accepts; the names are `LLM.load`'s."""


def loads_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(load, ...)` the options of `engine_options`; `load()` loads as they say."""

    def loading(options: dict[str, Any], **arguments: Any) -> None:
        command(functools.partial(load_model, **options), **arguments)

    return _with_options(loading, command, _shared())


def takes_engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give `command(options, ...)` the options of `engine_options`, but for the model.

    `defaults` are for those that other commands have otherwise.
    """
    shared = [
        each.replace(default=defaults.get(each.name, each.default))
        for each in _shared()
        if each.name != "model"
    ]
    return _with_options(command, command, shared)


def _shared() -> list[inspect.Parameter]:
    return list(inspect.signature(engine_options).parameters.values())


def _with_options(
    run: Callable[..., None], command: Callable[..., None], shared: list[inspect.Parameter]
) -> Callable[..., None]:
    """`run(options, ...)` with the command's own parameters behind its first, and the shared."""
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        options = {each.name: arguments.pop(each.name) for each in shared}
        run(options, **arguments)

    wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return wrapped


def load_model(model: str, **options: Any) -> "LLM":
    """`LLM.load` with a bar for what has to be downloaded."""
    from minigen.llm import LLM
    from minigen.progress import shown_progress

    with shown_progress() as progress:
        return LLM.load(model, progress=progress, **options)
