"""The options of `minigen serve` that say who may ask for how much."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigen.config import parse_bytes, parse_seconds
from minigen.errors import OptionError

if TYPE_CHECKING:
    from minigen.server.middleware.auth import ApiKeys
    from minigen.server.middleware.limits import Limits

LEVELS = ("debug", "info", "warning", "error", "critical")
SPANS = ("body_timeout", "request_timeout", "send_timeout", "drain_timeout")
AS_TYPED = ("max_in_flight", "max_in_flight_per_key", "max_queue", "max_n", "open_metrics")
KEY_VARIABLE = "MINIGEN_API_KEY"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def guard_options(
    api_keys: Annotated[
        list[str] | None,
        _option(
            "Access",
            "A key that clients must send; repeatable. Others can read it in the list of "
            "processes: rather use the variable, or a file.",
            "--api-key",
            envvar=KEY_VARIABLE,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, _option("Access", "A file of such keys, one a line; # begins a comment.")
    ] = None,
    cors_origins: Annotated[
        list[str] | None,
        _option(
            "Access", "A web page's origin that may call, or '*'; repeatable.", "--cors-origin"
        ),
    ] = None,
    open_metrics: Annotated[bool, _option("Access", "Let /metrics be read without a key.")] = False,
    max_body: Annotated[str, _option("Limits", "Bytes of a request, at most.")] = "8MiB",
    body_timeout: Annotated[
        str, _option("Limits", "How long a request may take to arrive.")
    ] = "30s",
    max_in_flight: Annotated[int, _option("Limits", "Requests at once, else 429.")] = 256,
    max_in_flight_per_key: Annotated[
        int | None, _option("Limits", "Requests of one key at once, else 429.")
    ] = None,
    max_queue: Annotated[
        int | None, _option("Limits", "Answers that wait for the engine, else 429.")
    ] = None,
    max_prompt: Annotated[
        int | None, _option("Limits", "Tokens of a prompt; the context's if absent.")
    ] = None,
    max_n: Annotated[int, _option("Limits", "Answers to one prompt.")] = 128,
    request_timeout: Annotated[
        str, _option("Limits", "How long a request may take in all, else 504.")
    ] = "1h",
    send_timeout: Annotated[
        str, _option("Limits", "Cut off a client that does not read for so long.")
    ] = "60s",
    drain_timeout: Annotated[
        str, _option("Limits", "When told to end: how long what runs may take to finish.")
    ] = "30s",
    access_log: Annotated[
        bool, _option("Log", "A line of JSON on stderr for each request.")
    ] = True,
    log_level: Annotated[
        str, _option("Log", f"What else is told: {', '.join(LEVELS)}.")
    ] = "warning",
) -> None:
    """What `minigen serve` accepts; the limits are those of `minigen.server.middleware.stack`."""


@dataclass(frozen=True)
class Guarding:
    """The options of `guard_options`, by name, as they were typed."""

    typed: dict[str, Any]

    def limits(self) -> "Limits":
        """The limits. Raises `OptionError` for what is impossible."""
        from minigen.server.middleware.limits import Limits

        typed = self.typed
        return Limits(
            max_body_bytes=parse_bytes("max_body", typed["max_body"]),
            max_prompt_tokens=typed["max_prompt"],
            cors_origins=tuple(typed["cors_origins"] or ()),
            **{name: typed[name] for name in AS_TYPED},
            **{name: parse_seconds(name, typed[name]) for name in SPANS},  # type: ignore[arg-type]
        )

    def keys(self) -> "ApiKeys":
        """The API keys, of options, the environment and a file together."""
        from minigen.server.middleware.auth import ApiKeys, read_keys

        path = self.typed["api_key_file"]
        return ApiKeys([*(self.typed["api_keys"] or ()), *(read_keys(path) if path else ())])

    def begin_logs(self) -> str:
        """Have what is logged written to stderr; the level of what is told besides requests."""
        from minigen.server.middleware.access_log import write_access_log

        level: str = self.typed["log_level"]
        if level not in LEVELS:
            raise OptionError(f"log_level must be one of {', '.join(LEVELS)}, not {level!r}.")
        logging.basicConfig(level=level.upper())
        if self.typed["access_log"]:
            write_access_log()
        return level


def takes_guard_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(options, guarding, ...)` the options of `guard_options`."""
    shared = list(inspect.signature(guard_options).parameters.values())
    first, _, *own = inspect.signature(command).parameters.values()

    @wraps(command)
    def wrapped(options: dict[str, Any], **arguments: Any) -> None:
        guarding = Guarding({each.name: arguments.pop(each.name) for each in shared})
        command(options, guarding, **arguments)

    wrapped.__signature__ = inspect.Signature([first, *own, *shared])  # type: ignore[attr-defined]
    return wrapped
