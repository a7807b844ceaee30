"""The options of every command that loads a model, defined once and added to each command."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from minigen.llm import LLM

DEFAULT_MODEL = "smollm2-135m"  # hub.DEFAULT_MODEL, without its imports; a test compares them

Load = Callable[[], "LLM"]


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def engine_options(
    model: Annotated[
        str,
        _option(
            "Model",
            "A short name, a directory, a .gguf file, or a hub id (org/repo, org/repo@revision).",
            "--model",
            "-m",
        ),
    ] = DEFAULT_MODEL,
    weights: Annotated[
        str, _option("Model", "Format of the weights: auto, float32, bfloat16, int8 or int4.")
    ] = "auto",
    threads: Annotated[
        int | None, _option("Model", "Number of CPU threads; torch's default if absent.")
    ] = None,
    max_num_seqs: Annotated[int, _option("Engine", "Sequences that run at once, at most.")] = 16,
    max_num_batched_tokens: Annotated[
        int, _option("Engine", "Tokens that one step computes, at most.")
    ] = 2048,
    block_size: Annotated[int, _option("Engine", "Tokens per block of the KV cache.")] = 16,
    num_blocks: Annotated[
        int | None, _option("Engine", "Blocks of the KV cache, instead of --kv-cache-memory.")
    ] = None,
    kv_cache_memory: Annotated[
        str | None, _option("Engine", "Memory of the KV cache, such as 512M; 1GiB if absent.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, _option("Engine", "Data type of keys and values: auto, bfloat16 or int8.")
    ] = "auto",
    enable_prefix_caching: Annotated[
        bool,
        _option("Prefix caching", "Share blocks of equal prefixes (on).", show_default=False),
    ] = True,
    prefix_cache: Annotated[
        str | None, _option("Engine", "Your own prefix cache, as file.py:Name.")
    ] = None,
    scheduler: Annotated[
        str, _option("Engine", "continuous, static, dynamic, or your own as file.py:Name.")
    ] = "continuous",
    allocator: Annotated[
        str | None, _option("Engine", "Your own block allocator, as file.py:Name.")
    ] = None,
    sampler: Annotated[str | None, _option("Engine", "Your own sampler, as file.py:Name.")] = None,
    attention_backend: Annotated[
        str, _option("Engine", "auto, torch, triton, or your own as file.py:Name.")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int, _option("Engine", "Processes that hold one shard of the model each.")
    ] = 1,
    device: Annotated[str, _option("Engine", "cpu or cuda.")] = "cpu",
) -> None:
    """Declare the options of a command that loads a model; their names are those of `LLM.load`."""


def loads_model(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `engine_options` to `command(load, ...)`; `load()` applies them."""

    def loading(options: dict[str, Any], **arguments: Any) -> None:
        command(functools.partial(load_model, **options), **arguments)

    return _with_options(loading, command, _shared())


def takes_engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Add the options of `engine_options`, except the model, to `command(options, ...)`.

    `defaults` replace the default values of options by name.
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
    """Return `run(options, ...)` with the signature of `command` plus the shared options."""
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        options = {each.name: arguments.pop(each.name) for each in shared}
        run(options, **arguments)

    wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return wrapped


def load_model(model: str, **options: Any) -> "LLM":
    """Call `LLM.load` with a progress bar for the download."""
    from minigen.llm import LLM
    from minigen.progress import shown_progress

    with shown_progress() as progress:
        return LLM.load(model, progress=progress, **options)
