"""The course's notebooks and its list of chapters, in a clone or in an installed wheel."""

import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minigen.errors import OptionError

CLONE = Path(__file__).resolve().parents[2]
CHAPTERS = "chapters.toml"
REPOSITORY = "https://github.com/minigen/minigen"


@dataclass(frozen=True)
class Heading:
    """A chapter as a reader names it: number, stem, title, and minutes for its exercises."""

    number: str
    stem: str
    title: str
    minutes: int

    @property
    def name(self) -> str:
        """The name of the chapter's files, such as `22_paged`."""
        return f"{self.number}_{self.stem}"


def notebooks_folder() -> Path:
    """Return the folder of minigen's notebooks. Raises `OptionError` if there is none."""
    if (CLONE / "notebooks" / CHAPTERS).exists():
        return CLONE / "notebooks"
    for file in importlib.metadata.files("minigen") or ():
        if file.name == CHAPTERS:
            return Path(str(file.locate())).resolve().parent
    raise OptionError("This installation of minigen has no notebooks; install it from its wheel.")


def results_folder() -> Path:
    """Return the folder of those benchmark results that notebooks show, in a clone of all."""
    return notebooks_folder().parent / "benchmarks" / "results"


@cache
def headings() -> dict[str, Heading]:
    """Return the chapters by number, in order."""
    text = (notebooks_folder() / CHAPTERS).read_text(encoding="utf-8")
    return {
        each["number"]: Heading(each["number"], each["stem"], each["title"], each["minutes"][1])
        for each in tomllib.loads(text)["chapter"]
    }
