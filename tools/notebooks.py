"""Bring notebooks up to date with their sources and run them: `python -m tools.notebooks`.

    python -m tools.notebooks [STEM ...]           refill, update and execute (all, or these)
    python -m tools.notebooks --check [STEM ...]   run them again, and compare every output

The source of a pair is the .py file (percent format); cells and outputs go into the .ipynb. Cells
that begin with `# = minigen...`, `# exercise: minigen...` or `# hunt: minigen...` are refilled from
the package.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

from minigen.machine import num_cores
from minigen.teach.hunting import cell_of
from minigen.teach.stubs import mirror, stub
from tools.chapters import ROOT

FOLDER = ROOT / "notebooks"
MARKED = re.compile(r"# (=|exercise:|hunt:) (minigen[\w.]+)$")
FILLED = {"=": mirror, "exercise:": stub, "hunt:": cell_of}
CELL = "# %%"
CELL_SECONDS = 120
BUDGET_SECONDS = 60
AT_ONCE = 2
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
NBVAL = [
    *("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:tests.split", "-o", "addopts="),
    *("-p", "no:schemathesis"),  # a second to import
    *("--nbval", "--nbval-current-env", "--nbval-cell-timeout", str(CELL_SECONDS)),
    *("--nbval-kernel-startup-timeout", "60"),
    *("--nbval-sanitize-with", str(FOLDER / "nbval_sanitize.cfg")),
]


def refilled(source: str) -> str:
    """A notebook's source whose mirrored cells and exercise stubs are the package's."""
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
    """Update and execute the pairs in order, or check them; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stems", nargs="*", help="as in 16_sampling, or 16; all if none is given")
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    options = parser.parse_args()
    sources = [
        path
        for path in sorted(FOLDER.glob("[0-9]*.py"))
        if not options.stems or path.stem.startswith(tuple(options.stems))
    ]
    if not sources:
        sys.exit("There is no such notebook.")
    if options.check:
        _check_all(sources)
        return
    for source in sources:
        begun = time.perf_counter()
        _update(source)
        _tell(source, time.perf_counter() - begun, 1)


@dataclass(frozen=True)
class Run:
    """A pair that was run and compared; `said` is all that was printed on the way."""

    source: Path
    seconds: float
    failed: bool
    said: str


def _check_all(sources: list[Path]) -> None:
    """Check pairs two at a time, in kernels that have half of the processors each."""
    at_once = min(AT_ONCE, len(sources), num_cores())
    threads = str(num_cores() // at_once)
    environment = os.environ | (dict.fromkeys(THREADS, threads) if at_once > 1 else {})
    with ThreadPoolExecutor(at_once) as pool:
        runs = [pool.submit(_check, source, environment) for source in sources]
        try:
            for run in as_completed(runs):
                _judge(run.result(), at_once)
        finally:
            pool.shutdown(cancel_futures=True)


def _check(source: Path, environment: Mapping[str, str]) -> Run:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pytest", *NBVAL, str(source.with_suffix(".ipynb"))]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds = time.perf_counter() - begun
    return Run(source, seconds, run.returncode != 0, run.stdout.decode(errors="replace"))


def _judge(run: Run, at_once: int) -> None:
    print(run.said, end="", flush=True)
    if run.failed:
        sys.exit(f"{run.source.stem} failed; the lines above name the cell.")
    _tell(run.source, run.seconds, at_once)


def _tell(source: Path, seconds: float, at_once: int) -> None:
    """Print what a pair took; end if that is twice what it may take, as on a busy machine."""
    over = f"  over its {BUDGET_SECONDS} s" if seconds > BUDGET_SECONDS * at_once else ""
    print(f"{source.stem:<20} {seconds:5.1f} s{over}", flush=True)
    if seconds > 2 * BUDGET_SECONDS:
        sys.exit(f"{source.stem} takes {seconds:.0f} s; its budget is {BUDGET_SECONDS} s.")


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
        store_widget_state=False,  # pictures stand in for widgets where no kernel runs
        record_timing=False,
    ).execute()
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = _joined(cell.get("outputs", []))
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs with what was printed piece by piece put together."""
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
