"""The table of results in docs/portability.md, and its raw data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.portability.environments import PARTS, ROOT, Environment
from tools.portability.store import Cell, Result

PAGE = ROOT / "docs" / "portability.md"
DATA = ROOT / "benchmarks" / "results" / "portability.json"
NOT_RUN, NOT_ASKED = "not run", "-"
Results = Mapping[Cell, Result]


def page(commit: str, environments: Sequence[Environment], results: Results) -> str:
    """Return the results of one commit as a Markdown page."""
    rows = [
        f"| {each.name} | " + " | ".join(_shown(each, part, results) for part in PARTS) + " |"
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
            f"| environment | {' | '.join(PARTS)} |",
            "|" + "---|" * (len(PARTS) + 1),
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


def _shown(environment: Environment, part: str, results: Results) -> str:
    if part not in environment.parts:
        return NOT_ASKED
    return str(results.get(Cell(environment.name, part)) or NOT_RUN).replace("|", "\\|")


def _machine(facts: Mapping[str, Any]) -> str:
    known = {"cpu", "cores", "system"}
    versions = ", ".join(f"{name} {facts[name]}" for name in facts if name not in known)
    return f"{facts.get('cpu')}, {facts.get('cores')} cores, {facts.get('system')}; {versions}"
