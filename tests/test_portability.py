"""The table of environments: cells are tried once, and their results are stored and shown."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import environment
from tools.portability import __main__ as program
from tools.portability import environments as table_of_environments
from tools.portability import first_script, table
from tools.portability.commands import Ended, busy, run
from tools.portability.environments import Environment, environments, read_only
from tools.portability.places import Places
from tools.portability.store import GREEN, NOT_TRIED, RED, Cell, Result, Store

CELLS = [Cell("long", part) for part in ("setup", "tests", "golden")]
LIMIT = 60.0

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it tries POSIX systems")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state", "a" * 40)


def ended(code: str, tmp_path: Path, limit: float = LIMIT) -> Ended:
    """Run a Python program and return how it ended."""
    return run([sys.executable, "-c", code], tmp_path, os.environ, tmp_path / "log", limit)


def is_alive(process_id: int) -> bool:
    state = Path(f"/proc/{process_id}/stat")
    return state.exists() and state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_stopped_run_continues_where_it_was(store: Store) -> None:
    tried: list[Cell] = []

    def stopped_at_the_second(cell: Cell) -> Result:
        tried.append(cell)
        if tried == CELLS[:2]:
            raise KeyboardInterrupt
        return Result(GREEN)

    with pytest.raises(KeyboardInterrupt):
        program.run_cells(CELLS, store, stopped_at_the_second)
    assert [store.get(cell) for cell in CELLS] == [Result(GREEN), None, None]
    assert program.run_cells(CELLS, store, stopped_at_the_second) == dict.fromkeys(
        CELLS, Result(GREEN)
    )
    assert tried == [CELLS[0], CELLS[1], CELLS[1], CELLS[2]]


def test_a_killed_run_keeps_finished_results(store: Store, tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tools.portability.__main__ import run_cells
from tools.portability.store import Cell, Result, Store
cells = [Cell("long", part) for part in ("setup", "tests", "golden")]
def killed_at_the_second(cell):
    if cell == cells[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return Result("green", "7 passed", 1.5, (), {{"cpu": "one"}})
run_cells(cells, Store(Path({str(tmp_path / "state")!r}), {"a" * 40!r}), killed_at_the_second)
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=program.ROOT).returncode == -signal.SIGKILL
    first = Result(GREEN, "7 passed", 1.5, (), {"cpu": "one"})
    assert [store.get(cell) for cell in CELLS] == [first, None, None]


def test_a_red_cell_is_stored_with_its_reason(store: Store) -> None:
    red = Result(RED, "tests/test_a.py::test_b", 2.0, ("tests/test_a.py::test_b",))
    program.run_cells(CELLS[:1], store, lambda cell: red)
    assert store.get(CELLS[0]) == red
    assert program.run_cells(CELLS[:1], store, lambda cell: Result(GREEN)) == {CELLS[0]: red}
    store.forget(CELLS[:1])
    assert program.run_cells(CELLS[:1], store, lambda cell: Result(GREEN)) == {
        CELLS[0]: Result(GREEN)
    }


def test_results_of_another_commit_are_not_this_ones(store: Store, tmp_path: Path) -> None:
    store.put(CELLS[0], Result(GREEN))
    later = Store(tmp_path / "state", "b" * 40)
    assert later.get(CELLS[0]) is None
    assert later.others() == ["a" * 40]
    assert store.others() == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import sys; sys.exit('13_layers has no such cell.')", "13_layers has no such cell."),
        ("import sys; sys.exit('no file /some/where')", "exit status 1"),
        (
            "print('ERROR    some.log:7 a line of a log');"
            "print('FAILED tests/test_a.py::test_b[x y] - assert 1\\nERROR tests/test_c.py');"
            "raise SystemExit(1)",
            "tests/test_a.py::test_b[x y], tests/test_c.py",
        ),
    ],
)
def test_a_failed_command_gives_the_reason(code: str, why: str, tmp_path: Path) -> None:
    assert ended(code, tmp_path).why() == why


def test_pytests_counts_are_read(tmp_path: Path) -> None:
    assert ended("print('..\\n2 failed, 31 passed, 1 skipped in 2.1s')", tmp_path).passed == (
        "2 failed, 31 passed, 1 skipped"
    )
    assert ended("print('12 passed in 1s\\n===== 13 passed in 2s =====')", tmp_path).passed == (
        "13 passed"
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc")
def test_a_command_over_its_time_limit_ends_with_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    for limit in (1.0, 4.0, 16.0, LIMIT):  # a busy machine may need this long to start
        over = ended(code, tmp_path, limit)
        if pids.exists() and pids.read_text(encoding="utf-8"):
            break
    assert over.status is None
    assert over.why() == "it did not end within its time limit"
    assert wait_for(lambda: not is_alive(int(pids.read_text(encoding="utf-8"))))


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc")
def test_busy_loops_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = f"""
import os, signal
from tools.portability import commands
started = []
popen = commands.subprocess.Popen
def remembered(*arguments):
    started.append(popen(*arguments))
    return started[-1]
commands.subprocess.Popen = remembered
with commands.busy(2):
    open({str(tmp_path / "pids")!r}, "w").write(" ".join(str(loop.pid) for loop in started))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=program.ROOT)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(pids) == 2
    assert wait_for(lambda: not any(map(is_alive, pids)))
    with busy(0):
        pass


class Tree:
    """An environment that is set up, with a command of the test instead of minigen's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.places, self.log = Places(folder, "a" * 40), folder / "log"
        self._environment = Environment("one", "an environment", ("tests",))
        (folder / "shared" / "minigen").mkdir(parents=True)
        (folder / "shared" / "elsewhere").mkdir()
        (folder / "shared" / "elsewhere" / "one.json").write_text(
            '{"cpu": "a processor"}', encoding="utf-8"
        )
        self._monkeypatch = monkeypatch

    def run(self, code: str, **changed: object) -> Result:
        command = [sys.executable, "-c", code]
        self._monkeypatch.setattr(Places, "_commands", lambda *_: [command])
        each = Environment(**vars(self._environment) | changed)
        return self.places.run(each, each.cells[0], self.log)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_cell_whose_command_dies_by_a_signal_is_red(tree: Tree) -> None:
    result = tree.run("import os; os.kill(os.getpid(), 9)")
    assert (result.verdict, result.detail) == (RED, "ended by SIGKILL")
    assert result.machine == {"cpu": "a processor"}


def test_a_cell_is_green_if_its_commands_end_with_0(tree: Tree) -> None:
    result = tree.run("print('12 passed in 1s')")
    assert (result.verdict, result.detail) == (GREEN, "12 passed")


def test_a_cell_has_its_environments_variables_and_umask(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "another tree")
    code = "import os; print(os.environ['TZ'], 'PYTHONPATH' in os.environ, oct(os.umask(0)))"
    tree.run(code, variables={"TZ": "{elsewhere}/x"}, umask=0o077)
    zone, has_path, umask = tree.log.read_text(encoding="utf-8").split()
    assert zone.endswith("shared/elsewhere/x")
    assert (has_path, umask) == ("False", "0o77")


def test_what_this_machine_lacks_is_not_tried(tree: Tree) -> None:
    result = tree.run("raise SystemExit(1)", lacking="this processor has no avx2")
    assert str(result) == "not tried: this processor has no avx2"


def test_a_set_up_that_fails_is_red_and_tried_once(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared" / "elsewhere" / "one.json").unlink()
    made: list[str] = []

    def clone(*_: object) -> str:
        made.append("clone")
        return "git clone failed"

    monkeypatch.setattr(Places, "_clone", clone)
    for _ in range(2):
        result = tree.run("")
        assert (result.verdict, result.detail) == (RED, "set-up: git clone failed")
    assert made == ["clone"]


def test_a_read_only_tree_cannot_be_written(tmp_path: Path) -> None:
    if table_of_environments._no_read_only_mount():
        pytest.skip("this machine allows no read-only mount")
    (tmp_path / "tree").mkdir()
    inside = "touch written 2>&1; touch ../beside"
    command = [*read_only(tmp_path / "tree"), "sh", "-c", inside]
    said = subprocess.run(command, capture_output=True, encoding="utf-8").stdout
    assert "ead-only" in said
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["beside", "tree"]


def test_without_a_network_only_this_machine_can_be_reached() -> None:
    prefix = table_of_environments._without_network()
    if not prefix:
        pytest.skip("this machine allows no network of its own")
    code = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
print([name for _, name in socket.if_nameindex()])
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(error.errno == __import__("errno").ENETUNREACH)
"""
    command = [*prefix, sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, encoding="utf-8").stdout.splitlines()
    assert said[0].startswith("['lo'")
    assert said[1:] == ["True"]


def test_the_environments_match_their_names(tmp_path: Path) -> None:
    every = {each.name: each for each in environments(tmp_path)}
    long = tmp_path.joinpath("long", *every["long"].inside)
    assert long.name == "minigen"
    assert len(str(long)) > 180
    assert len(str(tmp_path.joinpath(*every["strange"].inside)).split()) > 1
    assert not str(every["strange"].inside).isascii()
    assert "'" in every["strange"].inside[-1]
    assert {each.place for each in every.values() if each.parts != every["load"].parts} >= {
        *("long", "strange", "readonly"),
    }
    assert all(each.cells for each in every.values())


class Table:
    """The program on two small environments of the test."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.verdicts: dict[str, Result] = {}
        self.tried: list[str] = []
        self.commit = "a" * 40
        every = [
            Environment("one", "the first", ("setup", "tests", "notebooks")),
            Environment("two", "the second", ("tests",)),
        ]
        for name, value in {
            "STATE": tmp_path / "state",
            "environments": lambda folder: every,
            "commit_of": lambda tree: self.commit,
            "has_changes": lambda tree: False,
        }.items():
            monkeypatch.setattr(program, name, value)
        monkeypatch.setattr(Places, "run", self._run)
        self.page, self.data = tmp_path / "portability.md", tmp_path / "portability.json"
        monkeypatch.setattr(table, "PAGE", self.page)
        monkeypatch.setattr(table, "DATA", self.data)

    def _run(self, environment: Environment, cell: Cell, log: Path) -> Result:
        self.tried.append(cell.name)
        return self.verdicts.get(cell.name, Result(GREEN))

    def run(self, *arguments: str) -> str | int | None:
        """Return the program's exit code, or its last line."""
        handler = signal.getsignal(signal.SIGTERM)
        try:
            program.main(arguments)
        except SystemExit as end:
            return end.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        return 0


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(tmp_path, monkeypatch)


def test_the_page_is_written_when_every_cell_has_a_result(whole: Table) -> None:
    whole.verdicts = {
        "one/setup": Result(NOT_TRIED, "there is no make here"),
        "one/tests": Result(GREEN, "12 passed", machine={"cpu": "a processor", "cores": 2}),
        "one/notebooks": Result(RED, "notebooks/13_layers.ipynb::Cell 3"),
        "two/tests": Result(RED, "ended by SIGSEGV"),
    }
    output = whole.run("--environments", "one")
    assert isinstance(output, str)
    assert output.startswith("red: one/notebooks (")
    assert not whole.page.exists()
    whole.run()
    page = whole.page.read_text(encoding="utf-8")
    assert "- a processor, 2 cores" in page
    setup = "not tried: there is no make here, aaaaaaa"
    row = f"| one | {setup} | - | - | green (12 passed), aaaaaaa | - | - | "
    notebooks = "RED: notebooks/13_layers.ipynb::Cell 3, aaaaaaa |"
    assert row + notebooks in page
    assert "| two | - | - | - | RED: ended by SIGSEGV, aaaaaaa | - | - | - |" in page
    data = json.loads(whole.data.read_text(encoding="utf-8"))
    assert [run["commit"] for run in data["two/tests"]] == [whole.commit]
    assert data["two/tests"][0]["verdict"] == "RED"


def test_a_page_of_some_cells_names_those_not_run(whole: Table) -> None:
    assert whole.run("--cell", "one/notebooks", "--write") == 0
    page = whole.page.read_text(encoding="utf-8")
    assert "| one | not run | - | - | not run | - | - | green, aaaaaaa |" in page


def test_the_page_keeps_the_last_two_runs_of_each_cell(whole: Table) -> None:
    whole.run("--write")
    for commit in "bc":
        whole.commit = commit * 40
        whole.run("--cell", "two/tests", "--write")
    whole.verdicts = {"two/tests": Result(RED, "ended by SIGSEGV")}
    whole.run("--cell", "two/tests", "--write", "--again")
    page = whole.page.read_text(encoding="utf-8")
    assert "RED: ended by SIGSEGV, ccccccc<br>green, bbbbbbb |" in page
    assert "| one | green, aaaaaaa | - | - | green, aaaaaaa |" in page, "other cells keep theirs"


def test_as_users_do_installs_no_package_of_the_tests_and_never_imports_the_clone(
    tmp_path: Path,
) -> None:
    (environment,) = (each for each in environments(tmp_path) if each.name == "strange")
    places = Places(tmp_path, "a" * 40)
    make, install, *uses = places._commands(environment, "installed")
    assert make[1:3] == ["-m", "venv"]
    assert install[-1].endswith("mini gen[cpu]")
    assert all(command[:2] == [install[0], "-I"] for command in uses)
    assert install[0].startswith(make[-1])


@pytest.mark.parametrize(
    ("runner", "answer", "complaint"),
    [
        ("a whole step compiled by Numba", " Paris.", None),
        ("layer by layer in torch", " Paris.", "with layer by layer in torch, because"),
        ("a whole step compiled by Numba", " the", "' the', without the word Paris"),
    ],
)
def test_the_first_script_says_what_is_wrong(
    runner: str, answer: str, complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = SimpleNamespace(
        describe=lambda: {"runner": runner},
        generate=lambda *prompt_and_params: SimpleNamespace(text=answer),
    )
    monkeypatch.setattr(first_script, "LLM", SimpleNamespace(load=lambda name: llm))
    if complaint is None:
        first_script.main()
    else:
        with pytest.raises(SystemExit, match=complaint):
            first_script.main()


def test_cells_are_chosen_by_environment_part_and_name(whole: Table) -> None:
    whole.run("--parts", "tests")
    assert whole.tried == ["one/tests", "two/tests"]
    whole.run("--parts", "notebooks")
    assert whole.tried[2:] == ["one/notebooks"]
    whole.run("--cell", "one/setup", "two/tests", "--again")
    assert whole.tried[3:] == ["one/setup", "two/tests"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cell", "one/test"], "There is no cell one/test; --list shows all."),
        (["--environments", "three"], "There is no environment three; choose from one, two."),
        (["--parts", "notebook"], "There is no part notebook; choose from setup, "),
    ],
)
def test_an_unknown_name_is_refused(whole: Table, arguments: list[str], words: str) -> None:
    assert str(whole.run(*arguments)).startswith(words)
    assert not whole.tried


def test_the_list_shows_this_commits_results(
    whole: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.verdicts = {"one/tests": Result(RED, "ended by SIGSEGV")}
    whole.run("--cell", "one/tests")
    capsys.readouterr()
    assert whole.run("--list") == 0
    output = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert output[:2] == ["one/setup not run", "one/tests RED: ended by SIGSEGV"]
    whole.commit = "b" * 40
    whole.run("--list")
    output = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (
        output[0] == "Results of other commits (aaaaaaaaaaaa) are stored separately, and not shown."
    )
    assert output[1:3] == ["one/setup not run", "one/tests not run"]


def test_a_selection_is_not_stored_as_a_result(whole: Table) -> None:
    whole.run("--cell", "two/tests", "--pytest", "tests/test_11_weights.py")
    whole.run("--cell", "two/tests")
    assert whole.tried == ["two/tests", "two/tests"]
    whole.run("--cell", "one/notebooks", "--notebooks", "13")
    whole.run("--cell", "one/notebooks")
    assert whole.tried[2:] == ["one/notebooks", "one/notebooks"]


def test_clones_of_red_cells_are_kept(whole: Table, tmp_path: Path) -> None:
    folder = tmp_path / "clones"
    clone = folder / whole.commit[:12] / "shared"
    clone.mkdir(parents=True)
    whole.verdicts = {"two/tests": Result(RED, "ended by SIGSEGV")}
    whole.run("--cell", "two/tests", "--folder", str(folder))
    assert clone.exists()
    whole.run("--cell", "one/tests", "--folder", str(folder), "--keep")
    assert clone.exists()
    whole.run("--cell", "one/tests", "--folder", str(folder))
    assert not clone.exists()


def test_a_read_only_tree_is_installed_as_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    for name in ("pyproject.toml", "constraints.txt", "minigen/a.py", "minigen_course/b/c.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name, encoding="utf-8")
    (tree / "minigen" / "a.pyc").touch()
    monkeypatch.setattr(environment, "ROOT", tree)
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path / "venv")
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tree)
    (tmp_path / "venv").mkdir()
    installed: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        assert (Path(arguments[0].removesuffix("[cpu]")) / "minigen" / "a.py").exists()
        installed.append(arguments)

    monkeypatch.setattr(environment, "_pip", pip)
    environment.main(["cpu"])
    environment.main(["cpu"])
    ((copied, *constraint),) = installed
    assert not copied.startswith(str(tree))
    assert constraint == ["--constraint", "constraints.txt"]
    environment.copy_package(copy)
    names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*.*"))
    assert names == ["minigen/a.py", "minigen_course/b/c.py", "pyproject.toml"]
    (tree / "minigen" / "a.py").write_text("changed", encoding="utf-8")
    environment.main(["cpu"])
    assert len(installed) == 2


def test_an_earlier_builds_metadata_does_not_hide_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "constraints.txt", "minigen.egg-info/entry_points.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old", encoding="utf-8")
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path / "venv")
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(environment, "_pip", lambda *arguments: None)
    environment.main(["cpu"])
    assert not (tmp_path / "minigen.egg-info").exists()


@pytest.mark.skipif(os.name == "nt", reason="the environment has other folders there")
def test_another_trees_environment_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, other = tmp_path / "this tree", tmp_path / "other tree"
    for folder in (tree, other):
        folder.mkdir()
        for name in ("pyproject.toml", "constraints.txt"):
            (folder / name).write_text(name, encoding="utf-8")
    known = "lib/python3.12/site-packages/minigen-0.1.0.dist-info/direct_url.json"
    written = other / ".venv" / known
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps({"url": other.as_uri()}), encoding="utf-8")
    (tree / ".venv").symlink_to(other / ".venv")
    monkeypatch.setattr(environment, "ROOT", tree)
    monkeypatch.setattr(environment, "ENVIRONMENT", tree / ".venv")
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "_pip", lambda *arguments: installed.append(arguments))
    with pytest.raises(SystemExit, match=r"runs the minigen of .*other tree"):
        environment.main([])
    assert not installed
    shutil.rmtree(other / ".venv" / "lib")
    other.rename(tmp_path / "moved")  # with its environment, which names the old place
    (tree / ".venv").unlink()
    moved = tmp_path / "moved" / ".venv" / known
    moved.parent.mkdir(parents=True)
    moved.write_text(json.dumps({"url": other.as_uri()}), encoding="utf-8")
    monkeypatch.setattr(environment, "ROOT", tmp_path / "moved")
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path / "moved" / ".venv")
    environment.main([])
    assert installed


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_the_environment_from_elsewhere() -> None:
    command = ["make", "-n", "demo", "VENV_DIR=/else where"]
    environ = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    said = subprocess.run(
        command, cwd=program.ROOT, env=environ, capture_output=True, encoding="utf-8", check=True
    ).stdout
    assert '"/else where/bin/python" -m minigen demo' in said
