"""The public names of minigen as docs/api.md: `python -m tools.public_names` writes the page.

What is listed there is what users rely on: a change of it shows in a diff, and a test fails until
the page is written again.
"""

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

import typer

import minigen
import minigen_course
from minigen import errors, protocols
from minigen.cli.main import add_commands_of_other_packages, app
from minigen.config import EngineConfig
from minigen.fields import default_at, option_of
from minigen.sampling.params import SamplingParams
from minigen.trace.events import EventKind
from tools.chapters import ROOT

PAGE = ROOT / "docs" / "api.md"
VARIABLES = {
    "MINIGEN_HOME": "the folder of models and compiled kernels",
    "MINIGEN_COMPILE_KERNELS": "`never` keeps a load from compiling CPU kernels (`auto`: it may)",
    "MINIGEN_API_KEY": "an API key that clients of `minigen serve` must send",
}
HEAD = """# Public names

`python -m tools.public_names` writes this page from the code. The docstrings explain each name:
`help(minigen.LLM.load)`, `minigen COMMAND --help`.
"""


def page() -> str:
    """Return the page."""
    sections = {
        "`minigen`": [_signature(name, getattr(minigen, name)) for name in minigen.__all__],
        "`minigen.LLM`": _members(minigen.LLM),
        "Options of `LLM.load` and of the commands": [
            *_fields(EngineConfig),
            *(
                f"`{each.name} = {default_at(each, place)!r}` for `minigen {place}`"
                for each in fields(EngineConfig)
                for place in option_of(each).at
            ),
        ],
        "`minigen.SamplingParams`": _fields(SamplingParams),
        "`minigen.protocols`": [
            line
            for name, each in vars(protocols).items()
            if getattr(each, "_is_protocol", False) and each.__module__.startswith("minigen.")
            for line in (f"`{name}`", *(f"  {member}" for member in _members(each)))
        ],
        "`minigen.errors`": [
            f"`{name}({each.__mro__[1].__name__})`"
            for name, each in vars(errors).items()
            if inspect.isclass(each)
        ],
        "Trace events": [f"`{each.value}`" for each in EventKind],
        "Commands": _commands(),
        "Environment variables": [f"`{name}`: {what}" for name, what in VARIABLES.items()],
        "`minigen_course`": [f"`{name}`" for name in minigen_course.__all__],
    }
    return HEAD + "".join(f"\n## {title}\n\n{_bullets(rows)}" for title, rows in sections.items())


def _bullets(rows: Iterable[str]) -> str:
    return "".join(f"{'  ' * (len(row) - len(row.lstrip()) > 0)}- {row.lstrip()}\n" for row in rows)


def _signature(name: str, thing: Any) -> str:
    if inspect.isfunction(thing) or inspect.ismethod(thing):
        names = [str(each).split(":")[0].split(" =")[0] for each in _parameters(thing)]
        return f"`{name}({', '.join(names)})`"
    return f"`{name}`"


def _parameters(function: Any) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return [each for each in found if each.name not in ("self", "cls")]


def _members(kind: type) -> list[str]:
    return [
        _signature(name, getattr(kind, name))
        for name in vars(kind)
        if name == "__call__" or not name.startswith("_")
    ]


def _fields(kind: Any) -> list[str]:
    return [f"`{each.name} = {_default(each)!r}`" for each in fields(kind)]


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _commands() -> list[str]:
    add_commands_of_other_packages()
    return list(_options("minigen", typer.main.get_command(app)))


def _options(name: str, command: Any) -> Iterable[str]:
    """Return a command's line with its arguments and options, and those of its sub-commands."""
    words = [
        " / ".join((*each.opts, *each.secondary_opts))
        if each.param_type_name == "option"
        else str(each.name).upper()
        for each in command.params
        if each.name not in ("help", "install_completion", "show_completion")
    ]
    engine = {f"--{each.name.replace('_', '-')}" for each in fields(EngineConfig)}
    all_of_them = engine <= {word.split(" / ")[0] for word in words}
    own = [word for word in words if not all_of_them or word.split(" / ")[0] not in engine]
    more = " and the options above" if all_of_them else ""
    yield f"`{name}`" + "".join(f" `{word}`" for word in own) + more
    for sub_name, sub in sorted(getattr(command, "commands", {}).items()):
        yield from _options(f"{name} {sub_name}", sub)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
