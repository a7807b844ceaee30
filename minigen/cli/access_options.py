"""The options of `minigen serve` for access control, limits and logs."""

import inspect
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigen.cli.options import Command, flag, with_options
from minigen.config import parse_bytes, parse_seconds
from minigen.errors import OptionError
from minigen.server.middleware.limits import Limits

if TYPE_CHECKING:
    from minigen.server.middleware.auth import ApiKeys

LEVELS = ("debug", "info", "warning", "error", "critical")
KEY_VARIABLE = "MINIGEN_API_KEY"
FLAGS = {
    "max_body_bytes": ["--max-body"],
    "max_prompt_tokens": ["--max-prompt"],
    "cors_origins": ["--cors-origin"],
}


def access_options(
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="An API key that clients must send; repeatable. It is visible in the list of "
            "processes, so prefer the environment variable or --api-key-file.",
            rich_help_panel="Access",
            envvar=KEY_VARIABLE,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of API keys, one per line; a # starts a comment.",
            rich_help_panel="Access",
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(help="Write one line of JSON to stderr per request.", rich_help_panel="Log"),
    ] = True,
    log_level: Annotated[
        str,
        typer.Option(help=f"Level of other messages: {', '.join(LEVELS)}.", rich_help_panel="Log"),
    ] = "warning",
) -> None:
    """Declare the options that are no `Limits`."""


@dataclass(frozen=True)
class AccessOptions:
    """The values of `access_options` and the `Limits`, by name, as typed on the command line."""

    typed: dict[str, Any]

    def limits(self) -> Limits:
        """Return the limits. Raises `OptionError` for an invalid value."""
        found: dict[str, Any] = {each.name: self.typed[each.name] for each in fields(Limits)}
        for name, value in found.items():
            if name == "max_body_bytes":
                found[name] = parse_bytes("max_body", value)
            elif isinstance(value, str):
                found[name] = parse_seconds(name, value)
        return Limits(**found | {"cors_origins": tuple(found["cors_origins"] or ())})

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
    """Add the limits and `access_options` to `command(access, ...)`."""
    limits = [flag(each, "serve", "Limits", *FLAGS.get(each.name, ())) for each in fields(Limits)]
    others = inspect.signature(access_options).parameters.values()
    shared = [*(each.replace(kind=each.KEYWORD_ONLY) for each in others), *limits]
    return with_options(command, shared, AccessOptions)
