"""Text in a notebook: source code of the package, measured values, and verdicts on claims.

A comparison of notebook outputs skips the values that are marked as measured.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import Code, display

MONOSPACE = '<pre style="font-family: monospace">'  # exported pages lose the font


def show(*objects: Any) -> None:
    """Show the source of functions, classes or modules of the package, one after another.

    Raises `TypeError` for an object without Python source.
    """
    for each in objects:
        where = inspect.getmodule(each)
        name = getattr(each, "__qualname__", "")
        head = f"# {where.__name__}.{name}\n" if where is not None and name else ""
        source = head + inspect.getsource(each).rstrip()
        html = Code(source, language="python")._repr_html_().replace("<pre>", MONOSPACE)
        display({"text/plain": source, "text/html": html}, raw=True)


def measured(name: str, value: float, unit: str = "", digits: int = 3) -> None:
    """Print a measured value, marked as one, with `digits` significant digits.

    `notebooks/nbval_sanitize.cfg` knows the mark, because the value differs on every machine.

    >>> measured("decode", 28.1234, "tokens/s")
    decode: ⟨28.1 tokens/s⟩
    """
    print(f"{name}: {mark(value, unit, digits)}")


def mark(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a measured value as text, inside the marks.

    >>> mark(0.5, "s")
    '⟨0.500 s⟩'
    """
    return f"⟨{significant(value, digits)}{' ' + unit if unit else ''}⟩"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, commas at thousands, no exponent.

    >>> [significant(each) for each in (0.0012345, 3.14159, 1234567.0)]
    ['0.00123', '3.14', '1,230,000']
    """
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - len(f"{abs(int(rounded))}".lstrip("0")))
    if abs(rounded) < 1:
        places = digits - 1 - int(f"{rounded:e}".split("e")[1])
    return f"{rounded:,.{places}f}"


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the least seconds that `run` takes in `repeats` calls, after one warm-up call."""
    run()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


OUTCOMES = ("held", "held within bounds", "did not hold")
KEY = "minigen_claims"


@dataclass(frozen=True)
class Claim:
    """A common claim, what was measured, the outcome (one of `OUTCOMES`), and why.

    Write a measured value with `mark(value, unit)`, so that it may differ on another machine.
    """

    statement: str
    found: str
    outcome: str
    because: str

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, not {self.outcome!r}.")


def verdicts(chapter: str, *claims: Claim) -> None:
    """Show a chapter's verdicts as a table; `minigen claims` gathers those of all chapters."""
    metadata = {KEY: {"chapter": chapter, "claims": [asdict(each) for each in claims]}}
    text = "\n".join(f"{each.outcome}: {each.statement} ({each.found})" for each in claims)
    display({"text/plain": text, "text/html": _html(claims)}, metadata=metadata, raw=True)


def gathered(folder: Path) -> Iterator[tuple[str, Claim]]:
    """Yield the (chapter, claim) pairs in the outputs of a folder's notebooks, in order."""
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for output in (each for cell in notebook["cells"] for each in cell.get("outputs", ())):
            found = output.get("metadata", {}).get(KEY)
            if found is not None:
                yield from ((found["chapter"], _read_claim(each)) for each in found["claims"])


def _read_claim(stored: dict[str, str]) -> Claim:
    """Return a stored claim; notebooks from before have another key for its statement."""
    others = {name: stored[name] for name in ("found", "outcome", "because")}
    (statement,) = (text for name, text in stored.items() if name not in others)
    return Claim(statement, **others)


def _html(claims: tuple[Claim, ...]) -> str:
    names = ("claim", "found here", "verdict", "why")
    head = "".join(f'<th style="text-align:left">{each}</th>' for each in names)
    rows = "".join(f"<tr>{_cells(each)}</tr>" for each in claims)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cells(each: Claim) -> str:
    texts = (each.statement, each.found, each.outcome, each.because)
    return "".join(f'<td style="text-align:left">{escape(text)}</td>' for text in texts)
