"""The parts of `make test-clients`, without the clients: environments, scenarios, record, table."""

import ast
import json
import shlex
import shutil
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.clients.two_tools import TwoTools
from tools import clients
from tools.chapters import ROOT
from tools.clients import __main__ as command
from tools.clients import environments, running, table
from tools.clients.environments import CLIENTS, Client, SetupError, name_of, set_up, versions_of
from tools.clients.running import FAILED, PASSED, SKIPPED, Outcome, ServerError, outcomes, served
from tools.tally import THE_RUN

NAMES = [each.name for each in CLIENTS]


def scenarios_of(client: Client) -> list[str]:
    """Return the names of a client's scenarios: the first lines of the tests' docstrings."""
    tree = ast.parse((running.SCENARIOS / client.scenarios).read_text(encoding="utf-8"))
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = ast.get_docstring(node)
            assert text, f"{client.scenarios}: {node.name} needs a docstring"
            found.append(text.splitlines()[0].removesuffix("."))
    return found


@pytest.mark.parametrize("client", CLIENTS, ids=NAMES)
def test_a_client_is_pinned_and_has_scenarios_with_different_names(client: Client) -> None:
    assert all("==" in each for each in client.packages), "pin the versions"
    names = scenarios_of(client)
    assert names
    assert len(set(names)) == len(names)


def test_every_file_of_scenarios_belongs_to_one_client() -> None:
    files = sorted(path.name for path in running.SCENARIOS.glob("stock_*.py"))
    assert files == sorted(each.scenarios for each in CLIENTS)
    assert "--ignore=tests/clients" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_clients_have_environments_beside_the_main_one() -> None:
    folders = {environments.folder_of(each) for each in CLIENTS}
    assert len(folders) == len(CLIENTS)
    assert {each.parent for each in folders} == {environments.FOLDER}
    assert environments.FOLDER.parent == environments.ENVIRONMENT.parent
    assert environments.FOLDER.name == f"{environments.ENVIRONMENT.name}-clients"


# The record


def test_the_record_has_every_client_with_its_pins_and_every_scenario() -> None:
    """A new pin or scenario needs a new run: make test-clients."""
    record = table.read()
    assert [each["client"] for each in record["clients"]] == NAMES
    for client, recorded in zip(CLIENTS, record["clients"], strict=True):
        pins = {name_of(each): each.partition("==")[2] for each in client.packages}
        assert recorded["versions"] == pins
        assert [each["scenario"] for each in recorded["scenarios"]] == scenarios_of(client)
        assert {each["result"] for each in recorded["scenarios"]} <= {PASSED, FAILED, SKIPPED}


def test_the_page_has_the_record() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    shown = page.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.as_markdown(table.read()), "run python -m tools.clients --page"


RECORD: dict[str, Any] = {
    "environment": {"python": "3.11.2", "system": "Linux x86_64"},
    "date": "2026-11-01",
    "minigen": "0.1.0",
    "model": "tiny",
    "clients": [
        {
            "client": "One",
            "versions": {"one": "1.2", "openai": "3.0"},
            "scenarios": [
                {"scenario": "chat", "result": PASSED, "why": ""},
                {"scenario": "a|b", "result": FAILED, "why": "no | yes"},
            ],
        }
    ],
}


def test_a_record_is_a_line_per_scenario_and_a_row_per_client() -> None:
    assert table.as_text(RECORD).splitlines() == [
        "One  1.2  chat  passed",
        "One  1.2  a|b   FAILED  no | yes",
    ]
    row = "| One | one 1.2, openai 3.0 | chat<br>**FAILED:** a\\|b | 1 of 2 |"
    assert row in table.as_markdown(RECORD).splitlines()
    assert table.num_failed(RECORD) == 1


# Environments


def test_a_complete_environment_is_not_touched_and_a_failed_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    client = Client("One", ("one==1.2",), "stock_one.py")
    commands: list[list[str]] = []
    made: list[Path] = []
    code = 1

    class Done:
        def __init__(self) -> None:
            self.returncode = code

    def run(arguments: list[str], **_: object) -> Done:
        commands.append(arguments)
        return Done()

    def create(folder: Path, with_pip: bool) -> None:
        made.append(folder)
        python = environments.python_of(client)
        python.parent.mkdir(parents=True)
        python.touch()

    monkeypatch.setattr(environments.subprocess, "run", run)
    monkeypatch.setattr(venv, "create", create)
    with pytest.raises(SetupError, match="One could not be installed"):
        set_up(client)
    code = 0
    set_up(client)
    assert made == [tmp_path / "one"], "the folder is made once"
    assert commands[-1][-2:] == ["one==1.2", environments.RUNNER]
    count = len(commands)
    set_up(client)
    assert len(commands) == count, "the second run installs nothing"
    set_up(Client("One", ("one==1.3",), "stock_one.py"))
    assert len(commands) == count + 1, "another pin is installed"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's environment stand for that of every client."""
    monkeypatch.setattr(environments, "python_of", lambda client: Path(sys.executable))
    monkeypatch.setattr(running, "python_of", lambda client: Path(sys.executable))


@pytest.mark.usefixtures("here")
def test_versions_are_those_that_are_installed() -> None:
    client = Client("pytest", ("pytest[more]==0",), "stock_none.py")
    assert versions_of(client) == {"pytest": pytest.__version__}


# Scenarios

PROBE = '''
"""A client that is none."""

import socket

import pytest

from tests.clients.conftest import Server


def test_local(server: Server) -> None:
    """The server's address arrives."""
    assert (server.url, server.key, server.model) == ("http://here", "stock", "tiny")


def test_wrong() -> None:
    """A failure.

    More of it.
    """
    raise ValueError("why")


def test_away() -> None:
    """Another machine, though the client hides the error."""
    try:
        socket.create_connection(("198.51.100.1", 80), timeout=1)
    except OSError:
        pass


def test_left_out() -> None:
    """Left out."""
    pytest.skip("no such thing")
'''


@pytest.mark.usefixtures("here")
def test_scenarios_run_with_the_servers_address_and_without_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (running.SCENARIOS / "pytest.ini").read_text(encoding="utf-8")
    root = shlex.quote(ROOT.as_posix())  # pytest splits its lists of paths as a shell does
    (tmp_path / "pytest.ini").write_text(settings.replace("../..", root), encoding="utf-8")
    shutil.copy(running.SCENARIOS / "conftest.py", tmp_path)
    (tmp_path / "stock_probe.py").write_text(PROBE, encoding="utf-8")
    monkeypatch.setattr(running, "SCENARIOS", tmp_path)
    found = outcomes(Client("Probe", (), "stock_probe.py"), "http://here", "tiny")
    assert found[:2] == [
        Outcome("The server's address arrives", PASSED),
        Outcome("A failure", FAILED, "ValueError: why"),
    ]
    assert (found[2].scenario, found[2].result) == (
        "Another machine, though the client hides the error",
        FAILED,
    )
    assert "the client wanted other machines" in found[2].why
    assert found[3] == Outcome("Left out", SKIPPED, "no such thing")
    assert len(found) == 4


def test_a_run_without_a_report_is_a_failure(tmp_path: Path) -> None:
    (found,) = running.read_report(tmp_path / "none.xml", -9)
    assert (found.scenario, found.result) == (THE_RUN, FAILED)
    assert "signal 9 ended it" in found.why
    (tmp_path / "half.xml").write_text("<testsuites><testsuite", encoding="utf-8")
    (found,) = running.read_report(tmp_path / "half.xml", 1)
    assert found.result == FAILED


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerError, match="no-such-option"), served("--no-such-option"):
        pass


def test_tools_check_their_arguments_and_force_the_next_call() -> None:
    tools = TwoTools()
    assert tools.choice == "required"
    with pytest.raises(ValueError, match="city"):
        tools.call("get_temperature", {"city": "Rome"})
    with pytest.raises(ValueError, match="celsius"):
        tools.call("to_fahrenheit", '{"celsius": "4"}')
    assert tools.call("to_fahrenheit", '{"celsius": 4}') == "39"
    assert tools.choice == "get_temperature"
    with pytest.raises(AssertionError):
        tools.check("an early answer")
    assert tools.call("get_temperature", {"city": "Oslo"}) == "4"
    assert tools.choice == "none"
    tools.check("an answer")
    with pytest.raises(AssertionError, match="empty"):
        tools.check(" ")


# The command


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clients that need no environment, and files of their own for the results."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "DATA", tmp_path / "clients.json")
    two = (Client("One", (), "stock_one.py"), Client("Two", (), "stock_two.py"))
    monkeypatch.setattr(command, "CLIENTS", two)
    monkeypatch.setattr(command, "set_up", lambda client: None)
    return tmp_path


def recorded(result: str) -> Any:
    """Return a stand-in for a run, with one result."""

    def tried(clients: list[Client]) -> dict[str, Any]:
        one = {
            **RECORD["clients"][0],
            "scenarios": [{"scenario": "s", "result": result, "why": ""}],
        }
        return {**RECORD, "clients": [{**one, "client": each.name} for each in clients]}

    return tried


def test_a_whole_run_writes_record_and_page_and_a_failure_exits_with_one(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "tried", recorded(PASSED))
    command.main(["--only", "two"])
    assert "Two  1.2  s  passed" in capsys.readouterr().out
    assert not table.DATA.exists(), "a part of the clients is no record"
    command.main([])
    assert [each["client"] for each in json.loads(table.DATA.read_text("utf-8"))["clients"]] == [
        *("One", "Two")
    ]
    assert "| One |" in table.PAGE.read_text("utf-8")
    monkeypatch.setattr(command, "tried", recorded(FAILED))
    with pytest.raises(SystemExit, match="2 scenarios failed"):
        command.main([])
    assert "**FAILED:** s" in table.PAGE.read_text("utf-8")
    with pytest.raises(SystemExit, match="no client 'three'; choose from One, Two"):
        command.main(["--only", "three"])


def test_installing_alone_runs_nothing(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "tried", lambda clients: pytest.fail("it ran"))
    command.main(["--setup-only"])
    assert not table.DATA.exists()


def test_make_test_leaves_the_clients_out() -> None:
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert clients.__name__ in recipes.split("\ntest-clients:")[1].split("\n\n")[0]
    assert clients.__name__ not in recipes.split("\ntest:")[1].split("\n\n")[0]
    assert clients.__name__ not in (ROOT / "tools" / "test.py").read_text(encoding="utf-8")
