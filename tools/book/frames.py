"""The frames of explorables: which are wanted, and a run of a notebook that draws them."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.book.recorder import Grid
from tools.chapters import ROOT

WANTED = Path(__file__).with_name("explorables.toml")
CELL_SECONDS = 300


@dataclass(frozen=True)
class Control:
    """What the reader sets: a slider over `values` or a choice of one; `at` is the first index."""

    name: str
    values: list[str]
    at: int
    slider: bool


def wanted(chapter: str) -> dict[str, Grid]:
    """Return the grids of a chapter's explorables, by the figure's number."""
    grids: dict[str, Grid] = tomllib.loads(WANTED.read_text(encoding="utf-8"))
    return {number: grid for number, grid in grids.items() if number.startswith(f"{chapter}.")}


def record(notebook: Path, grids: dict[str, Grid], folder: Path) -> dict[str, list[Control]]:
    """Run a notebook as far as its last wanted explorable; return the controls of each.

    The frames are stored in `folder`/NN.k, one file for each combination of values: their indices,
    joined by "-". Raises `ValueError` for a figure that the notebook does not have.
    """
    cells = nbformat.read(notebook, as_version=4)
    sources = [cell.source if cell.cell_type == "code" else "" for cell in cells.cells]
    places = {
        number: at
        for number in grids
        for at, source in enumerate(sources)
        if re.search(rf'^ *(number=)?"{re.escape(number)}",|, "{re.escape(number)}"', source, re.M)
    }
    missing = sorted(set(grids) - set(places))
    if missing:
        raise ValueError(f"{notebook.name} has no explorable numbered {', '.join(missing)}.")
    first = nbformat.v4.new_code_cell(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.book.recorder import install\n"
        f"install({str(folder.resolve())!r}, {grids!r})"
    )
    cells.cells = [first, *cells.cells[: max(places.values()) + 1]]
    NotebookClient(
        cells,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(notebook.parent)}},
        store_widget_state=False,
    ).execute()
    return {number: _controls(folder / number / "controls.json") for number in grids}


def _controls(path: Path) -> list[Control]:
    return [Control(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
