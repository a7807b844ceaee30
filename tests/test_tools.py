"""Checks, tests and notebooks run to the end: all verdicts are printed, a failure exits with 1."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import nbformat
import pytest

from tests.split import group_of
from tools import check, notebook_checks, test
from tools.chapters import ROOT
from tools.notebook_checks import Checker, Run, check_all
from tools.tally import Tally, tally
from tools.test import Part

NOTEBOOKS = [Path(f"{number}_pair.ipynb") for number in range(11, 17)]


def test_every_check_runs_and_the_failed_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"bad": ["no_such_module"], "good": ["this"], "worse": ["nor_this_one"]}
    monkeypatch.setattr(check, "CHECKS", modules)
    with pytest.raises(SystemExit, match="failed: bad, worse"):
        check.main([])
    output = capsys.readouterr().out
    verdicts = [line.split()[1:3] for line in output.splitlines() if line.startswith("check ")]
    assert verdicts == [["bad", "FAILED"], ["good", "ok"], ["worse", "FAILED"]]
    assert "no_such_module" in output
    check.main(["good"])
    assert capsys.readouterr().out.startswith("check good       ok")
    with pytest.raises(SystemExit, match="no check best; choose from bad, good, worse"):
        check.main(["good", "best"])


class Checking(Checker):
    """A stand-in for runs of notebooks, of which some fail and others take long."""

    def __init__(self, failing: str = "", long: str = "", cpu_seconds: float = 1.0):
        self.failing, self.long, self.cpu_seconds = failing, long, cpu_seconds
        self.environments: list[Mapping[str, str]] = []
        self.limits: list[int] = []
        self.most_at_once = self._now = 0
        self._lock, self._met = threading.Lock(), threading.Event()

    def of(self, environment: Mapping[str, str], cell_seconds: int) -> Self:
        self.environments.append(environment)
        self.limits.append(cell_seconds)
        return self

    def __call__(self, notebook: Path) -> Run:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        if self._now == notebook_checks.AT_ONCE:
            self._met.set()
        self._met.wait(0.5)
        with self._lock:
            self._now -= 1
        seconds = 1000.0 if notebook.stem == self.long else 1.0
        failed = {f"notebooks/{notebook.stem}.ipynb::Cell 3": "Cell outputs differ"}
        counts = Tally(4, failed if notebook.stem == self.failing else {})
        return Run(notebook, seconds, self.cpu_seconds, counts, f"said of {notebook.stem}\n")


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_checks, "num_cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
def test_notebooks_are_checked_two_at_a_time_with_half_of_the_threads_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in notebook_checks.THREADS:
        monkeypatch.delenv(name, raising=False)
    checking = Checking()
    assert check_all(NOTEBOOKS, checker_of=checking.of) == 0
    assert checking.most_at_once == 2
    (environment,) = checking.environments
    assert (environment["OMP_NUM_THREADS"], environment["NUMBA_NUM_THREADS"]) == ("2", "2")
    output = capsys.readouterr().out
    for notebook in NOTEBOOKS:
        assert f"{notebook.stem:<20}   1.0 s    1.0 CPU s  ok\n" in output


@pytest.mark.usefixtures("four_cores")
def test_a_notebook_alone_has_all_threads() -> None:
    checking = Checking()
    check_all(NOTEBOOKS[:1], checker_of=checking.of)
    assert checking.environments == [dict(os.environ)]


@pytest.mark.usefixtures("four_cores")
def test_a_callers_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    checking = Checking()
    check_all(NOTEBOOKS, checker_of=checking.of)
    assert checking.environments[0]["OMP_NUM_THREADS"] == "3"
    assert checking.most_at_once == 1, "two would need six of the four cores"


@pytest.mark.usefixtures("four_cores")
def test_a_notebook_that_fails_stops_no_other_and_is_named_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checking = Checking(failing="13_pair")
    assert check_all(NOTEBOOKS, tmp_path / "report.xml", checker_of=checking.of) == 1
    output = capsys.readouterr().out
    assert "said of 13_pair\n13_pair " in output
    assert "said of 11_pair" not in output, "the output of green notebooks is not shown"
    assert output.endswith("1 of 6 notebooks failed:\n  13_pair: Cell 3\n")
    assert tally(tmp_path / "report.xml", 1) == Tally(5, {"13_pair": "Cell 3"})


@pytest.mark.usefixtures("four_cores")
def test_wall_time_over_the_budget_is_printed_and_fails_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_all(NOTEBOOKS, checker_of=Checking(long="13_pair").of) == 0
    assert (
        "13_pair              1000.0 s    1.0 CPU s  over its 60 s  ok\n" in capsys.readouterr().out
    )


@pytest.mark.usefixtures("four_cores")
def test_cpu_seconds_over_twice_the_budget_on_every_core_are_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_all(NOTEBOOKS[:1], checker_of=Checking(cpu_seconds=480.0).of) == 0
    assert check_all(NOTEBOOKS[:1], checker_of=Checking(cpu_seconds=481.0).of) == 1
    assert "11_pair: takes 481 CPU seconds; 480 is the most on 4 cores" in capsys.readouterr().out


@pytest.mark.usefixtures("four_cores")
def test_an_untimed_check_fails_by_outputs_alone() -> None:
    slow = Checking(cpu_seconds=481.0)
    assert check_all(NOTEBOOKS[:1], untimed=True, checker_of=slow.of) == 0
    assert slow.limits == [notebook_checks.UNTIMED_CELL_SECONDS]
    failing = Checking(failing="11_pair")
    assert check_all(NOTEBOOKS[:1], untimed=True, checker_of=failing.of) == 1


def notebook_of(folder: Path, *cells: str) -> Path:
    path = folder / "cells.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), path
    )
    return path


@pytest.mark.skipif(os.name != "posix", reason="Windows does not tell the time of a child's child")
def test_the_cpu_seconds_of_a_notebook_include_its_kernel_and_its_children(
    tmp_path: Path,
) -> None:
    burn = "import time\nwhile time.process_time() < 3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    run = Checker(os.environ)(notebook_of(tmp_path, burn, child))
    assert run.counts == Tally(2, {})
    assert run.cpu_seconds is not None
    assert run.cpu_seconds >= 6


def test_a_kernel_that_dies_is_a_failure_and_names_its_cell(tmp_path: Path) -> None:
    check = Checker(os.environ, cell_seconds=2)
    run = check(notebook_of(tmp_path, "1", "import os; os._exit(0)", "2"))
    assert run.failure == "Cell 1"


def python(code: str) -> tuple[str, ...]:
    return ("-c", code)


GREEN = Part("green", python("print('green runs')"))
RED = Part("red", python("print('red runs'); raise SystemExit(3)"))


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_part_that_fails_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    assert test.main([], [RED, GREEN]) == 1
    output = capfd.readouterr().out
    assert output.index("red runs") < output.index("green runs") < output.index("summary")
    summary = output[output.index("summary") :].splitlines()
    assert [line.split()[:2] for line in summary[1:4]] == [
        ["red", "FAILED"],
        ["the", "run:"],
        ["green", "ok"],
    ]
    assert summary[2].strip() == "the run: it ended with exit code 3"
    assert summary[-1] == "1 passed, 1 failed"


def test_all_green_is_exit_code_0_and_parts_can_be_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert test.main([], [GREEN]) == 0
    assert last_line(capsys) == "1 passed, 0 failed"
    assert test.main(["green"], [RED, GREEN]) == 0
    with pytest.raises(SystemExit, match="no part best; choose from red, green"):
        test.main(["green", "best"], [RED, GREEN])
    with pytest.raises(SystemExit, match="goes to pytest, so name the part `tests`"):
        test.main(["green", "--", "-k", "x"], [RED, GREEN])


@pytest.fixture
def pytest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Part]:
    """The part `tests`, on given files, and without plugins that are slow to import."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (part,) = [part for part in test.PARTS if part.name == "tests"]

    def on(**files: str) -> Part:
        tmp_path.joinpath("pytest.ini").write_text(
            "[pytest]\naddopts = -p no:cacheprovider\n", encoding="utf-8"
        )
        for name, text in files.items():
            tmp_path.joinpath(f"{name}.py").write_text(text, encoding="utf-8")
        options = ("-p", "xdist", "-c", str(tmp_path / "pytest.ini"), str(tmp_path))
        return replace(part, command=part.command + options)

    return on


MIXED = """
import pytest

def test_passes(): pass

class TestGroup:
    @pytest.mark.parametrize("x", ["a.b"])
    def test_fails(self, x): assert x == 2

def test_skips(): pytest.skip("no need")

@pytest.fixture
def spoilt():
    yield
    raise ValueError("at the end")

def test_ends_badly(spoilt): pass

def test_fails_and_ends_badly(spoilt): assert not "well"
"""


def test_counts_and_names_come_from_pytests_report(
    pytest_part: Callable[..., Part], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = pytest_part(test_mixed=MIXED, test_broken="import no_such_module")
    assert test.main([], [tests, GREEN]) == 1
    output = capfd.readouterr().out
    assert "2 failed, 2 passed, 1 skipped, 3 errors in" in output, "pytest's own last line"
    assert "      test_mixed.py::TestGroup::test_fails[a.b]: AssertionError: " in output
    assert "      test_mixed.py::test_ends_badly: failed on teardown" in output
    assert "      test_broken.py: collection failure" in output
    assert output.splitlines()[-1] == "3 passed, 4 failed, 1 skipped"


def test_what_follows_two_dashes_goes_to_pytest(
    pytest_part: Callable[..., Part], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = pytest_part(test_mixed=MIXED)
    assert test.main(["tests", "--", "-n", "0", "-k", "passes"], [GREEN, tests]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"
    assert test.main(["--", "-n", "0", "-k", "nothing"], [tests]) == 1
    output = capfd.readouterr().out
    assert "the run: no tests were run; it ended with exit code 5" in output
    assert output.splitlines()[-1] == "0 passed, 1 failed"


def test_a_worker_that_is_killed_is_a_failure(
    pytest_part: Callable[..., Part], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = pytest_part(test_dies="import os\ndef test_dies(): os._exit(0)")
    assert test.main([], [tests, GREEN]) == 1
    output = capfd.readouterr().out
    assert "test_dies.py::test_dies: failed on setup with \"worker 'gw" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed"


INTERRUPTED = """
def test_passes(): pass
def test_is_interrupted(): raise KeyboardInterrupt
def test_is_not_run(): pass
"""


def test_a_test_that_did_not_end_has_not_passed(
    pytest_part: Callable[..., Part], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = pytest_part(test_some=INTERRUPTED)
    assert test.main(["--", "-n", "0"], [tests]) == 1
    output = capfd.readouterr().out
    assert "the run: it ended with exit code 2" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed"


WRITES = "import sys; open(sys.argv[1].partition('=')[2], 'w').write({!r}); raise SystemExit({})"
ONE_PASSED = '<testsuites><testsuite tests="1"><testcase name="a"/></testsuite></testsuites>'


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(0)", "it ended with exit code 0, and left no report"),
        (WRITES.format(ONE_PASSED[:-5], 0), "it ended with exit code 0, and its report is incomp"),
        (WRITES.format("", 0), "it ended with exit code 0, and its report is incomplete"),
        (WRITES.format("<testsuites/>", 0), "no tests were run; it ended with exit code 0"),
        (WRITES.format(ONE_PASSED, 1), "it ended with exit code 1"),
        (WRITES.format(ONE_PASSED, 3), "it ended with exit code 3"),
    ],
)
def test_a_pytest_that_does_not_end_well_has_failed(
    code: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert test.main([], [Part("tests", python(code), "--junitxml")]) == 1
    output = capsys.readouterr().out
    assert f"the run: {why}" in output
    assert ", 1 failed" in output.splitlines()[-1]


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_a_pytest_that_is_killed_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    killed = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert test.main([], [Part("tests", killed, "--junitxml"), GREEN]) == 1
    output = capsys.readouterr().out
    assert "the run: signal 9 ended it, and left no report" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed"


INTERRUPTIBLE = """
from pathlib import Path
from tools.test import Part, main
waiting = '''
import time
try:
    print('waiting', flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print('ended by itself', flush=True)
    raise SystemExit(2)
'''
never = "open({never!r}, 'w')"
raise SystemExit(main([], [
    Part("first", ("-c", "pass")), Part("second", ("-c", waiting)), Part("third", ("-c", never))
]))
"""


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("to_all", [True, False], ids=["from a terminal", "to it alone"])
def test_ctrl_c_ends_with_a_summary_of_the_finished_parts(to_all: bool, tmp_path: Path) -> None:
    code = INTERRUPTIBLE.replace("{never!r}", repr(str(tmp_path / "never")))
    if not to_all:
        code = code.replace("raise", "import tools.test; tools.test.END_SECONDS = 0.5\nraise", 1)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("waiting\n", ""):
            pass
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        output, _, rest = process.stdout.read().partition("summary\n")
    summary = rest.splitlines()
    assert process.returncode == 130
    assert "ended by itself" in output
    assert [line.split()[:3] for line in summary if line] == [
        ["first", "ok", summary[0].split()[2]],
        ["second", "interrupted", summary[1].split()[2]],
        ["the", "run:", "Ctrl-C"],
        ["third", "not", "run"],
        ["1", "passed,", "1"],
    ]
    assert summary[-1] == "1 passed, 1 failed"
    assert not (tmp_path / "never").exists()


def test_a_files_tests_share_a_process_and_so_do_those_of_the_compiled_kernels() -> None:
    assert group_of("tests/test_12_chat.py::test_a[x::y]") == "tests/test_12_chat.py"
    assert group_of("tests/test_34_sample.py::test_a") == group_of("tests/test_34_crew.py::test_b")
