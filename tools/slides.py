"""Make slides of the chapters, one PDF per part: `python -m tools.slides [FOLDER] [PART ...]`.

A chapter gives its problem, its figures with their captions, its claims with their verdicts, its
exercises and its summary; all of it comes from the executed notebook and the exercises. FOLDER is
build/slides if it is left out, and a PART is the first digit of its chapters. Needs no browser.
"""

import base64
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from PIL import Image

from minigen_course.figures.claims import KEY
from minigen_course.figures.style import BLUE, INK, PALE, QUIET
from minigen_course.handout.sheet import table_rows
from tools import chapter_texts
from tools.chapters import BUILD, ROOT, Chapter, read_chapters, read_parts

WIDTH, HEIGHT = 13.333, 7.5  # inches: 16 by 9
MARGIN, POINTS = 0.7, 72
TITLE, TEXT, SMALL = 26, 17, 13  # sizes of letters, in points
LINE = 1.35  # the height of a line, in sizes of its letters
SPACE, BOLDER = 0.36, 1.12  # width of a space, of bold over normal letters, in sizes
MAP = "The engine's parts; this chapter is about:"
NUMBERED = re.compile(r"Figure (\d\d\.\d+)\. ")
PROBLEMS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Slide:
    """One page: a title, lines of text, and a picture with its caption, each of which may be empty.

    A line that begins with "- " is an entry of a list; one that begins with "# " stands out.
    """

    title: str
    lines: tuple[str, ...] = ()
    picture: bytes = b""
    caption: str = ""


def slides(part: str) -> list[Slide]:
    """Return all slides of a part, the digit of its chapters."""
    chapters = [each for each in read_chapters() if each.number[0] == part]
    if not chapters:
        raise ValueError(f"There is no part {part!r}; there are {', '.join(read_parts())}.")
    name = f"Part {part}: {read_parts()[part]}"
    listed = [f"- {each.number}  {each.title} ({_time(each)})" for each in chapters]
    found = [Slide(name, ("# minigen", *listed))]
    for chapter in chapters:
        found += _of_chapter(chapter)
    taken = [f"- {each.number}  {chapter_texts.summary(each)[0]}" for each in chapters]
    return found + _in_pages(f"{name}: what to take home", taken)


def page(slide: Slide) -> Figure:
    """Draw a slide. Raises `ValueError` if its text is higher than the page."""
    drawn = Figure(figsize=(WIDTH, HEIGHT), facecolor="white", dpi=100)
    drawn.add_artist(_bar())
    top = _write(drawn, slide.title, HEIGHT - MARGIN, TITLE, BLUE, bold=True) - 0.2
    bottom = MARGIN * 0.6
    if slide.caption:
        bottom += _height(slide.caption, SMALL)
        _write(drawn, slide.caption, bottom, SMALL, QUIET)
        bottom += 0.15
    for line in slide.lines:
        top = _line(drawn, line, top) - 0.12
    if slide.picture:
        _place(drawn, slide.picture, top, bottom)
    elif top < 0:
        raise ValueError(f"The slide {slide.title!r} has more lines than a page.")
    return drawn


def write(part: str, folder: Path) -> Path:
    """Write a part's slides; return the path of the PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}_{read_parts()[part].replace(' ', '_')}.pdf"
    facts = {"Title": f"minigen: {read_parts()[part]}", "CreationDate": None}
    with rc_context({"pdf.fonttype": 42}), PdfPages(path, metadata=facts) as pdf:
        for each in slides(part):
            pdf.savefig(page(each))
    return path


def _of_chapter(chapter: Chapter) -> Iterator[Slide]:
    name = f"{chapter.number}  {chapter.title}"
    outputs = _outputs(chapter)
    pictures = list(_pictures(outputs))
    here = [png for png, caption in pictures if caption.startswith(MAP)]
    shown = [(png, caption) for png, caption in pictures if not caption.startswith(MAP)]
    problem = _problems()[chapter.number]
    yield Slide(name, (f"# {problem}",), *here[:1])
    able = [f"- {_plain(each)}" for each in chapter_texts.aim(chapter).split("; ")]
    yield Slide(f"{name}: afterwards you can", tuple(able))
    numbers = _numbers(outputs)
    for png, caption in shown:
        number = numbers.get(caption)
        yield Slide(name, (), png, f"Figure {number}. {caption}" if number else caption)
    claims = [
        f"- {_plain(each['statement'])}. {_plain(each['outcome'].capitalize())}: "
        f"{_plain(each['found'])}"
        for each in _claims(outputs)
    ]
    yield from _in_pages(f"{name}: claims, and what was found", claims)
    tasks = [
        f"- {_plain(task)}: {level}, {points} points, {minutes} min"
        for task, level, points, minutes in table_rows(chapter.number)
    ]
    yield from _in_pages(f"{name}: exercises", tasks)
    summary = [f"- {_plain(each)}" for each in chapter_texts.summary(chapter)]
    yield from _in_pages(f"{name}: summary", summary)


def _in_pages(title: str, lines: Sequence[str]) -> list[Slide]:
    """Return slides with these lines, as many on each as fit."""
    found: list[list[str]] = [[]]
    room = left = HEIGHT - 2 * MARGIN - _height(title, TITLE) - 0.2
    for line in lines:
        needs = _height(line, TEXT, 0.3) + 0.12
        if needs > left and found[-1]:
            found.append([])
            left = room
        found[-1].append(line)
        left -= needs
    return [Slide(title, tuple(each)) for each in found if each]


def _outputs(chapter: Chapter) -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / chapter.notebook).read_text(encoding="utf-8"))
    return [each for cell in notebook["cells"] for each in cell.get("outputs", ())]


def _pictures(outputs: list[dict[str, Any]]) -> Iterator[tuple[bytes, str]]:
    for data in (each.get("data", {}) for each in outputs):
        if "image/png" in data:
            png = base64.b64decode("".join(data["image/png"]))
            yield png, _plain("".join(data["text/plain"]))


def _numbers(outputs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the number of each figure by its caption."""
    texts = ("".join(each.get("data", {}).get("text/plain", "")) for each in outputs)
    return {
        _plain(text[found.end() :]): found[1] for text in texts if (found := NUMBERED.match(text))
    }


def _claims(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in outputs:
        yield from each.get("metadata", {}).get(KEY, {}).get("claims", ())


def _plain(text: str) -> str:
    """Return a passage of Markdown as one line of plain text.

    >>> _plain("a **block** of `n`\\nslots, see [here](x.md)")
    'a block of n slots, see here'
    """
    text = chapter_texts.without_links(text)
    return re.sub(r"\*\*|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|`|\$|⟨|⟩", "", text)


def _time(chapter: Chapter) -> str:
    reading, doing = chapter.minutes
    return f"{reading} min to read, {doing} min of exercises"


@cache
def _problems() -> dict[str, str]:
    return dict(tomllib.loads(PROBLEMS.read_text(encoding="utf-8")))


def _bar() -> Any:
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - one artist of one function

    return Rectangle((0, 0.975), 1, 0.025, color=PALE)


def _line(drawn: Figure, line: str, top: float) -> float:
    """Write a line of a slide below `top` inches; return where it ends."""
    kind, _, text = line.partition(" ")
    if kind == "#":
        return _write(drawn, text, top, TEXT + 3, INK)
    _write(drawn, "•", top, TEXT, BLUE)
    return _write(drawn, text, top, TEXT, INK, indent=0.3)


def _write(
    drawn: Figure,
    text: str,
    top: float,
    size: int,
    colour: str,
    *,
    bold: bool = False,
    indent: float = 0,
) -> float:
    """Write wrapped text below `top` inches from the bottom; return where it ends."""
    wrapped = _wrapped(text, size, indent)
    drawn.text(
        (MARGIN + indent) / WIDTH,
        top / HEIGHT,
        "\n".join(wrapped),
        fontsize=size,
        color=colour,
        weight="bold" if bold else "normal",
        va="top",
        linespacing=LINE,
        parse_math=False,
    )
    return top - len(wrapped) * size * LINE / POINTS


def _height(text: str, size: int, indent: float = 0) -> float:
    return len(_wrapped(text, size, indent)) * size * LINE / POINTS


def _wrapped(text: str, size: int, indent: float) -> list[str]:
    """Return the lines of a text that is as wide as a page, without its margins."""
    room = (WIDTH - 2 * MARGIN - indent) * POINTS
    lines, used = [""], 0.0
    for word in text.split():
        wide = _width(word) * size
        space = SPACE * size if lines[-1] else 0
        if lines[-1] and used + space + wide > room:
            lines.append(word)
            used = wide
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
            used += space + wide
    return lines


@cache
def _width(word: str) -> float:
    """Return the width of a word per point of size, a little more so that bold letters fit too."""
    path = TextPath((0, 0), word.replace("$", r"\$"), size=100)
    return float(path.get_extents().width) / 100 * BOLDER


def _place(drawn: Figure, png: bytes, top: float, bottom: float) -> None:
    """Draw a picture as large as fits between two heights, in the middle of the page."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    wide, high = WIDTH - 2 * MARGIN, top - bottom
    scale = min(wide / image.width, high / image.height)
    width, height = image.width * scale, image.height * scale
    left, below = (WIDTH - width) / 2, bottom + (high - height) / 2
    axes = drawn.add_axes(
        (left / WIDTH, below / HEIGHT, width / WIDTH, height / HEIGHT), frameon=False
    )
    axes.set_axis_off()
    axes.imshow(image, aspect="auto")


def main(words: list[str]) -> None:
    """Write the slides of the named parts, or of all."""
    parts = [each for each in words if each in read_parts()]
    folders = [each for each in words if each not in parts]
    if len(folders) > 1:
        sys.exit(f"Name one folder, and parts of {', '.join(read_parts())}.")
    folder = Path(folders[0]) if folders else BUILD / "slides"
    for part in parts or read_parts():
        path = write(part, folder)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
