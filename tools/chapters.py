"""The chapters, read from notebooks/chapters.toml, with their list and their table in documents.

`python -m tools.chapters 24` prints where everything of chapter 24 is; `python -m tools.chapters
--write` writes the list into README.md, the table into docs/course.md, each chapter's card into the
head of its notebook's source, and the table of all chapters into that of the map.
"""

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / (os.environ.get("BUILD_DIR") or "build")  # what the tools build; git ignores it
BEGIN, END = "<!-- chapters -->", "<!-- /chapters -->"
CARD_BEGIN, CARD_END = "<!-- card -->", "<!-- /card -->"
CARD = {  # a field of a card -> its heading
    "problem": "problem",
    "phase": "phase",
    "resource": "what saturates",
    "layer": "layer",
    "knob": "knob",
    "metric": "metric",
}
MOST_LINKS = 7  # to the modules of one chapter


@dataclass(frozen=True)
class Chapter:
    """One chapter: number, stem, title, the dotted names of the modules that it builds, its card.

    `minutes` are for reading and for the exercises.
    """

    number: str
    stem: str
    title: str
    modules: tuple[str, ...]
    card: dict[str, str]
    minutes: tuple[int, int]

    @property
    def paths(self) -> list[str]:
        """The files of the chapter's modules."""
        return [f"{module.replace('.', '/')}.py" for module in self.modules]

    @property
    def notebook(self) -> str:
        """The path of its notebook, which need not exist yet."""
        return f"notebooks/{self.number}_{self.stem}.ipynb"

    @property
    def sheet(self) -> str:
        """The path of the notebook of its exercises."""
        return f"exercises/{self.number}_{self.stem}.ipynb"

    @property
    def course(self) -> str:
        """The path of its folder in the course."""
        return f"minigen_course/ch{self.number}_{self.stem}"

    @property
    def tests(self) -> list[str]:
        """The paths of its tests, the one with the chapter's own name first.

        A chapter that has only exercises is tested by its answers.
        """
        own = f"test_{self.number}_{self.stem}.py"
        found = [path.name for path in (ROOT / "tests").glob(f"test_{self.number}_*.py")]
        names = sorted(found, key=lambda name: (name != own, name))
        return [f"tests/{name}" for name in names] or [
            f"tests/answers/ch{self.number}_{self.stem}.py"
        ]

    @property
    def benchmarks(self) -> list[str]:
        """The paths of its benchmarks; not every chapter has one."""
        return sorted(
            f"benchmarks/{p.name}" for p in (ROOT / "benchmarks").glob(f"{self.number}_*.py")
        )

    @property
    def places(self) -> dict[str, list[str]]:
        """Every place of the chapter, by what it is."""
        return {
            "notebook": [self.notebook],
            "course": [self.course],
            "exercises": [
                self.sheet,
                f"{self.course}/exercises.toml",
                f"{self.course}/exercises.py",
            ],
            "tests": self.tests,
            "benchmarks": self.benchmarks,
            "modules": self.paths,
        }

    @property
    def built(self) -> bool:
        """Whether the package already has all of the chapter's modules."""
        return bool(self.paths) and all((ROOT / path).exists() for path in self.paths)


def read_parts() -> dict[str, str]:
    """Return the names of the parts by their digit."""
    return dict(_read()["parts"])


def read_chapters() -> list[Chapter]:
    """Return all chapters, in order."""
    return [
        Chapter(
            each["number"],
            each["stem"],
            each["title"],
            tuple(each["modules"]),
            each["card"],
            tuple(each["minutes"]),
        )
        for each in _read()["chapter"]
    ]


def links() -> str:
    """Return one line per chapter for README.md: a link to its notebook, and what it builds."""
    lines = []
    for chapter in read_chapters():
        name = f"{chapter.number} {chapter.stem}"
        has_notebook = (ROOT / chapter.notebook).exists()
        shown = f"[{name}]({chapter.notebook})" if has_notebook else f"{name} (to come)"
        lines.append(f"- {shown}: {chapter.title}")
    return "\n".join(lines)


def card(chapter: Chapter) -> str:
    """Return a chapter's card as a Markdown table, for the head of its notebook."""
    head = f"| {' | '.join(CARD[name] for name in chapter.card)} |"
    rule = f"|{'---|' * len(chapter.card)}"
    return "\n".join([head, rule, f"| {' | '.join(chapter.card.values())} |"])


def with_card(source: str, chapter: Chapter) -> str:
    """Return a notebook's source with the card in its head; one without markers stays as it is."""
    if CARD_BEGIN not in source:
        return source
    lines = "\n".join(f"# {line}" for line in card(chapter).splitlines())
    return replaced(source, CARD_BEGIN, f"# {CARD_END}", f"#\n{lines}\n#")


def table() -> str:
    """Return the chapters and their modules as a Markdown table for docs/course.md."""
    parts, rows, before = read_parts(), [], ""
    for chapter in read_chapters():
        part = parts[chapter.number[0]]
        has_notebook = (ROOT / chapter.notebook).exists()
        shown = _modules(chapter) if chapter.built else "" if has_notebook else "to come"
        name = f"{chapter.number} {chapter.stem}"
        more = f" (1 of {len(chapter.tests)})" if len(chapter.tests) > 1 else ""
        places = [("exercises", chapter.sheet), ("course", chapter.course)]
        places += [(f"tests{more}", chapter.tests[0])]
        places += [("benchmark", path) for path in chapter.benchmarks[:1]]
        rows.append(
            f"| {'' if part == before else part} "
            f"| {f'[{name}](../{chapter.notebook})' if has_notebook else name} "
            f"| {chapter.title} | {' '.join(f'[{what}](../{path})' for what, path in places)} "
            f"| {shown} |"
        )
        before = part
    head = "| part | chapter | what it builds | where | modules |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def map_table() -> str:
    """Return the parts and chapters with their problems and times, for the notebook of the map."""
    parts, chapters, before = read_parts(), read_chapters(), ""
    rows = [
        "| part | chapter | about | problem | to read | exercises |",
        "|---|---|---|---|--:|--:|",
    ]
    for chapter in chapters:
        part = f"{chapter.number[0]} {parts[chapter.number[0]]}"
        stem = chapter.stem.replace("_", " ")
        name = f"[{chapter.number} {stem}]({Path(chapter.notebook).name})"
        reading, doing = chapter.minutes
        rows.append(
            f"| {'' if part == before else part} | {name} | {chapter.title} "
            f"| {chapter.card['problem']} | {reading} min | [{doing} min](../{chapter.sheet}) |"
        )
        before = part
    reading, doing = (sum(chapter.minutes[each] for chapter in chapters) for each in (0, 1))
    rows.append(f"| | all {len(chapters)} | | | {reading / 60:.0f} h | {doing / 60:.0f} h |")
    return "\n".join(rows)


def with_map(source: str) -> str:
    """Return the source of the map's notebook with the table of all chapters."""
    lines = "\n".join(f"# {line}" for line in map_table().splitlines())
    return replaced(source, BEGIN, f"# {END}", f"#\n{lines}\n#")


def _modules(chapter: Chapter) -> str:
    """Return links to a chapter's modules; to their folders where the modules are many."""
    paths = chapter.paths
    if len(paths) <= MOST_LINKS:
        return " ".join(f"[{path.split('/')[-1]}](../{path})" for path in paths)
    folders = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    return " ".join(f"[{folder}](../{folder})" for folder in folders)


def replaced(text: str, begin: str, end: str, content: str) -> str:
    """Return a document with the text between two markers replaced; exit if one is missing."""
    missing = [marker for marker in (begin, end) if marker not in text]
    if missing:
        sys.exit(f"A page has no {' and no '.join(missing)}; add the markers.")
    head, tail = text.split(begin)[0], text.split(end)[1]
    inside = f"{content}\n" if content else ""
    return f"{head}{begin}\n{inside}{end}{tail}"


def _read() -> dict[str, Any]:
    return tomllib.loads((ROOT / "notebooks" / "chapters.toml").read_text(encoding="utf-8"))


def main(numbers: list[str]) -> None:
    """Print where everything of some chapters is, or of all; --write writes list, table, cards."""
    if numbers == ["--write"]:
        for page, content in (
            (ROOT / "README.md", links()),
            (ROOT / "docs" / "course.md", table()),
        ):
            text = page.read_text(encoding="utf-8")
            page.write_text(replaced(text, BEGIN, END, content), encoding="utf-8")
        for chapter in read_chapters():
            source = (ROOT / chapter.notebook).with_suffix(".py")
            if source.exists():
                text = source.read_text(encoding="utf-8")
                source.write_text(with_card(text, chapter), encoding="utf-8")
        the_map = (ROOT / read_chapters()[0].notebook).with_suffix(".py")
        the_map.write_text(with_map(the_map.read_text(encoding="utf-8")), encoding="utf-8")
        return
    known = {chapter.number: chapter for chapter in read_chapters()}
    for number in numbers or known:
        if number not in known:
            sys.exit(f"There is no chapter {number}; there are {', '.join(known)}.")
        print(f"{number} {known[number].title}")
        for what, paths in known[number].places.items():
            print(f"  {what:<10} {' '.join(paths) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
