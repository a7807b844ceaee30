"""The record of a run, benchmarks/results/clients.json, as text and as a table of docs/http-api.md.

A record has the day, the machine, minigen's version, the model, and for each client its packages'
versions and its scenarios, each with its result.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tools.chapters import ROOT, replaced
from tools.clients.running import FAILED, PASSED

DATA = ROOT / "benchmarks" / "results" / "clients.json"
PAGE = ROOT / "docs" / "http-api.md"
BEGIN, END = "<!-- clients -->", "<!-- /clients -->"
Record = Mapping[str, Any]


def as_text(record: Record) -> str:
    """Return one line per scenario: client, version, scenario, result."""
    rows = [
        (each["client"], version_of(each), one["scenario"], f"{one['result']}  {one['why']}")
        for each in record["clients"]
        for one in each["scenarios"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    )


def as_markdown(record: Record) -> str:
    """Return a row per client, with its scenarios by their results, and where that was tried."""
    rows = [
        f"| {each['client']} | {_packages(each)} | {_scenarios(each)} | {_count(each)} |"
        for each in record["clients"]
    ]
    machine = record["environment"]
    return "\n".join(
        [
            "| client | packages | scenarios | passed |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Tried on {record['date']} with minigen {record['minigen']} and {record['model']}, "
            f"Python {machine['python']}, {machine['system']}",
            "([clients.json](../benchmarks/results/clients.json)).",
        ]
    )


def version_of(client: Mapping[str, Any]) -> str:
    """Return the version of a client's own package, which is the first."""
    return str(next(iter(client["versions"].values())))


def num_failed(record: Record) -> int:
    """Return the number of scenarios that failed."""
    return sum(one["result"] == FAILED for each in record["clients"] for one in each["scenarios"])


def _packages(client: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in client["versions"].items())


def _scenarios(client: Mapping[str, Any]) -> str:
    shown = [
        one["scenario"] if one["result"] == PASSED else f"**{one['result']}:** {one['scenario']}"
        for one in client["scenarios"]
    ]
    return "<br>".join(shown).replace("|", "\\|")


def _count(client: Mapping[str, Any]) -> str:
    counts = Counter(one["result"] for one in client["scenarios"])
    return f"{counts[PASSED]} of {counts.total()}"


def read() -> Record:
    """Return the record of the last whole run."""
    found: Record = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def write(record: Record) -> None:
    """Write the record."""
    DATA.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_page() -> None:
    """Write the table into the document, from the record."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replaced(text, BEGIN, END, as_markdown(read())), encoding="utf-8")
