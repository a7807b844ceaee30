"""Try other projects' clients: `python -m tools.clients`, or `make test-clients`.

    python -m tools.clients                    install the clients, run all scenarios, record them
    python -m tools.clients --only langchain   only clients whose name contains this; no record
    python -m tools.clients --setup-only       only install: a later run needs no network
    python -m tools.clients --page             only write the table again, from the record

Each client has an environment of its own beside `.venv`, and runs its scenarios (tests/clients)
unchanged against `minigen serve` with the default model. While they run, each connection to another
machine is refused, and fails the scenario. A whole run writes benchmarks/results/clients.json and
the table in docs/http-api.md, whatever the results; the exit code is 1 if a scenario failed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from benchmarks.common import environment
from minigen import hub
from tools.clients import table
from tools.clients.environments import CLIENTS, Client, SetupError, set_up, versions_of
from tools.clients.running import ServerError, outcomes, served


def main(arguments: Sequence[str] | None = None) -> None:
    """Set up, run, print and record; exit with 1 if any scenario failed."""
    options = _parser().parse_args(arguments)
    if options.page:
        table.write_page()
        return
    chosen = [each for each in CLIENTS if options.only.lower() in each.name.lower()]
    if not chosen:
        names = ", ".join(each.name for each in CLIENTS)
        sys.exit(f"There is no client {options.only!r}; choose from {names}.")
    try:
        for client in chosen:
            set_up(client)
        if options.setup_only:
            return
        record = tried(chosen)
    except (SetupError, ServerError) as error:
        sys.exit(str(error))
    print(table.as_text(record))
    if len(chosen) == len(CLIENTS):
        table.write(record)
        table.write_page()
        print(f"written: {table.DATA}, {table.PAGE}")
    if failed := table.num_failed(record):
        sys.exit(f"{failed} scenarios failed; pytest's output above says why.")


def tried(clients: Sequence[Client]) -> dict[str, Any]:
    """Run the clients' scenarios against one server, and return the record."""
    model = hub.DEFAULT_MODEL
    with served(model) as url:
        results = [
            {
                "client": client.name,
                "versions": versions_of(client),
                "scenarios": [asdict(each) for each in outcomes(client, url, model)],
            }
            for client in clients
        ]
    return {
        "environment": environment(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "minigen": version("minigen"),
        "model": model,
        "clients": results,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME", help="a part of the clients' names")
    parser.add_argument("--setup-only", action="store_true", help="install, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the table from the record")
    return parser


if __name__ == "__main__":
    main()
