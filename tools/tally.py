"""Count what a process tested, from its JUnit report and its exit code.

The two must agree. A process that crashed, was killed, tested nothing, or left no readable report
has failed, whatever its report says.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

THE_RUN = "the run"  # the name of a failure that belongs to no single test


@dataclass(frozen=True)
class Tally:
    """What passed, what failed, and why: `failed` maps each id to one line."""

    passed: int
    failed: Mapping[str, str]
    skipped: int = 0


def tally(report: Path, exit_code: int) -> Tally:
    """Count a report's tests; add a failure named "the run" where the exit code does not fit."""
    try:
        root = ElementTree.parse(report).getroot()
    except FileNotFoundError:
        return Tally(0, {THE_RUN: f"{ending(exit_code)}, and left no report"})
    except ElementTree.ParseError:
        return Tally(0, {THE_RUN: f"{ending(exit_code)}, and its report is incomplete"})
    cases = list(root.iter("testcase"))
    failed = {_id_of(case): why for case in cases if (why := _why_failed(case)) is not None}
    passed, skipped = _passed(root, cases), _sum(root, "skipped")
    if not cases:
        failed[THE_RUN] = f"no tests were run; {ending(exit_code)}"
    elif exit_code != (1 if failed else 0):
        failed[THE_RUN] = ending(exit_code)
    return Tally(passed, failed, skipped)


def counts_line(tallies: Sequence[Tally]) -> str:
    """Return the sum of some tallies as one line: `N passed, N failed[, N skipped]`."""
    passed = sum(each.passed for each in tallies)
    failed = sum(len(each.failed) for each in tallies)
    skipped = sum(each.skipped for each in tallies)
    return f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")


def ending(exit_code: int) -> str:
    """Return how a process ended."""
    if exit_code < 0:
        return f"signal {-exit_code} ended it"
    return f"it ended with exit code {exit_code}"


def write_report(report: Path, passed: list[str], failed: Mapping[str, str]) -> None:
    """Write a report that `tally` can read."""
    suite = ElementTree.Element(
        "testsuite", tests=str(len(passed) + len(failed)), failures=str(len(failed))
    )
    for name in passed:
        ElementTree.SubElement(suite, "testcase", name=name)
    for name, why in failed.items():
        case = ElementTree.SubElement(suite, "testcase", name=name)
        ElementTree.SubElement(case, "failure", message=why)
    ElementTree.ElementTree(suite).write(report, encoding="utf-8")


def _passed(root: ElementTree.Element, cases: Sequence[ElementTree.Element]) -> int:
    """Count the passed tests as pytest does in its last line.

    The number of cases cannot be used, because a test that started but did not end looks like one
    that passed. A test that fails, and then also fails in its teardown, counts once in `tests`, but
    twice in the other sums.
    """
    twice = {_id_of(case) for case in cases if case.find("failure") is not None} & {
        _id_of(case) for case in cases if case.find("error") is not None
    }
    not_passed = sum(_sum(root, kind) for kind in ("failures", "errors", "skipped"))
    return _sum(root, "tests") + len(twice) - not_passed


def _sum(root: ElementTree.Element, kind: str) -> int:
    return sum(int(suite.get(kind, 0)) for suite in root.iter("testsuite"))


def _why_failed(case: ElementTree.Element) -> str | None:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or kind).partition("\n")[0]
    return None


def _id_of(case: ElementTree.Element) -> str:
    """Return a test's id; in pytest's xunit1 format, `file` and `classname` are its first parts."""
    name, file = case.get("name", ""), case.get("file", "").replace("\\", "/")
    module, parent = file.removesuffix(".py").replace("/", "."), case.get("classname", "")
    if not parent and name == module:  # the whole file, which could not be imported
        return file
    classes = parent.removeprefix(module if file else "").strip(".")
    return "::".join(part for part in (file, classes, name) if part)
