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
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
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
FAMILY, MEASURED, FIXED = "DejaVu Sans", 100, 64  # the size in which widths are measured, in 64ths
HINTED = 1.03  # letters on a screen are up to this much wider
GAP = 0.12  # inches between two lines
MAP = "The engine's parts; this chapter is about:"
NUMBERED = re.compile(r"Figure (\d\d\.\d+)\. ")
MATH = {  # LaTeX in prose -> the same as text
    r"\\hat (\w)": "\\1\u0302",
    r"\\sqrt (\w)": "√\\1",
    r"\\text\{([^}]*)\}": r"\1",
    r"\\cdot": "·",
    r"\\max": "max",
    r"\^\{([^}]*)\}": r"^(\1)",
    r"\^2": "²",
    r"\^3": "³",
}
PROBLEMS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Slide:
    """One page: a title, lines of text, and a picture with its caption, each of which may be empty.

    A line that begins with "- " is an entry of a list; one that begins with "# " stands out, and
    one with "= " is in small letters.
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
    if len(chapters) == 1:
        return found  # which ends with its summary
    taken = [f"- {each.number}  {_plain(chapter_texts.summary(each)[0])}" for each in chapters]
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
        top = _line(drawn, line, top) - GAP
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
    aim = f"Afterwards you can {_plain(chapter_texts.aim(chapter))}."
    yield Slide(name, (f"# {problem}", f"= {aim}"), here[0] if here else b"")
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
    """Return slides with these lines: as few slides as possible, about equally full."""
    room = HEIGHT - MARGIN - 0.3 - _height(title, TITLE, bold=True) - 0.2
    found = _divided(lines, room)
    while len(fuller := _divided(lines, room - 0.1)) == len(found) and room > 1:
        found, room = fuller, room - 0.1
    return [Slide(title, tuple(each)) for each in found if each]


def _divided(lines: Sequence[str], room: float) -> list[list[str]]:
    """Return the lines in groups that are at most `room` inches high, if one line is not higher."""
    found: list[list[str]] = [[]]
    left = room
    for line in lines:
        needs = _height(line, TEXT, 0.3) + GAP
        if needs > left and found[-1]:
            found.append([])
            left = room
        found[-1].append(line)
        left -= needs
    return found


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
    for latex, shown in MATH.items():
        text = re.sub(latex, shown, text)
    text = re.sub(r"\*\*|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|`|\$|⟨|⟩", "", text)
    return "".join(each if ord(each) in _glyphs() else f"U+{ord(each):04X}" for each in text)


@cache
def _glyphs() -> frozenset[int]:
    """Return the characters that the font of the slides can draw."""
    return frozenset(_font(bold=False).get_charmap())


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
    if kind == "=":
        return _write(drawn, text, top, SMALL, QUIET)
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
    wrapped = _wrapped(text, size, indent, bold)
    drawn.text(
        (MARGIN + indent) / WIDTH,
        top / HEIGHT,
        "\n".join(wrapped),
        fontsize=size,
        color=colour,
        family=FAMILY,
        weight="bold" if bold else "normal",
        va="top",
        linespacing=LINE,
        parse_math=False,
    )
    return top - len(wrapped) * size * LINE / POINTS


def _height(text: str, size: int, indent: float = 0, *, bold: bool = False) -> float:
    return len(_wrapped(text, size, indent, bold)) * size * LINE / POINTS


@cache
def _wrapped(text: str, size: int, indent: float, bold: bool) -> tuple[str, ...]:
    """Return the lines of a text that is as wide as a page, without its margins."""
    room = (WIDTH - 2 * MARGIN - indent) * POINTS / size
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, bold) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


def _width(text: str, bold: bool) -> float:
    """Return the width of a text in sizes of its letters."""
    font = _font(bold)
    font.set_text(text)
    return float(font.get_width_height()[0]) / FIXED / MEASURED * HINTED


@cache
def _font(bold: bool) -> FT2Font:
    """Return a font that is not shared with the figures, which would change its size."""
    found = FT2Font(findfont(FontProperties(family=FAMILY, weight="bold" if bold else "normal")))
    found.set_size(MEASURED, POINTS)
    return found


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
