"""What practitioners' guides say, measured here, and what became of it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from IPython.display import display

OUTCOMES = ("held", "held within bounds", "did not hold")
KEY = "minigen_claims"


@dataclass(frozen=True)
class Claim:
    """A claim as it is told, what was measured, its outcome (one of `OUTCOMES`), and why.

    Write a measured value as `mark(value, unit)` does, so that another machine's may differ.
    """

    told: str
    found: str
    outcome: str
    because: str

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, not {self.outcome!r}.")


def verdicts(chapter: str, *claims: Claim) -> None:
    """Show a chapter's verdicts as a table; `minigen claims` gathers those of all chapters."""
    told = {KEY: {"chapter": chapter, "claims": [asdict(each) for each in claims]}}
    text = "\n".join(f"{each.outcome}: {each.told} ({each.found})" for each in claims)
    display({"text/plain": text, "text/html": _html(claims)}, metadata=told, raw=True)


def gathered(folder: Path) -> Iterator[tuple[str, Claim]]:
    """The (chapter, claim) pairs in the outputs of a folder's notebooks, in order."""
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for output in (each for cell in notebook["cells"] for each in cell.get("outputs", ())):
            found = output.get("metadata", {}).get(KEY)
            if found is not None:
                yield from ((found["chapter"], Claim(**each)) for each in found["claims"])


def _html(claims: tuple[Claim, ...]) -> str:
    names = ("as it is told", "found here", "verdict", "why")
    head = "".join(f'<th style="text-align:left">{each}</th>' for each in names)
    rows = "".join(f"<tr>{_cells(each)}</tr>" for each in claims)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cells(each: Claim) -> str:
    texts = (each.told, each.found, each.outcome, each.because)
    return "".join(f'<td style="text-align:left">{escape(text)}</td>' for text in texts)
