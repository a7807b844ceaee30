"""Check the tree without running it: `python -m tools.check`. Prints each check's verdict.

ruff (lint and format), mypy, the agreement of chapters, modules, tests and documents
(`tests/test_project.py`), and that of notebooks: pairs, stubs, mirrors, budgets
(`tests/test_notebooks.py`).
"""

import subprocess
import sys
import time

PYTEST = ["pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
CHECKS: dict[str, list[str]] = {
    "lint": ["ruff", "check", "--quiet"],
    "format": ["ruff", "format", "--quiet", "--check"],
    "types": ["mypy", "--no-error-summary"],
    "agreement": [*PYTEST, "tests/test_project.py"],
    "notebooks": [*PYTEST, "tests/test_notebooks.py"],
}


def main() -> None:
    """Run all checks, even after one fails; exit with 1 if any did."""
    failed = []
    for name, command in CHECKS.items():
        begun = time.perf_counter()
        run = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        verdict = "ok" if run.returncode == 0 else "FAILED"
        print(f"check {name:<10} {verdict:<7} {time.perf_counter() - begun:5.1f} s", flush=True)
        if run.returncode:
            failed.append(name)
            print(run.stdout + run.stderr, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
