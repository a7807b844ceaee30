"""All options as docs/options.md: `python -m tools.options` writes the page from their fields."""

from dataclasses import MISSING, Field, fields
from inspect import formatannotation
from typing import Any

from minigen.config import EngineConfig
from minigen.fields import option_of
from minigen.sampling.params import SamplingParams
from minigen.server.middleware.limits import Limits
from tools.chapters import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options

`python -m tools.options` writes this page from the fields of three classes. On the command line,
`max_num_seqs` is `--max-num-seqs`.
"""
CONFIGS = {
    "Options of the engine": (
        "`LLM.load` and all commands that load a model take them.",
        EngineConfig,
    ),
    "Sampling parameters": ("`SamplingParams` takes them for each request.", SamplingParams),
    "Limits of the server": ("`minigen serve` takes them.", Limits),
}
COLUMNS = ("option", "type", "default", "must be", "meaning")


def page() -> str:
    """Return the page."""
    return HEAD + "".join(
        f"\n## {title}\n\n{text}\n\n{table(config)}" for title, (text, config) in CONFIGS.items()
    )


def table(config: Any) -> str:
    """Return a table of the fields of a config."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(each) for each in fields(config))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(each: "Field[Any]") -> tuple[str, ...]:
    own = option_of(each)
    default = each.default if each.default_factory is MISSING else each.default_factory()
    elsewhere = "".join(
        f", at {place} {_code(repr(value))}" for place, value in own.at.items() if value != default
    )
    kind = formatannotation(each.type).replace("typing.", "").replace("collections.abc.", "")
    shown = f"{_code(repr(default))}{elsewhere}"
    return _code(each.name), _code(kind), shown, own.values.text, own.help


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
