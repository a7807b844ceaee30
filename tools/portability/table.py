"""The table of results in docs/portability.md, and its raw data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.portability.environments import NOTEBOOKS, PARTS, ROOT, Environment
from tools.portability.store import GREEN, NOT_TRIED, RED, Cell, Result

PAGE = ROOT / "docs" / "portability.md"
DATA = ROOT / "benchmarks" / "results" / "portability.json"
NOT_RUN, NOT_ASKED = "not run", "-"
COLUMNS = (*PARTS, "notebooks")
Results = Mapping[Cell, Result]


def page(commit: str, environments: Sequence[Environment], results: Results) -> str:
    """Return the results of one commit as a Markdown page."""
    rows = [
        f"| {each.name} | " + " | ".join(_shown(each, column, results) for column in COLUMNS) + " |"
        for each in environments
    ]
    machines = sorted({_machine(result.machine) for result in results.values() if result.machine})
    return "\n".join(
        [
            "# Where minigen was tried",
            "",
            "Written by `python -m tools.portability` from fresh clones of one commit; "
            "[portability.json](../benchmarks/results/portability.json) has every cell.",
            "",
            f"Commit: {commit}.",
            *(f"Machine: {machine}." for machine in machines),
            "",
            f"| environment | {' | '.join(COLUMNS)} |",
            "|" + "---|" * (len(COLUMNS) + 1),
            *rows,
            "",
            "## Environments",
            "",
            *(f"- `{each.name}`: {each.about}." for each in environments),
            "",
        ]
    )


def write(commit: str, environments: Sequence[Environment], results: Results) -> None:
    """Write the page and its data."""
    PAGE.write_text(page(commit, environments, results), encoding="utf-8")
    cells = {cell.name: asdict(result) for cell, result in results.items()}
    data = json.dumps({"commit": commit, "cells": cells}, indent=2)
    DATA.write_text(data + "\n", encoding="utf-8")


def _shown(environment: Environment, column: str, results: Results) -> str:
    parts = NOTEBOOKS if column == "notebooks" else (column,)
    cells = [cell for cell in environment.cells if cell.part in parts]
    if not cells:
        return NOT_ASKED
    found = [results.get(cell) for cell in cells]
    if len(cells) == 1:
        return str(found[0] or NOT_RUN).replace("|", "\\|")
    return _many(cells, found).replace("|", "\\|")


def _many(cells: Sequence[Cell], found: Sequence[Result | None]) -> str:
    """Return several cells as one."""
    green = sum(result is not None and result.verdict == GREEN for result in found)
    if green == len(cells):
        return f"{GREEN} ({green})"
    shown = [f"{green} of {len(cells)} {GREEN}"] if green else []
    for verdict in (RED, NOT_TRIED):
        reasons: dict[str, None] = {}
        for cell, result in zip(cells, found, strict=True):
            if result is not None and result.verdict == verdict:
                reasons[f"{cell.part} ({result.detail})" if verdict == RED else result.detail] = (
                    None
                )
        if reasons:
            shown.append(f"{verdict}: {', '.join(reasons)}")
    missing = sum(result is None for result in found)
    return "; ".join([*shown, *([f"{missing} {NOT_RUN}"] if missing else [])])


def _machine(facts: Mapping[str, Any]) -> str:
    known = {"cpu", "cores", "system"}
    versions = ", ".join(f"{name} {facts[name]}" for name in facts if name not in known)
    return f"{facts.get('cpu')}, {facts.get('cores')} cores, {facts.get('system')}; {versions}"
