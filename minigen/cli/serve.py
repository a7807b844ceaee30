"""`minigen serve`: serves models over OpenAI's API."""

import logging
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from minigen.cli.options import (
    DEFAULT_MODEL,
    Command,
    flag,
    load_model,
    refuse_idle_ranks,
    takes_engine_options,
    with_options,
)
from minigen.config import EngineConfig, parse_bytes, parse_seconds
from minigen.errors import OptionError
from minigen.server.middleware.limits import Limits

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
LEVELS = ("debug", "info", "warning", "error", "critical")
FLAGS = {
    "max_body_bytes": ["--max-body"],
    "max_prompt_tokens": ["--max-prompt"],
    "cors_origins": ["--cors-origin"],
}


def takes_limits(command: Command) -> Command:
    """Add the server's limits to `command(limits, ...)`. Raises `OptionError` for a wrong value."""
    flags = [flag(each, "serve", "Limits", *FLAGS.get(each.name, ())) for each in fields(Limits)]
    return with_options(command, flags, limits_of)


def limits_of(typed: dict[str, Any]) -> Limits:
    """Return the limits from their values as typed on the command line."""
    found = {"cors_origins": (), **{name: each for name, each in typed.items() if each is not None}}
    for name, value in found.items():
        if name == "max_body_bytes":
            found[name] = parse_bytes("max_body", value)
        elif isinstance(value, str):
            found[name] = parse_seconds(name, value)
    return Limits(**found)


def _option(text: str, *names: str, panel: str = "Server", **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@takes_engine_options
@takes_limits
def serve(
    limits: Limits,
    options: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(help="A short name, a directory, a .gguf file, org/repo or org/repo@rev."),
    ] = None,
    models: Annotated[
        list[str] | None,
        _option(
            "A model to serve; repeatable. The first one is loaded at start, the others at their "
            "first request.",
            "--model",
            "-m",
        ),
    ] = None,
    served_names: Annotated[
        list[str] | None,
        _option("A model's name in the API, one per model in order; repeatable.", "--served-name"),
    ] = None,
    host: Annotated[
        str, _option("The address to listen on; 0.0.0.0 means all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, _option("The port to listen on; 0 picks a free one.")] = 8000,
    keep_alive: Annotated[
        str | None,
        _option("Unload a model after this time without requests, such as 10m; default: never."),
    ] = None,
    metrics_prefix: Annotated[
        str,
        _option("Prefix of the metric names at /metrics: minigen, or vllm for vLLM's dashboards."),
    ] = "minigen",
    api_keys: Annotated[
        list[str] | None,
        _option(
            "An API key that clients must send; repeatable. It is visible in the list of "
            "processes, so prefer the environment variable or --api-key-file.",
            "--api-key",
            panel="Access",
            envvar="MINIGEN_API_KEY",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option("A file of API keys, one per line; a # starts a comment.", panel="Access"),
    ] = None,
    access_log: Annotated[
        bool, _option("Write one line of JSON to stderr per request.", panel="Log")
    ] = True,
    log_level: Annotated[
        str, _option(f"Level of other messages: {', '.join(LEVELS)}.", panel="Log")
    ] = "warning",
) -> None:
    """Serve models over HTTP with OpenAI's API, for any OpenAI client.

    minigen serve

    minigen serve Qwen/Qwen3-0.6B --port 8080

    minigen serve --model smollm2-135m --model ./my-model --keep-alive 10m
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise OptionError(f"The server needs {missing[0]}: pip install 'minigen[server]'.")
    from minigen.server.app import create_service
    from minigen.server.metrics import MetricsPage, metrics_router, metrics_watcher
    from minigen.server.middleware.access_log import write_access_log
    from minigen.server.middleware.auth import ApiKeys, read_keys
    from minigen.server.models import ModelHost
    from minigen.server.run import run

    EngineConfig(**options)  # raises for invalid options before a model is loaded
    idle = None if keep_alive is None else parse_seconds("keep_alive", keep_alive)
    sources = [*([] if model is None else [model]), *(models or ())] or [DEFAULT_MODEL]
    names = _names(sources, served_names or sources)
    joined = _join_ranks(sources, idle, options)
    loads = {name: partial(load_model, each, **options) for name, each in names.items()}
    page = MetricsPage(f"{metrics_prefix}:")
    hosted = ModelHost(loads, idle, [metrics_watcher(page)], stay=joined)
    keys = ApiKeys([*(api_keys or ()), *(read_keys(api_key_file) if api_key_file else ())])
    service = create_service(hosted, limits, keys, [metrics_router(page)], page.count_refusal)
    if log_level not in LEVELS:
        raise OptionError(f"log_level must be one of {', '.join(LEVELS)}, not {log_level!r}.")
    logging.basicConfig(level=log_level.upper())
    if access_log:
        write_access_log()
    run(service, hosted, host, port, limits.drain_timeout, limits.send_timeout, log_level)


def _join_ranks(models: list[str], keep_alive: float | None, options: dict[str, Any]) -> bool:
    """Return whether `torchrun` started the ranks; on ranks above 0 this never returns.

    Raises `OptionError` for options that do not work with `torchrun`.
    """
    from minigen.parallel.launch import torchrun_rank

    refuse_idle_ranks(options)
    cuts = ("tensor", "context", "pipeline")
    sizes = [options[f"{cut}_parallel_size"] for cut in cuts]
    rank = torchrun_rank() if max(sizes) > 1 else None
    if rank is None:
        return False
    if len(models) > 1 or keep_alive is not None:
        raise OptionError(
            "The ranks that torchrun started run one model until they end: serve only one, and "
            "leave out --keep-alive."
        )
    if rank > 0:
        load_model(models[0], **options)
    return True


def _names(models: list[str], names: list[str]) -> dict[str, str]:
    """Return the models by their names in the API."""
    if len(names) != len(models):
        raise OptionError(
            f"There are {len(models)} models but {len(names)} --served-name; give one per model."
        )
    if len(set(names)) < len(names):
        raise OptionError("Two models have the same name; give each model its own --served-name.")
    return dict(zip(names, models, strict=True))
