"""The fields of a config, each with its default, the values that it allows, and its help text.

`EngineConfig` and `SamplingParams` are dataclasses of such fields. The signature of `LLM.load`, the
flags of the command line, the HTTP schemas and docs/options.md are made from them.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from minigen.errors import MinigenError

_MOST_SHOWN = 80  # characters of a path, which may have thousands


@dataclass(frozen=True)
class Values:
    """The values that an option allows; `text` ends the sentence "NAME must be ...".

    `names` are the known names, and `bounds` those of a number, by pydantic's words: ge, gt, le.
    """

    text: str
    allows: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)


def one_of(*names: str) -> Values:
    """Allow only these names."""
    return Values(f"one of {', '.join(names)}", lambda value: value in names, names)


def part(*names: str) -> Values:
    """Allow these names of minigen's own parts, "file.py:Name", and any object as a user's part."""

    def allows(value: Any) -> bool:
        file, _, name = value.rpartition(":") if isinstance(value, str) else ("own.py", ":", "own")
        return value in names or (file.endswith(".py") and name != "")

    known = f"one of {', '.join(names)}, or " if names else ""
    return Values(f"{known}file.py:Name", allows, names)


def whole(least: int, most: int) -> Values:
    """Allow the whole numbers from `least` to `most`."""

    def allows(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    text = f"a whole number from {least} to {most}"
    return Values(text, allows, bounds={"ge": least, "le": most})


def real(least: float, most: float, *, above: bool = False) -> Values:
    """Allow the numbers from `least` to `most`, or only those above `least`."""

    def allows(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most and not (above and value == least)

    span = f"above {least} and at most {most}" if above else f"from {least} to {most}"
    return Values(f"a number {span}", allows, bounds={"gt" if above else "ge": least, "le": most})


FLAG = Values("True or False", lambda value: isinstance(value, bool))


@dataclass(frozen=True)
class Option:
    """What a field of a config says about itself, besides its name, type and default.

    `at` has the defaults at the commands and APIs where they may differ, by the name of the command
    or API. `panel` is its heading in the command line's help; `hint` ends a refusal's sentence.
    """

    help: str
    values: Values
    at: Mapping[str, Any] = field(default_factory=dict)
    panel: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """The help text, with the known names if the option takes a name."""
        named = self.values.text if self.values.names else ""
        return f"{self.help} {named[0].upper()}{named[1:]}." if named else self.help


def option(
    default: Any, help: str, values: Values, factory: Callable[[], Any] | None = None, **more: Any
) -> Any:
    """Return a dataclass's field for an `Option`; `factory` makes a default that can change."""
    metadata = {"option": Option(help, values, **more)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_of(each: "Field[Any]") -> Option:
    """Return what a field of a config says about itself."""
    found: Option = each.metadata["option"]
    return found


def default_at(each: "Field[Any]", place: str) -> Any:
    """Return the default of an option at a command or API: its own there, or the field's."""
    return option_of(each).at.get(place, each.default)


def offered_at(place: str, config: Any) -> "list[Field[Any]]":
    """Return the fields of a config that have a default at a command or API."""
    return [each for each in fields(config) if place in option_of(each).at]


def require(
    name: str, value: object, values: Values, error: type[MinigenError], hint: str = ""
) -> None:
    """Raise `error` if the value is not allowed."""
    if not values.allows(value):
        raise error(f"{name} must be {values.text}, not {value!r}{hint and f'; {hint}'}.")


def expanded(path: Path | str, error: type[MinigenError], name: str = "") -> Path:
    """Return a path with ~ and ~user replaced by a home folder; the file need not exist.

    Raises `error`, after the `name` of the option if it has one, for a user without a home folder
    and for a path that the system refuses, such as one that is too long.
    """
    try:
        found = Path(path).expanduser()
        found.exists()
    except RuntimeError:
        why = f"this system knows no home folder for {Path(path).parts[0]}"
    except OSError as refused:
        why = str(refused.strerror)
    except ValueError:  # a null byte, or half of a surrogate pair
        why = "it has a character that no path may have"
    else:
        return found
    shown = str(path)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    raise error(f"{name}{name and ': '}{shown!r} cannot be used as a path: {why}.")


def check(config: Any, error: type[MinigenError]) -> None:
    """Raise `error` for the first value that is not allowed; None is if the field's type has it."""
    for each in fields(config):
        own, value = option_of(each), getattr(config, each.name)
        if value is not None or NoneType not in get_args(each.type):
            require(each.name, value, own.values, error, own.hint)


def declare(function: Callable[..., Any], config: Any) -> Any:
    """Show the fields of `config` in the signature and docstring of `function(..., **options)`.

    `inspect`, `help` and notebooks then show each option with its type, default and help text.
    """
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *inspect.signature(config).parameters.values()]
    )
    rows = (f"{each.name}: {option_of(each).text}" for each in fields(config))
    wrapped = (textwrap.fill(row, 92, subsequent_indent="    ") for row in rows)
    function.__doc__ = "\n".join((inspect.cleandoc(function.__doc__ or ""), "\nOptions:", *wrapped))
    return function
