"""The options of `minigen serve` for access control, limits and logs."""

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigen.cli.options import Command, with_options
from minigen.config import parse_bytes, parse_seconds
from minigen.errors import OptionError

if TYPE_CHECKING:
    from minigen.server.middleware.auth import ApiKeys
    from minigen.server.middleware.limits import Limits

LEVELS = ("debug", "info", "warning", "error", "critical")
DURATIONS = ("body_timeout", "request_timeout", "send_timeout", "drain_timeout")
PASSED_ON = ("max_in_flight", "max_in_flight_per_key", "max_queue", "max_n", "open_metrics")
KEY_VARIABLE = "MINIGEN_API_KEY"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def access_options(
    api_keys: Annotated[
        list[str] | None,
        _option(
            "Access",
            "An API key that clients must send; repeatable. It is visible in the list of "
            "processes, so prefer the environment variable or --api-key-file.",
            "--api-key",
            envvar=KEY_VARIABLE,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option("Access", "A file of API keys, one per line; a # starts a comment."),
    ] = None,
    cors_origins: Annotated[
        list[str] | None,
        _option(
            "Access",
            "An origin of web pages that may call the server (CORS), or '*'; repeatable.",
            "--cors-origin",
        ),
    ] = None,
    open_metrics: Annotated[
        bool, _option("Access", "Allow requests for /metrics without a key.")
    ] = False,
    max_body: Annotated[str, _option("Limits", "Largest request body, such as 8MiB.")] = "8MiB",
    body_timeout: Annotated[
        str, _option("Limits", "Time limit for receiving a request body.")
    ] = "30s",
    max_in_flight: Annotated[
        int, _option("Limits", "Requests at once, at most; further ones get status 429.")
    ] = 256,
    max_in_flight_per_key: Annotated[
        int | None, _option("Limits", "Requests at once per API key, at most; else 429.")
    ] = None,
    max_queue: Annotated[
        int | None, _option("Limits", "Sequences waiting for the engine, at most; else 429.")
    ] = None,
    max_prompt: Annotated[
        int | None, _option("Limits", "Tokens per prompt, at most; the context length if absent.")
    ] = None,
    max_n: Annotated[int, _option("Limits", "Completions per prompt (n), at most.")] = 128,
    request_timeout: Annotated[
        str, _option("Limits", "Time limit for a whole request; else 504.")
    ] = "1h",
    send_timeout: Annotated[
        str, _option("Limits", "Disconnect a client that reads nothing for this time.")
    ] = "60s",
    drain_timeout: Annotated[
        str, _option("Limits", "Time that running requests get to finish at shutdown.")
    ] = "30s",
    access_log: Annotated[
        bool, _option("Log", "Write one line of JSON to stderr per request.")
    ] = True,
    log_level: Annotated[
        str, _option("Log", f"Level of other messages: {', '.join(LEVELS)}.")
    ] = "warning",
) -> None:
    """Declare these options; the limits are those of `minigen.server.middleware.stack`."""


@dataclass(frozen=True)
class AccessOptions:
    """The values of the options of `access_options`, by name, as typed on the command line."""

    typed: dict[str, Any]

    def limits(self) -> "Limits":
        """Return the limits. Raises `OptionError` for an invalid value."""
        from minigen.server.middleware.limits import Limits

        typed = self.typed
        return Limits(
            max_body_bytes=parse_bytes("max_body", typed["max_body"]),
            max_prompt_tokens=typed["max_prompt"],
            cors_origins=tuple(typed["cors_origins"] or ()),
            **{name: typed[name] for name in PASSED_ON},
            **{name: parse_seconds(name, typed[name]) for name in DURATIONS},  # type: ignore[arg-type]
        )

    def keys(self) -> "ApiKeys":
        """Return the API keys of the options, the environment and the file together."""
        from minigen.server.middleware.auth import ApiKeys, read_keys

        path = self.typed["api_key_file"]
        return ApiKeys([*(self.typed["api_keys"] or ()), *(read_keys(path) if path else ())])

    def configure_logging(self) -> str:
        """Send logs to stderr, and return the log level. Raises `OptionError` for a wrong level."""
        from minigen.server.middleware.access_log import write_access_log

        level: str = self.typed["log_level"]
        if level not in LEVELS:
            raise OptionError(f"log_level must be one of {', '.join(LEVELS)}, not {level!r}.")
        logging.basicConfig(level=level.upper())
        if self.typed["access_log"]:
            write_access_log()
        return level


def takes_access_options(command: Command) -> Command:
    """Add the options of `access_options` to `command(access, ...)`."""
    shared = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(access_options).parameters.values()
    ]
    return with_options(command, shared, AccessOptions)
