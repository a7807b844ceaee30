"""Count what the chapters consist of: `python -m tools.course_counts`.

A row per chapter: words of prose, displayed formulas, figures with a number, links to other sites,
links to the glossary, predictions, claims, and exercises by level (warm-up, core, stretch; those
that stand only in the workspace are included).
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from minigen_course.grading.exercise import CHAPTERS, exercises
from tools.chapters import ROOT

COLUMNS = (
    "words",
    "formulas",
    "figures",
    "links",
    "glossary",
    "predictions",
    "claims",
    "exercises",
)
LEVELS = ("warm-up", "core", "stretch")


def counts(path: Path) -> dict[str, str]:
    """Return the counts of one executed notebook, by column."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose, code = (
        "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)
        for kind in ("markdown", "code")
    )
    printed = [
        "".join(output.get("data", {}).get("text/plain", ""))
        for cell in cells
        for output in cell.get("outputs", ())
    ]
    chapter = path.stem[:2]
    levels: Counter[str] = Counter(
        each.level for each in (exercises(chapter).values() if chapter in CHAPTERS else ())
    )
    found = (
        len(re.findall(r"\b[A-Za-z][\w'-]*\b", re.sub(r"\$[^$]*\$|\(https?:[^)]*\)", " ", prose))),
        prose.count("$$") // 2,
        sum(text.startswith("Figure ") for text in printed),
        len(set(re.findall(r"\]\((https?://[^)]+)\)", prose))),
        prose.count("glossary.md#"),
        len(re.findall(r"\bpredict\(", code)),
        len(re.findall(r"\bClaim\(", code)),
    )
    shown = [f"{each:,}" for each in found] + [" + ".join(str(levels[each]) for each in LEVELS)]
    return dict(zip(COLUMNS, shown, strict=True))


def main() -> None:
    """Print the table as Markdown."""
    sys.stdout.write(f"| chapter | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n")
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        sys.stdout.write(f"| {path.stem} | {' | '.join(counts(path).values())} |\n")


if __name__ == "__main__":
    main()
