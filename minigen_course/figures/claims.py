"""Claims about inference that are often made, judged by what a notebook computed.

An outcome is computed, by `within` or `holds`, so that it cannot contradict its number.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import display

from minigen.errors import OptionError

HELD, MORE, LESS = "held", "more than claimed", "less than claimed"
DID_NOT_HOLD, NOT_TESTED = "did not hold", "not tested here"
OUTCOMES = (HELD, MORE, LESS, DID_NOT_HOLD, NOT_TESTED)
KEY = "minigen_claims"
LINK = re.compile(r"\[([^]]+)\]\((https?://[^)\s]+)\)")
CODE = re.compile("`([^`]+)`")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
COMMON = "often heard"  # the source of a claim that has no single one


def within(value: float, low: float, high: float) -> str:
    """Return the outcome of a claim that a value lies between two bounds, which count as inside.

    >>> within(2.5, 2, 4), within(24, 2, 4), within(1.1, 2, 4)
    ('held', 'more than claimed', 'less than claimed')
    """
    if not low <= high:
        raise ValueError(f"the bounds are from low to high, not from {low} to {high}.")
    return LESS if value < low else MORE if value > high else HELD


def holds(condition: object) -> str:
    """Return the outcome of a claim that is either true or not.

    >>> holds(2 > 1), holds(2 < 1)
    ('held', 'did not hold')
    """
    return HELD if condition else DID_NOT_HOLD


@dataclass(frozen=True)
class Claim:
    """A claim, what was found here, the outcome (one of `OUTCOMES`), and why.

    `within` and `holds` compute the outcome; `NOT_TESTED` is for what this machine cannot measure.
    Write a measured value with `mark(value, unit)`, and set `measured` if the outcome depends on
    one, so that it may differ on another machine. `source` is a Markdown link to who makes the
    claim; without one, the claim counts as often heard.
    """

    statement: str
    found: str
    outcome: str
    because: str
    source: str = ""
    measured: bool = False

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, not {self.outcome!r}.")
        if self.source and not LINK.search(self.source):
            raise ValueError(f"source must be a link, [name](https://...), not {self.source!r}.")


def verdicts(chapter: str, *claims: Claim) -> None:
    """Show a chapter's verdicts as a table; `minigen claims` gathers those of all chapters."""
    metadata = {KEY: {"chapter": chapter, "claims": [asdict(each) for each in claims]}}
    text = "\n".join(f"{_marked(each)}: {each.statement} ({each.found})" for each in claims)
    display({"text/plain": text, "text/html": _html(claims)}, metadata=metadata, raw=True)


def gathered(folder: Path) -> Iterator[tuple[str, Claim]]:
    """Yield the (chapter, claim) pairs in the outputs of a folder's notebooks, in order.

    Raises `OptionError` for a file that is no notebook.
    """
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        try:
            found = _claims_in(json.loads(path.read_text(encoding="utf-8-sig")))
        except UNREADABLE as error:
            raise OptionError(f"{path} cannot be read as a notebook ({error}).") from error
        yield from found


def _claims_in(notebook: Any) -> list[tuple[str, Claim]]:
    outputs = [each for cell in notebook["cells"] for each in cell.get("outputs", ())]
    tables = [each.get("metadata", {}).get(KEY) or {"claims": ()} for each in outputs]
    return [(each["chapter"], Claim(**claim)) for each in tables for claim in each["claims"]]


def _marked(each: Claim) -> str:
    return f"⟨{each.outcome}⟩" if each.measured else each.outcome


def _html(claims: tuple[Claim, ...]) -> str:
    names = ("claim", "who says it", "found here", "verdict", "why")
    head = "".join(f'<th style="text-align:left">{each}</th>' for each in names)
    rows = "".join(f"<tr>{_cells(each)}</tr>" for each in claims)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cells(each: Claim) -> str:
    source = LINK.sub(r'<a href="\2">\1</a>', escape(each.source)) or COMMON
    judged = (each.found, _marked(each), each.because)
    texts = (_words(each.statement), source, *map(_words, judged))
    return "".join(f'<td style="text-align:left">{text}</td>' for text in texts)


def _words(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", escape(text))
