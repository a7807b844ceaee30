"""Check the tree without running it: `python -m tools.check`. Print the verdict of each check.

The checks are ruff (lint and format), mypy, the agreement of chapters, modules, tests and documents
(`tests/test_project.py`, `tests/test_layout.py`, `tests/test_docs.py`), and the agreement of
notebooks: pairs, stubs, mirrors, budgets (`tests/test_notebooks.py`). `python -m tools.check lint
types` runs only these checks; `make test` skips the last two, because it runs all of tests/.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

AT_ONCE = 2
PYTEST = [
    *("pytest", "-q", "--no-header", "-p", "no:cacheprovider"),
    *("-p", "no:schemathesis"),  # its import takes a second
]
CHECKS: dict[str, list[str]] = {
    "lint": ["ruff", "check", "--quiet"],
    "format": ["ruff", "format", "--quiet", "--check"],
    "types": ["mypy", "--no-error-summary"],
    "agreement": [*PYTEST, *(f"tests/test_{each}.py" for each in ("project", "layout", "docs"))],
    "notebooks": [*PYTEST, "tests/test_notebooks.py"],
}


@dataclass(frozen=True)
class Verdict:
    """The result of a check; `said` is everything that it printed."""

    name: str
    passed: bool
    seconds: float
    said: str


def main(wanted: list[str]) -> None:
    """Run the named checks, or all; go on after a failure, and exit with 1 if any check failed."""
    unknown = sorted(set(wanted) - set(CHECKS))
    if unknown:
        sys.exit(f"There is no check {', '.join(unknown)}; choose from {', '.join(CHECKS)}.")
    failed = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for verdict in pool.map(_run, wanted or CHECKS):
            word = "ok" if verdict.passed else "FAILED"
            print(f"check {verdict.name:<10} {word:<7} {verdict.seconds:5.1f} s", flush=True)
            if not verdict.passed:
                failed.append(verdict.name)
                print(verdict.said, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(name: str) -> Verdict:
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", *CHECKS[name]], capture_output=True, encoding="utf-8"
    )
    seconds = time.perf_counter() - started
    return Verdict(name, run.returncode == 0, seconds, run.stdout + run.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
