"""`minigen serve`: models behind OpenAI's API."""

from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from minigen.cli.guards import Guarding, takes_guard_options
from minigen.cli.options import DEFAULT_MODEL, load_model, takes_engine_options
from minigen.config import EngineConfig, parse_seconds
from minigen.errors import OptionError

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")

# Requests come as they come, and one that runs costs the others little, while one that waits gets
# nothing. 64 fit into the default KV cache with some 350 tokens each, and whoever grows beyond
# that makes the last in line wait.
MAX_SEQUENCES = 64


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Server")


@partial(takes_engine_options, max_num_seqs=MAX_SEQUENCES)
@takes_guard_options
def serve(
    options: dict[str, Any],
    guarding: Guarding,
    model: Annotated[
        str | None,
        typer.Argument(help="A short name, a directory, a .gguf file, or a Hugging Face id."),
    ] = None,
    models: Annotated[
        list[str] | None,
        _option("A further model, loaded when it is first asked for; repeatable.", "--model", "-m"),
    ] = None,
    served_names: Annotated[
        list[str] | None,
        _option("What clients call a model, in the same order; repeatable.", "--served-name"),
    ] = None,
    host: Annotated[str, _option("The address to listen at; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, _option("The port to listen at; 0 takes any.")] = 8000,
    keep_alive: Annotated[
        str | None,
        _option("Unload a model after so long without requests, as in 10m; else it stays."),
    ] = None,
    metrics_prefix: Annotated[
        str, _option("What the names at /metrics begin with: minigen, or vllm for its dashboards.")
    ] = "minigen",
) -> None:
    """Serve models over HTTP, as OpenAI does: any of its clients can use them.

    minigen serve

    minigen serve Qwen/Qwen3-0.6B --port 8080

    minigen serve --model smollm2-135m --model ./my-model --keep-alive 10m
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise OptionError(f"The server needs {missing[0]}: pip install 'minigen[server]'.")
    from minigen.server.app import create_service
    from minigen.server.metrics import MetricsPage, metrics_router, metrics_watcher
    from minigen.server.models import ModelHost
    from minigen.server.run import run

    EngineConfig(**options)  # to refuse what is impossible before anything is loaded
    idle = None if keep_alive is None else parse_seconds("keep_alive", keep_alive)
    limits = guarding.limits()
    asked = [*([] if model is None else [model]), *(models or ())] or [DEFAULT_MODEL]
    names = _names(asked, served_names or asked)
    joined = _join_ranks(asked, idle, options)
    loads = {name: partial(load_model, each, **options) for name, each in names.items()}
    page = MetricsPage(f"{metrics_prefix}:")
    hosted = ModelHost(loads, idle, [metrics_watcher(page)], stay=joined)
    service = create_service(hosted, limits, guarding.keys(), [metrics_router(page)])
    level = guarding.begin_logs()
    run(service, hosted, host, port, limits.drain_timeout, limits.send_timeout, level)


def _join_ranks(models: list[str], keep_alive: float | None, options: dict[str, Any]) -> bool:
    """Whether `torchrun` started the ranks, of whom all but rank 0 never return.

    Raises `OptionError` for what they cannot follow.
    """
    from minigen.parallel.launch import torchrun_rank

    rank = torchrun_rank() if options["tensor_parallel_size"] > 1 else None
    if rank is None:
        return False
    if len(models) > 1 or keep_alive is not None:
        raise OptionError(
            "The ranks that torchrun started follow one model to its end: serve one, and leave out "
            "--keep-alive."
        )
    if rank > 0:
        load_model(models[0], **options)
    return True


def _names(models: list[str], names: list[str]) -> dict[str, str]:
    """The models by the names that clients call them."""
    if len(names) != len(models):
        raise OptionError(
            f"There are {len(models)} models and {len(names)} --served-name; give one for each."
        )
    if len(set(names)) < len(names):
        raise OptionError("Two models are called the same; give each a --served-name.")
    return dict(zip(names, models, strict=True))
