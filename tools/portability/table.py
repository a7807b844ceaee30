"""The table of results in docs/portability.md, and its raw data.

The table takes hours, and a machine may not live as long. So the data keeps the last runs of each
cell, each with its commit: a run of some cells renews these, and leaves the others as they were.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.portability.environments import PARTS, ROOT, Environment
from tools.portability.store import Cell, Result

PAGE = ROOT / "docs" / "portability.md"
DATA = ROOT / "benchmarks" / "results" / "portability.json"
NOT_RUN, NOT_ASKED = "not run", "-"
KEPT = 2  # runs of a cell: the last, and the one before
Run = Mapping[str, Any]  # a result's fields, and its commit
Runs = dict[str, list[Run]]  # by the cell's name, the last first


def write(commit: str, environments: Sequence[Environment], results: Mapping[Cell, Result]) -> None:
    """Add the results of one commit to the data, and write the page."""
    runs = _read()
    for cell, result in results.items():
        earlier = [run for run in runs.get(cell.name, ()) if run["commit"] != commit]
        runs[cell.name] = [{"commit": commit} | asdict(result), *earlier][:KEPT]
    known = [cell.name for each in environments for cell in each.cells]
    runs = {name: runs[name] for name in known if name in runs}
    DATA.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(environments, runs), encoding="utf-8")


def page(environments: Sequence[Environment], runs: Mapping[str, Sequence[Run]]) -> str:
    """Return the last runs of each cell as a Markdown page."""
    rows = [
        f"| {each.name} | " + " | ".join(_shown(each, part, runs) for part in PARTS) + " |"
        for each in environments
    ]
    every = [run for of_cell in runs.values() for run in of_cell]
    machines = sorted({_machine(run["machine"]) for run in every if run["machine"]})
    return "\n".join(
        [
            "# Where minigen was tried",
            "",
            "Written by `python -m tools.portability` from fresh clones. Each cell shows its last "
            f"{KEPT} runs, the latest first, each with its commit; "
            "[portability.json](../benchmarks/results/portability.json) has their times and "
            "machines.",
            "",
            f"| environment | {' | '.join(PARTS)} |",
            "|" + "---|" * (len(PARTS) + 1),
            *rows,
            "",
            "## Environments",
            "",
            *(f"- `{each.name}`: {each.about}." for each in environments),
            "",
            "## Machines",
            "",
            *(f"- {machine}." for machine in machines),
            "",
        ]
    )


def _read() -> Runs:
    """Return the runs that the data has; none if it is missing."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def _shown(environment: Environment, part: str, runs: Mapping[str, Sequence[Run]]) -> str:
    if part not in environment.parts:
        return NOT_ASKED
    of_cell = runs.get(Cell(environment.name, part).name, ())
    return "<br>".join(_line(run) for run in of_cell) or NOT_RUN


def _line(run: Run) -> str:
    result = Result(**{name: run[name] for name in run if name != "commit"})
    return f"{result}, {run['commit'][:7]}".replace("|", "\\|")


def _machine(facts: Mapping[str, Any]) -> str:
    known = {"cpu", "cores", "system"}
    versions = ", ".join(f"{name} {facts[name]}" for name in facts if name not in known)
    return f"{facts.get('cpu')}, {facts.get('cores')} cores, {facts.get('system')}; {versions}"
