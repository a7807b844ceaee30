"""Checks and notebooks are run two at a time: all verdicts are told, and a failure ends in 1."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.split import group_of
from tools import check, notebooks
from tools.notebooks import Run

PAIRS = [Path(f"{number}_pair.py") for number in range(11, 17)]


def test_every_check_is_made_and_the_failed_ones_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"bad": ["no_such_module"], "good": ["this"], "worse": ["nor_this_one"]}
    monkeypatch.setattr(check, "CHECKS", modules)
    with pytest.raises(SystemExit, match="failed: bad, worse"):
        check.main([])
    told = capsys.readouterr().out
    verdicts = [line.split()[1:3] for line in told.splitlines() if line.startswith("check ")]
    assert verdicts == [["bad", "FAILED"], ["good", "ok"], ["worse", "FAILED"]]
    assert "no_such_module" in told
    check.main(["good"])
    assert capsys.readouterr().out.startswith("check good       ok")
    with pytest.raises(SystemExit, match="no check best; there are bad, good, worse"):
        check.main(["good", "best"])


class Checking:
    """Stands in for a run of a pair, of which some fail and others take long."""

    def __init__(self, failing: str = "", long: str = ""):
        self.failing, self.long = failing, long
        self.environments: list[Mapping[str, str]] = []
        self.most_at_once = self._now = 0
        self._lock, self._met = threading.Lock(), threading.Event()

    def __call__(self, source: Path, environment: Mapping[str, str]) -> Run:
        with self._lock:
            self.environments.append(environment)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        if self._now == notebooks.AT_ONCE:
            self._met.set()
        self._met.wait(0.5)
        with self._lock:
            self._now -= 1
        seconds = 1000.0 if source.stem == self.long else 1.0
        return Run(source, seconds, source.stem == self.failing, f"said of {source.stem}\n")


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "num_cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
def test_pairs_are_checked_two_at_a_time_with_half_of_the_threads_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checking = Checking()
    monkeypatch.setattr(notebooks, "_check", checking)
    notebooks._check_all(PAIRS)
    assert checking.most_at_once == 2
    assert [each["OMP_NUM_THREADS"] for each in checking.environments] == ["2"] * len(PAIRS)
    assert checking.environments[0]["NUMBA_NUM_THREADS"] == "2"
    told = capsys.readouterr().out
    for pair in PAIRS:
        assert f"said of {pair.stem}\n" in told
        assert f"{pair.stem:<20}   1.0 s\n" in told


@pytest.mark.usefixtures("four_cores")
def test_a_pair_alone_has_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    checking = Checking()
    monkeypatch.setattr(notebooks, "_check", checking)
    notebooks._check_all(PAIRS[:1])
    assert checking.environments == [dict(os.environ)]


@pytest.mark.parametrize(
    ("troubles", "words"),
    [
        ({"failing": "13_pair"}, "13_pair failed; the lines above name the cell"),
        ({"long": "13_pair"}, "13_pair takes 1000 s; its budget is 60 s"),
    ],
)
def test_the_first_pair_that_fails_is_named_and_ends_the_run(
    troubles: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(notebooks, "_check", Checking(**troubles))
    with pytest.raises(SystemExit, match=words):
        notebooks._check_all(PAIRS)
    assert "said of 13_pair\n" in capsys.readouterr().out


def test_a_files_tests_share_a_process_and_so_do_those_of_the_compiled_kernels() -> None:
    assert group_of("tests/test_12_chat.py::test_a[x::y]") == "tests/test_12_chat.py"
    assert group_of("tests/test_34_sample.py::test_a") == group_of("tests/test_34_crew.py::test_b")
