"""Write the parts of the documentation that come from the code: `python -m tools.reference`.

docs/cli.md lists every command with its arguments and options, docs/http-api.md has tables of the
fields that the server takes, and docs/architecture.md one of the packages, layer by layer. A test
fails until they are written again after a change.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from minigen.cli.main import add_commands_of_other_packages, app
from minigen.server.anthropic.schema import CountTokensRequest, MessagesRequest
from minigen.server.forms import Renamed
from minigen.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Ignored,
    OnlyDefault,
)
from minigen.server.responses_api.schema import Refused, ResponsesRequest
from tools.chapters import ROOT, replaced

DOCS = ROOT / "docs"
CLI_PAGE, HTTP_PAGE, ARCHITECTURE = DOCS / "cli.md", DOCS / "http-api.md", DOCS / "architecture.md"
FIELDS = ("<!-- fields -->", "<!-- /fields -->")
MESSAGES_FIELDS = ("<!-- fields of messages -->", "<!-- /fields of messages -->")
RESPONSES_FIELDS = ("<!-- responses fields -->", "<!-- /responses fields -->")
LAYERS = ("<!-- layers -->", "<!-- /layers -->")
MARKS = OnlyDefault | Ignored | Renamed | Refused  # of fields that are not supported
NOT_LISTED = ("help", "install_completion", "show_completion")
SHARED = "generate"  # the command whose options for loading a model stand for those of all
FIRST_SHARED = "--model"
HEAD = """# Command line

`python -m tools.reference` writes this page from the code. `minigen COMMAND --help` shows the same
in a terminal. Without `minigen` on the path, type `python -m minigen`.
"""
LOADING = """## Options of every command that loads a model

`generate`, `chat`, `demo`, `serve` and `bench` take these options. `LLM.load` has the same names
with underscores.
"""


def cli_page() -> str:
    """Return the page of the command line."""
    add_commands_of_other_packages()
    root: Any = typer.main.get_command(app)
    shared = _loading_options(root.commands[SHARED])
    known = {each.opts[0]: (each.default, each.help) for each in shared}
    sections = [HEAD, LOADING, *_table(shared)]
    for name, command in _commands("minigen", root):
        params = [each for each in command.params if each.name not in NOT_LISTED]
        loads_model = known.keys() <= {name for each in params for name in each.opts}
        own = [
            each
            for each in params
            if not loads_model or known.get(each.opts[0]) != (each.default, each.help)
        ]
        sections += [f"\n## `{name}`\n", _prose(command.help or ""), *_table(own)]
        if loads_model:
            link = "options-of-every-command-that-loads-a-model"
            sections.append(f"\nIt also takes [the options for loading a model](#{link}).")
    return "\n".join(sections) + "\n"


def _loading_options(command: Any) -> list[Any]:
    """Return the options for loading a model: they follow a command's own, from --model on."""
    places = [place for place, each in enumerate(command.params) if FIRST_SHARED in each.opts]
    return list(command.params[places[0] :])


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name; a group without a use of its own is left out."""
    if name != "minigen":
        yield name, command
    for sub_name, sub in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {sub_name}", sub)


def _prose(text: str) -> str:
    """Return a command's help; its lines of examples become a block of code."""
    parts = re.split(r"\n{2,}", re.sub(r"\[/?bold\]", "", text))
    examples = [part for part in parts if part.startswith("minigen ") and "\n" not in part]
    prose = [" ".join(part.split()) for part in parts if part not in examples]
    code = ["```\n" + "\n".join(examples) + "\n```"] if examples else []
    return "\n\n".join([*prose, *code]) + "\n"


def _table(params: list[Any]) -> list[str]:
    if not params:
        return []
    rows = [
        f"| {_cell(_written(each))} | {_cell(_default(each))} | {_cell(each.help or '')} |"
        for each in params
        if not getattr(each, "hidden", False)
    ]
    return ["| name | default | meaning |", "|---|---|---|", *rows]


def _written(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{(param.metavar or str(param.name).upper()).strip('.')}`"
    names = [*param.opts, *param.secondary_opts]
    variable = f" (or the variable `{param.envvar}`)" if param.envvar else ""
    repeatable = ", repeatable" if param.multiple and "repeatable" not in (param.help or "") else ""
    return ", ".join(f"`{name}`" for name in names) + variable + repeatable


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default in (None, "") or callable(param.default):
        return ""
    if isinstance(param.default, bool):
        return "on" if param.default else ""
    return f"`{param.default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def fields_table() -> str:
    """Return the fields of a chat and of a completion, by what the server does with them."""
    ways = {"chat": ChatRequest.model_fields, "completions": CompletionRequest.model_fields}
    return _fields_table(ways, "OpenAI's or vLLM's", "vLLM has renamed them")


def messages_fields_table() -> str:
    """Return the fields of Anthropic's messages and of their counts."""
    ways = {"messages": MessagesRequest.model_fields, "counts": CountTokensRequest.model_fields}
    return _fields_table(ways, "Anthropic's", "Anthropic has renamed them")


def _fields_table(ways: dict[str, Any], whose: str, why_renamed: str) -> str:
    names = dict.fromkeys(name for fields in ways.values() for name in fields)
    rows: list[str] = []
    others: dict[type | None, list[str]] = {OnlyDefault: [], Ignored: [], Renamed: []}
    for name in names:
        found = {way: fields[name] for way, fields in ways.items() if name in fields}
        taken = {way: field for way, field in found.items() if _mark(field) is None}
        if taken:
            meanings = {way: _cell(field.description or "") for way, field in taken.items()}
            one = next(iter(meanings.values()))
            same = set(meanings.values()) == {one}
            apart = " ".join(f"In {way}: {each}" for way, each in meanings.items())
            rows.append(f"| `{name}` | {' and '.join(taken)} | {one if same else apart} |")
        else:
            others[_mark(next(iter(found.values())))].append(f"`{name}`")
    return "\n".join(
        [
            f"| field | in | meaning, where it is not {whose} |",
            "|---|---|---|",
            *rows,
            "",
            "Accepted only with a value that changes nothing, because minigen does not support "
            f"others: {', '.join(others[OnlyDefault])}.",
            "",
            f"Refused with their newer names, because {why_renamed}: {', '.join(others[Renamed])}.",
            "",
            "Accepted and ignored, because they do not affect the answer: "
            f"{', '.join(others[Ignored])}.",
        ]
    )


def responses_fields_table() -> str:
    """Return the fields of a request to the Responses API, by what the server does with them."""
    rows: list[str] = []
    inherited: list[str] = []
    others: dict[type | None, list[str]] = {OnlyDefault: [], Refused: []}
    for name, field in ResponsesRequest.model_fields.items():
        own = name not in Generation.model_fields or name in ResponsesRequest.__annotations__
        mark = _mark(field)
        if mark is not None:
            others.setdefault(mark, []).append(f"`{name}`")
        elif own:
            rows.append(f"| `{name}` | {_cell(field.description or '')} |")
        else:
            inherited.append(f"`{name}`")
    return "\n".join(
        [
            "| field | meaning, where it is not OpenAI's |",
            "|---|---|",
            *rows,
            "",
            f"As in the other endpoints: {', '.join(inherited)}.",
            "",
            "Refused with a sentence that says what to send: "
            f"{', '.join(others[Refused] + others[Renamed])}.",
            "",
            "Accepted only with a value that changes nothing, because minigen does not support "
            f"others: {', '.join(others[OnlyDefault])}.",
        ]
    )


def _mark(field: Any) -> type | None:
    """Return what marks a field that minigen does not support, or None."""
    return next((type(m) for m in field.metadata if isinstance(m, MARKS)), None)


def layers_table() -> str:
    """Return the engine's packages from the lowest layer up, each with its docstring's sentence.

    The layers are those of the import contract in pyproject.toml.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = ["| layer | package | what it does |", "|--:|---|---|"]
    for number, layer in enumerate(reversed(layers), 1):
        for name in layer.split(" : "):
            folder = ROOT / "minigen" / name
            file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            link = f"../minigen/{name if folder.is_dir() else file.name}"
            rows.append(f"| {number} | [{name}]({link}) | {_cell(_first_paragraph(file))} |")
    return "\n".join(rows)


def _first_paragraph(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0]


def main() -> None:
    """Write the page of the command line, and the tables of the other pages."""
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    for page, marks, content in (
        (HTTP_PAGE, FIELDS, fields_table()),
        (HTTP_PAGE, MESSAGES_FIELDS, messages_fields_table()),
        (HTTP_PAGE, RESPONSES_FIELDS, responses_fields_table()),
        (ARCHITECTURE, LAYERS, layers_table()),
    ):
        text = page.read_text(encoding="utf-8")
        page.write_text(replaced(text, *marks, content), encoding="utf-8")
        print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
