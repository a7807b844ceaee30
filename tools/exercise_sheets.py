"""Write exercises/ from the course's exercises: `python -m tools.exercise_sheets`.

For each chapter: a notebook and its source in the percent format, and a folder with a module per
exercise and one file of tests; for all of them, README.md with levels, points and times.
tests/test_exercise_sheets.py compares every file with what this writes.
"""

import shutil

import jupytext
import nbformat

from minigen_course.handout.workspace import exercise_files
from tools.chapters import ROOT

FOLDER = ROOT / "exercises"


def files() -> dict[str, str]:
    """Return all files of exercises/ by their path in it, with their texts."""
    found = exercise_files()
    for name in [name for name in found if name.endswith(".ipynb")]:
        notebook = nbformat.reads(found[name], as_version=4)
        source = name.replace(".ipynb", ".py")
        found[source] = jupytext.writes(notebook, fmt="py:percent")
    return found


def main() -> None:
    """Write all files, and remove those that no exercise has any more."""
    wanted = files()
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file() and path.relative_to(FOLDER).as_posix() not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in FOLDER.iterdir():
        if path.is_dir() and not any(path.glob("*.py")):  # only caches are left
            shutil.rmtree(path)
    print(f"{len(wanted)} files in {FOLDER.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
