"""`check` runs a learner's part in a separate process, whatever the part does."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from minigen_course.grading.check import check, judge
from tests.answers.ch16_sampling import top_p_by_sorting, wrong_top_p
from tests.waiting import wait_until


def stub(*_: Any) -> Any:
    raise NotImplementedError


def loops(*_: Any) -> Any:
    while True:
        pass


def waits(*_: Any) -> Any:
    threading.Event().wait()


def kills_python(*_: Any) -> Any:
    os._exit(0)


def leaves(*_: Any) -> Any:
    sys.exit(0)


def stumbles(*_: Any) -> Any:
    return {}["nothing"]


@pytest.mark.parametrize(
    ("part", "seconds", "words"),
    [
        (loops, 3, "did not finish within 3 s"),
        (waits, 5, "did not finish within 5 s"),
        (kills_python, 30, "ended Python"),
        (leaves, 30, "ended Python"),
        (stumbles, 30, "raised KeyError"),
    ],
)
def test_no_part_crashes_the_check_or_passes_by_ending_it(
    part: Any, seconds: float, words: str
) -> None:
    result = judge("16", "keep_top_p", part, seconds=seconds)
    assert not result.passed
    assert words in result.message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("then", [lambda: None, loops], ids=["returns", "loops"])
def test_a_process_that_a_part_starts_ends_with_its_check(tmp_path: Path, then: Any) -> None:
    started = tmp_path / "started"

    def starts_another(*_: Any) -> Any:
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        started.write_text(str(child), encoding="utf-8")
        then()

    assert not judge("16", "keep_top_p", starts_another, seconds=3).passed
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(started.read_text(encoding="utf-8")))
        wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)  # or there is no such process


def test_a_stub_is_reported_at_once_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigen_course.grading.check.subprocess.Popen", stumbles)
    result = judge("16", "keep_top_p", stub)
    assert not result.passed
    assert result.message.startswith("is still empty")


def test_check_prints_what_passed_and_hints_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    check(16, keep_top_p=top_p_by_sorting)
    assert capsys.readouterr().out == "✓ keep_top_p: all 6 checks passed.\n"
    check(16, hint=1, keep_top_p=wrong_top_p("rows mixed"))
    printed = capsys.readouterr().out
    assert printed.startswith("✗ keep_top_p: check 4 of 6")
    assert "hint 1: Sort each row's" in printed
    assert "hint=2 shows the next hint" in printed


@pytest.mark.parametrize(
    ("chapter", "parts", "words"),
    [
        (16, {}, "Name the part to check"),
        (16, {"keep_top_q": stub}, "has no keep_top_q; it has by_hand, keep_top_p"),
        (99, {"keep_top_p": stub}, "Chapter 99 has no exercises"),
    ],
)
def test_what_cannot_be_checked_is_refused(chapter: int, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(chapter, **parts)
