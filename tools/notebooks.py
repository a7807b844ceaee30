"""Update notebooks from their sources and run them: `python -m tools.notebooks`.

    python -m tools.notebooks [STEM ...]           refill, update and execute (all, or these)
    python -m tools.notebooks --check [STEM ...]   run all of them again, and compare every output

The source of a pair is the .py file (percent format); cells and outputs are written to the .ipynb.
Cells that begin with `# = minigen...`, `# exercise: minigen...` or `# hunt: minigen...` are
refilled from the package.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

from minigen import hub
from minigen.config import DEFAULT_MODEL
from minigen.errors import DownloadError
from minigen.progress import shown_progress
from minigen_course.grading.exercise import stub_of
from minigen_course.grading.hunt import cell_of
from minigen_course.grading.stub import mirror
from minigen_course.lab.float_weights import float_file
from tools.chapters import ROOT
from tools.notebook_checks import CELL_SECONDS, check_all, over_budget, timing

FOLDER = ROOT / "notebooks"
MARKED = re.compile(r"# (=|exercise:|hunt:) (minigen[\w.]+)$")
FILLED = {"=": mirror, "exercise:": stub_of, "hunt:": cell_of}
CELL = "# %%"


def refilled(source: str) -> str:
    """Return a source whose mirrored cells and exercise stubs are refilled from the package."""
    cells = re.split(rf"(?m)^(?={CELL})", source)
    return "".join(_refilled_cell(cell) for cell in cells)


def _refilled_cell(cell: str) -> str:
    head, _, body = cell.partition("\n")
    found = MARKED.match(body.partition("\n")[0])
    if found is None:
        return cell
    filled = FILLED[found[1]](found[2])
    return f"{head}\n{filled}{cell[len(cell.rstrip()) :]}"


def main() -> None:
    """Update and execute the pairs in order and stop at the first failure, or check them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stems", nargs="*", help="for example 16_sampling, or 16; default: all")
    parser.add_argument(
        "--check", action="store_true", help="run again and compare with the stored outputs"
    )
    parser.add_argument(
        "--untimed", action="store_true", help="check outputs alone: for slow or busy machines"
    )
    parser.add_argument("--report", type=Path, help="file for the JUnit report of a check")
    options = parser.parse_args()
    sources = [
        path
        for path in sorted(FOLDER.glob("[0-9]*.py"))
        if not options.stems or path.stem.startswith(tuple(options.stems))
    ]
    if not sources:
        sys.exit("No notebook matches these names; see notebooks/ for the names.")
    # Lines about compiling and fetching would be among the outputs, which are compared.
    os.environ["MINIGEN_COMPILE_KERNELS"] = "never"
    fetch_models()
    if options.check:
        notebooks = [source.with_suffix(".ipynb") for source in sources]
        sys.exit(check_all(notebooks, options.report, options.untimed))
    for source in sources:
        started, cpu_started = time.perf_counter(), _cpu_seconds_of_children()
        _update(source)
        cpu_seconds = _cpu_seconds_of_children() - cpu_started
        print(timing(source, time.perf_counter() - started, cpu_seconds, 1), flush=True)
        failure = over_budget(cpu_seconds)
        if failure:
            sys.exit(f"{source.stem} {failure}.")


def fetch_models() -> None:
    """Fetch the models of the notebooks that are not here yet; without a network, say so."""
    try:
        with shown_progress() as progress:
            hub.resolve(DEFAULT_MODEL, progress=progress)
        float_file()
    except DownloadError as error:
        print(error, flush=True)  # only notebooks that need the model fail


def _cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all finished child processes, kernels included; 0 on Windows."""
    times = os.times()
    return times.children_user + times.children_system


def _update(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    if refilled(text) != text:
        source.write_text(refilled(text), encoding="utf-8")
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{source.stem}-{number}"
        cell["metadata"].pop("lines_to_next_cell", None)
    NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        store_widget_state=False,  # where no kernel runs, pictures replace the widgets
        record_timing=False,
    ).execute()
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = _joined(cell.get("outputs", []))
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def _joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with consecutive pieces of the same stream joined."""
    joined: list[Any] = []
    for output in outputs:
        stream = output["name"] if output["output_type"] == "stream" else None
        if stream is not None and joined and joined[-1].get("name") == stream:
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    main()
