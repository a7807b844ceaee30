"""The list of chapters, read from notebooks/chapters.toml, and the table that README shows.

`python -m tools.chapters` writes the table into README.md.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / (os.environ.get("BUILD_DIR") or "build")  # what tools make and git ignores
BEGIN, END = "<!-- chapters -->", "<!-- /chapters -->"


@dataclass(frozen=True)
class Chapter:
    """One chapter: its number, its stem, and the modules that it builds, as dotted names."""

    number: str
    stem: str
    title: str
    modules: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The modules' files."""
        return [f"{module.replace('.', '/')}.py" for module in self.modules]

    @property
    def notebook(self) -> str:
        """Where its notebook is, or is to be."""
        return f"notebooks/{self.number}_{self.stem}.ipynb"

    @property
    def built(self) -> bool:
        """Whether the package has all of the chapter's modules yet."""
        return bool(self.paths) and all((ROOT / path).exists() for path in self.paths)


def read_parts() -> dict[str, str]:
    """The parts' names by their digit."""
    return dict(_read()["parts"])


def read_chapters() -> list[Chapter]:
    """All chapters, in order."""
    return [
        Chapter(each["number"], each["stem"], each["title"], tuple(each["modules"]))
        for each in _read()["chapter"]
    ]


def table() -> str:
    """Chapters with modules, as a Markdown table."""
    parts, rows, before = read_parts(), [], ""
    for chapter in read_chapters():
        part = parts[chapter.number[0]]
        modules = " ".join(f"[{path.split('/')[-1]}]({path})" for path in chapter.paths)
        has_notebook = (ROOT / chapter.notebook).exists()
        shown = modules if chapter.built else "" if has_notebook else "to come"
        name = f"{chapter.number} {chapter.stem}"
        rows.append(
            f"| {'' if part == before else part} "
            f"| {f'[{name}]({chapter.notebook})' if has_notebook else name} "
            f"| {chapter.title} | {shown} |"
        )
        before = part
    return "\n".join(["| part | chapter | what it builds | modules |", "|---|---|---|---|", *rows])


def _read() -> dict[str, Any]:
    return tomllib.loads((ROOT / "notebooks" / "chapters.toml").read_text(encoding="utf-8"))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", encoding="utf-8")
