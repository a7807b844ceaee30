"""Write the parts of docs/instructors that come from the exercises.

`python -m tools.instructors --write` writes the tables of syllabus.md; `--mistakes` runs all known
wrong answers (minutes) and writes mistakes.md; with chapters (`--mistakes 22 24`) it writes their
sections only. `--check` compares both pages with what would be written, and changes nothing.
"""

import re
import sys

from tools.chapters import ROOT, Chapter, read_chapters, replaced
from tools.instructors import mistakes, tables

GUIDE = ROOT / "docs" / "instructors"
SYLLABUS, MISTAKES = GUIDE / "syllabus.md", GUIDE / "mistakes.md"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def syllabus(text: str) -> str:
    """Return the syllabus with all its generated sections."""
    for name, content in tables.sections().items():
        text = replaced(text, f"<!-- {name} -->", f"<!-- /{name} -->", f"\n{content}\n")
    return text


def agrees(one: str, other: str) -> bool:
    """Return whether two texts are equal except for numbers.

    Python's version and the processor decide some of the numbers in messages.
    """
    return NUMBER.sub("#", one) == NUMBER.sub("#", other)


def write_mistakes(numbers: list[str]) -> None:
    """Write the sections of these chapters, or of all."""
    for chapter in _chosen(numbers):
        text = mistakes.with_section(
            MISTAKES.read_text(encoding="utf-8"), chapter, f"\n{mistakes.section(chapter)}\n"
        )
        MISTAKES.write_text(text, encoding="utf-8")
        print(f"chapter {chapter.number}: written", flush=True)


def check(numbers: list[str]) -> None:
    """Exit with 1 if a page differs from what would be written."""
    wrong = []
    text = SYLLABUS.read_text(encoding="utf-8")
    if syllabus(text) != text:
        wrong.append("syllabus.md: run python -m tools.instructors --write")
    page = MISTAKES.read_text(encoding="utf-8")
    for chapter in _chosen(numbers):
        made = mistakes.with_section(page, chapter, f"\n{mistakes.section(chapter)}\n")
        if not agrees(made, page):
            again = f"python -m tools.instructors --mistakes {chapter.number}"
            wrong.append(f"mistakes.md, chapter {chapter.number}: run {again}")
        print(f"chapter {chapter.number}: checked", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))


def _chosen(numbers: list[str]) -> list[Chapter]:
    known = {each.number: each for each in read_chapters()}
    unknown = [each for each in numbers if each not in known]
    if unknown:
        sys.exit(f"There is no chapter {', '.join(unknown)}; there are {', '.join(known)}.")
    return [known[each] for each in numbers or known]


def main(words: list[str]) -> None:
    """Do what the first word says, for the chapters that follow it."""
    match words:
        case ["--write"]:
            text = SYLLABUS.read_text(encoding="utf-8")
            SYLLABUS.write_text(syllabus(text), encoding="utf-8")
        case ["--mistakes", *numbers]:
            write_mistakes(numbers)
        case ["--check", *numbers]:
            check(numbers)
        case _:
            sys.exit("Write --write, --mistakes or --check; the last two may name chapters.")


if __name__ == "__main__":
    main(sys.argv[1:])
