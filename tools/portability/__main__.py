"""Try environments and parts, one cell after the other: `python -m tools.portability`.

    python -m tools.portability                      try all cells that have no result yet
    python -m tools.portability --list               show all cells and their results
    python -m tools.portability --cell long/tests    try one
    python -m tools.portability --environments avx2 avx512 --parts notebooks

Clones are of HEAD. Each result is stored immediately, by commit, in build/portability: after
Ctrl-C, the same command continues. All cells take hours, one cell takes minutes. When all cells
have a result (or with --write), it is added to docs/portability.md and to
benchmarks/results/portability.json, which keep the last two runs of each cell.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.chapters import BUILD
from tools.portability import table
from tools.portability.environments import PARTS, ROOT, Environment, environments
from tools.portability.places import Places, commit_of, has_changes
from tools.portability.store import RED, Cell, Result, Store

STATE = BUILD / "portability"
USER = os.getuid() if hasattr(os, "getuid") else "user"
FOLDER = Path(tempfile.gettempdir()) / f"minigen-portability-{USER}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the chosen cells; exit with 1 if any is red."""
    options = _parser().parse_args(arguments)
    commit = commit_of(ROOT)
    folder = options.folder.expanduser().resolve() / commit[:12]
    every = environments(folder)
    cells = _chosen(every, options)
    store = Store(STATE, commit)
    if options.again:
        store.forget(cells)
    _print_other_commits(store)
    if options.list:
        for cell in cells:
            print(f"{cell.name:<32} {store.get(cell) or table.NOT_RUN}")
        return
    if has_changes(ROOT):
        print("Uncommitted changes are not tried: clones are of HEAD.", flush=True)
    selected = bool(options.pytest or options.notebooks)
    places = Places(folder, commit, shlex.split(options.pytest), options.notebooks)
    named = {each.name: each for each in every}

    def run(cell: Cell) -> Result:
        return places.run(named[cell.environment], cell, store.log(cell))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run_cells(cells, None if selected else store, run)
    except KeyboardInterrupt:
        print("\nStopped. Finished results are stored; the same command continues.", flush=True)
        sys.exit(130)
    if not options.keep:
        _remove_green(places, cells, results, named)
    red = [cell.name for cell in cells if results[cell].verdict == RED]
    kept = {cell: found for each in every for cell in each.cells if (found := store.get(cell))}
    if not selected and (options.write or len(kept) == sum(len(e.cells) for e in every)):
        table.write(commit, every, kept)
        print(f"written: {table.PAGE}, {table.DATA}")
    if red:
        sys.exit(f"red: {', '.join(red)} (the full output is in {store.log(cells[0]).parent})")


def run_cells(
    cells: Sequence[Cell], store: Store | None, run: Callable[[Cell], Result]
) -> dict[Cell, Result]:
    """Return the results of the cells; run those that `store` does not have yet, and store them."""
    results: dict[Cell, Result] = {}
    for number, cell in enumerate(cells, 1):
        print(f"{number:>{len(str(len(cells)))}}/{len(cells)} {cell.name} ", end="", flush=True)
        known = store.get(cell) if store else None
        results[cell] = known or run(cell)
        if store and known is None:
            store.put(cell, results[cell])
        taken = "stored earlier" if known else f"{results[cell].seconds:.0f} s"
        print(f"{results[cell]}, {taken}", flush=True)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.portability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show cells and results, run nothing")
    parser.add_argument("--cell", nargs="+", default=[], metavar="NAME", help="such as long/tests")
    parser.add_argument("--environments", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        *("--parts",),
        nargs="+",
        default=[],
        metavar="NAME",
        help=", ".join(PARTS),
    )
    parser.add_argument("--again", action="store_true", help="drop the results of these cells")
    parser.add_argument("--keep", action="store_true", help="keep the clones of green cells too")
    parser.add_argument(
        "--write",
        action="store_true",
        help="add these results to the table though others are missing",
    )
    parser.add_argument(
        "--pytest", default="", metavar="ARGS", help="for the tests; such results are not stored"
    )
    alone = "these notebooks alone; such results are not stored"
    parser.add_argument("--notebooks", nargs="+", default=[], metavar="13", help=alone)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the clones")
    return parser


def _chosen(every: Sequence[Environment], options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options name, in the order of the table."""
    cells = [cell for each in every for cell in each.cells]
    _refuse("cell", options.cell, [cell.name for cell in cells])
    _refuse("environment", options.environments, [each.name for each in every])
    _refuse("part", options.parts, PARTS)
    return [
        cell
        for cell in cells
        if (not options.cell or cell.name in options.cell)
        and (not options.environments or cell.environment in options.environments)
        and (not options.parts or cell.part in options.parts)
    ]


def _refuse(what: str, named: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in named if name not in known]
    if unknown:
        shown = "--list shows all" if what == "cell" else f"choose from {', '.join(known)}"
        sys.exit(f"There is no {what} {', '.join(unknown)}; {shown}.")


def _print_other_commits(store: Store) -> None:
    others = ", ".join(commit[:12] for commit in store.others())
    if others:
        print(
            f"Results of other commits ({others}) are stored separately, and not shown.", flush=True
        )


def _remove_green(
    places: Places,
    cells: Sequence[Cell],
    results: dict[Cell, Result],
    named: dict[str, Environment],
) -> None:
    """Remove the clones that have no red cell, and print where the others are."""
    for place in dict.fromkeys(named[cell.environment].place for cell in cells):
        here = [cell for cell in cells if named[cell.environment].place == place]
        if any(results[cell].verdict == RED for cell in here):
            print(f"kept: {places.folder / place}")
        else:
            places.remove(place)


if __name__ == "__main__":
    main()
