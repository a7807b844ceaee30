"""Start minigen's server, run each client's scenarios against it, and read what came of them."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools.chapters import ROOT
from tools.clients.environments import Client, python_of
from tools.tally import THE_RUN, tally

SCENARIOS = ROOT / "tests" / "clients"
KEY = "stock"  # the server's API key, so that each client's way to send one is tried too
SECONDS = 600  # for all scenarios of one client
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


@dataclass(frozen=True)
class Outcome:
    """A scenario's result; `why` is one line if it did not pass."""

    scenario: str
    result: str
    why: str = ""


class ServerError(Exception):
    """The server did not start; the message has what it printed."""


@contextmanager
def served(model: str) -> Iterator[str]:
    """Run `minigen serve` on a free port of this machine; yield its address.

    Raises `ServerError` if it ends before it is ready.
    """
    command = [sys.executable, "-m", "minigen", "serve", model, "--port", "0", "--no-access-log"]
    environment = {**os.environ, "MINIGEN_API_KEY": KEY}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stderr is not None
        printed = []
        try:
            for line in process.stderr:
                printed.append(line)
                if "Press Ctrl-C to stop" in line:
                    break
            found = re.search(r"at (http://\S+)/v1", "".join(printed))
            if found is None:
                raise ServerError("".join(printed))
            # What it prints later, such as the trace of an error, belongs to this run's output.
            threading.Thread(target=_pass_on, args=[process.stderr], daemon=True).start()
            yield found[1]
        finally:
            process.terminate()


def _pass_on(lines: Iterator[str]) -> None:
    for line in lines:
        print(f"server: {line}", end="", file=sys.stderr, flush=True)


def outcomes(client: Client, url: str, model: str) -> list[Outcome]:
    """Run the scenarios of a client, in its environment, and return their results in order."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(str(python_of(client)), "-m", "pytest", "-c", str(SCENARIOS / "pytest.ini")),
            *(str(SCENARIOS / client.scenarios), "-q", "--no-header", f"--junitxml={report}"),
        ]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **{"MINIGEN_URL": url, "MINIGEN_KEY": KEY, "MINIGEN_MODEL": model},
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # clients bring plugins of their own
        }
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, check=False)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -9  # as it is ended
        return read_report(report, code)


def read_report(report: Path, exit_code: int) -> list[Outcome]:
    """Return the results in a JUnit report, and a failure where the exit code does not fit it."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        cases = []
    of_run = tally(report, exit_code).failed.get(THE_RUN)
    return [
        *map(_outcome, cases),
        *([] if of_run is None else [Outcome(THE_RUN, FAILED, of_run)]),
    ]


def _outcome(case: ElementTree.Element) -> Outcome:
    named = case.find("properties/property[@name='scenario']")
    scenario = case.get("name", "") if named is None else named.get("value", "")
    for kind, result in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        found = case.find(kind)
        if found is not None:
            return Outcome(scenario, result, (found.get("message") or kind).partition("\n")[0])
    return Outcome(scenario, PASSED)
