"""A pytest plugin: which tests run, which share a process, and the time of each part at the end."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

LEFT_OUT = {"long", "browser"}
FIRST = [  # started last, these would keep one process busy after the others
    "chapter 34",
    *("tests/test_41_processes.py", "tests/test_41_ends.py", "tests/test_33_paged_attention.py"),
    "tests/test_31_triton.py",
    *("tests/test_51_openapi.py", "tests/test_51_running.py", "tests/test_exercises.py"),
    *("tests/test_assignments.py", "tests/test_kit.py", "tests/test_book.py"),
    *("tests/test_instructors.py", "tests/test_speculation.py", "tests/test_tools.py"),
]
PARTS = {
    "0": "the map",
    "1": "one request",
    "2": "many requests",
    "3": "fast",
    "4": "many devices",
    "5": "serving",
    "-": "project",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked long or browser, unless `-m` was given; put long groups first."""
    if not config.option.markexpr:
        _leave_out(config, items)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(group_of(item.nodeid)))


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        is_left = any(mark.name in LEFT_OUT for mark in item.iter_markers())
        (left if is_left else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _rank(group: str) -> int:
    return FIRST.index(group) if group in FIRST else len(FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the processes of `-n 2` take one group of tests after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # they are already in order
    return Groups(config, log)


def group_of(nodeid: str) -> str:
    """Return the group of tests that share a process with this one.

    It is the test's file, because of its fixtures. All of chapter 34 is one group, because its
    tests share code that is compiled once per process.
    """
    file = nodeid.partition("::")[0]
    return "chapter 34" if "test_34_" in file else file


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of tests and the seconds of each part."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    reports: Iterable[pytest.TestReport] = (
        report
        for group in terminalreporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    )
    for report in reports:
        seconds[part_of(report.nodeid)] += report.duration
        counts[part_of(report.nodeid)] += report.when == "call"
    terminalreporter.section("time by part")
    for part in sorted(seconds):
        line = f"{part} {PARTS[part]:<15}{counts[part]:>6} tests {seconds[part]:>8.1f} s"
        terminalreporter.write_line(line)


def part_of(nodeid: str) -> str:
    """Return the part of the course that a test belongs to: the first digit of its number."""
    number = re.search(r"test_(\d)\d_", nodeid)
    return number[1] if number else "-"
