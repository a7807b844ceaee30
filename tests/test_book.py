"""The book: every chapter is a page that needs no server, and so are its exercises."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jupytext
import pytest
from bs4 import BeautifulSoup, Tag
from PIL import Image

from minigen_course.grading.exercise import exercises
from tools.book.__main__ import write
from tools.book.formulas import with_mathml
from tools.book.frames import WANTED, Control, record, wanted
from tools.book.pages import page
from tools.book.recorder import MOST_FRAMES
from tools.chapters import ROOT, read_chapters

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
STEMS = [path.stem for path in NOTEBOOKS]
SHEETS = sorted((ROOT / "exercises").glob("[0-9]*.ipynb"))
PAGES = {path.stem: path for path in NOTEBOOKS} | {f"{p.stem}_exercises": p for p in SHEETS}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    assert write(folder, drawn=False) == folder / "index.html"
    return folder


@cache  # several tests look at each page
def parsed(page: Path) -> BeautifulSoup:
    """Return a page without what is in its <pre>: a tag for each word of code, and no link."""
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    assert not soup.select("pre a, pre [src], pre math")
    for each in soup.find_all("pre"):
        each.clear()
    return soup


def links(soup: Tag) -> list[str]:
    return [str(link["href"]) for link in soup.find_all("a", href=True)]


def num_pictures(notebook: Path) -> int:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_contents_link_to_every_chapter_and_its_exercises(pages: Path) -> None:
    assert [path.stem for path in SHEETS] == STEMS
    wanted = [f"{stem}{end}.html" for stem in STEMS for end in ("", "_exercises")]
    assert links(parsed(pages / "index.html")) == wanted
    assert all((pages / name).exists() for name in wanted)


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_has_its_figures_and_links_to_its_neighbours(pages: Path, stem: str) -> None:
    page = pages / f"{stem}.html"
    soup = parsed(page)
    own = [each for each in links(soup) if not re.match(r"https?://|#", each)]
    assert all((pages / each).exists() for each in own), own
    assert "index.html" in own
    assert "widget-view+json" not in page.read_text(encoding="utf-8")
    shown = soup.find_all("img")
    figures = [each for each in shown if str(each.get("src")).startswith("data:image/png;base64,")]
    assert all(str(each["alt"]).endswith(".") for each in figures), "captions are sentences"
    assert len(figures) == num_pictures(PAGES[stem])


@pytest.mark.parametrize("stem", STEMS)
def test_a_chapter_and_its_exercises_link_to_each_other(pages: Path, stem: str) -> None:
    chapter, sheet = parsed(pages / f"{stem}.html"), parsed(pages / f"{stem}_exercises.html")
    for soup, other in ((chapter, f"{stem}_exercises.html"), (sheet, f"{stem}.html")):
        for place in ("nav", "main"):
            assert soup.select(f'{place} a[href="{other}"]'), f"{place} has no link to {other}"
    names = [each.name for each in exercises(stem[:2]).values()]
    titles = [each.get_text().rstrip("¶") for each in sheet.find_all("h2")]
    assert titles[: len(names)] == names
    for word in ("colab.research.google.com", "mybinder.org"):
        (link,) = [each for each in links(sheet) if word in each]
        assert link.endswith(f"exercises/{stem}.ipynb")


def test_the_maps_table_links_to_every_page_of_exercises(pages: Path) -> None:
    (table,) = [
        each for each in parsed(pages / "00_map.html").find_all("table") if "to read" in each.text
    ]
    assert links(table) == [f"{s}{end}.html" for s in STEMS for end in ("", "_exercises")]


@pytest.mark.parametrize("stem", ["index", *PAGES])
def test_a_page_loads_nothing_from_the_network_and_fits_a_phone(pages: Path, stem: str) -> None:
    soup = parsed(pages / f"{stem}.html")
    loaded = [str(each["src"]) for each in soup.find_all(src=True)]
    assert not [each for each in loaded if not each.startswith("data:")]
    assert not soup.find_all("link")
    assert soup.find("meta", attrs={"name": "viewport"})


@pytest.mark.parametrize("stem", PAGES)
def test_every_formula_is_shown_without_a_script(pages: Path, stem: str) -> None:
    soup = parsed(pages / f"{stem}.html")
    markdown = "".join(
        "".join(cell["source"])
        for cell in json.loads(PAGES[stem].read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "markdown"
    )
    blocks = markdown.count("$$") // 2
    assert len(soup.find_all("math", attrs={"display": "block"})) == blocks
    shown = [each for each in soup.strings if not each.find_parent(["code", "math", "style"])]
    assert not re.findall(r"\\[a-z]{2,}|\$\$|\$[a-zA-Z]", "".join(shown))


def test_a_formula_becomes_mathml_and_code_and_money_stay() -> None:
    assert with_mathml("`$a$` and $7.80, or $2.34") == "`$a$` and $7.80, or $2.34"
    assert with_mathml("```\n$a$\n```\n") == "```\n$a$\n```\n"
    shown = with_mathml(r"for $i \le n$: $$\Big\lceil \frac{p}{a} \Big\rceil$$")
    assert shown.startswith("for <math")
    assert shown.count("<math") == 2
    assert "<mfrac>" in shown
    with pytest.raises(ValueError, match=r"cannot show \\nosuch of the formula"):
        with_mathml(r"$\nosuch{a}$")


def explored(stem: str) -> dict[str, set[str]]:
    """The names of the controls of each numbered explorable of a notebook."""
    notebook = jupytext.read(ROOT / "notebooks" / f"{stem}.py")
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    tree = ast.parse("\n".join(line for line in source.splitlines() if line[:1] not in "%!"))
    found = {}
    for each in ast.walk(tree):
        name = getattr(getattr(each, "func", None), "id", "")
        if name in ("explore", "replay") and isinstance(each, ast.Call):
            given = {keyword.arg or "" for keyword in each.keywords}
            texts = [arg.value for arg in each.args if isinstance(arg, ast.Constant)]
            numbers = [getattr(k.value, "value", "") for k in each.keywords if k.arg == "number"]
            (number,) = [
                text for text in [*texts, *numbers] if re.fullmatch(r"\d\d\.\d+", str(text))
            ]
            found[number] = given | ({"step"} if name == "replay" else set())
    return found


def test_the_book_draws_explorables_that_exist_in_many_chapters() -> None:
    chapters = {path.stem[:2]: explored(path.stem) for path in NOTEBOOKS}
    grids = {number: grid for each in chapters for number, grid in wanted(each).items()}
    assert len(grids) >= 12
    for number, grid in grids.items():
        assert set(grid) <= chapters[number[:2]][number], f"{WANTED.name}: {number}"


TINY = """# %%
from matplotlib.figure import Figure

from minigen_course.figures.explore import explore


def draw(size, way, again):
    figure = Figure(figsize=(2, 1))
    figure.text(0.1, 0.5, f"{size} {way}")
    return figure


explore(draw, "A tiny one.", "99.1", size=(1, 9, 1, 4), way=["a", "b"], again=None)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with one explorable, executed as far as the book needs it."""
    path = tmp_path_factory.mktemp("tiny") / "99_tiny.ipynb"
    jupytext.write(jupytext.reads(TINY, fmt="py:percent"), path)
    return path


def test_an_explorable_is_drawn_for_all_values_of_its_controls(tiny: Path, tmp_path: Path) -> None:
    found = record(tiny, {"99.1": {"size": 3, "way": 2}}, tmp_path)
    size = Control("size", ["1", "4", "5", "9"], at=1, slider=True)
    assert found == {"99.1": [size, Control("way", ["a", "b"], at=0, slider=False)]}
    frames = sorted(path.stem for path in (tmp_path / "99.1").glob("*.png"))
    assert frames == sorted(f"{at}-{way}" for at in range(4) for way in range(2))
    assert len({(tmp_path / "99.1" / f"{each}.png").read_bytes() for each in frames}) == 8
    with Image.open(tmp_path / "99.1" / "0-0.png") as frame:
        assert frame.width > 100


def test_what_cannot_be_drawn_is_said(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"99_tiny.ipynb has no explorable numbered 99.2"):
        record(tiny, {"99.2": {}}, tmp_path)
    with pytest.raises(Exception, match=r"Figure 99.1 has no control named speed"):
        record(tiny, {"99.1": {"speed": 3}}, tmp_path)
    with pytest.raises(Exception, match=rf"would have .* frames, more than {MOST_FRAMES}"):
        record(tiny, {"99.1": {"size": list(range(200))}}, tmp_path)


def test_the_code_of_the_claims_is_folded_below_their_table() -> None:
    (chapter,) = (each for each in read_chapters() if each.number == "14")
    html = page(chapter, NOTEBOOKS[0].parent / "14_attention.ipynb", None, None, {})
    (folded,) = re.findall(
        r"<details><summary>The code of what follows.*?</details>", html, re.DOTALL
    )
    assert "verdicts" in folded
    assert html.count(">verdicts</span>") == 2, "the import, and the folded call"


def test_a_page_shows_the_controls_of_its_explorables() -> None:
    (chapter,) = (each for each in read_chapters() if each.number == "14")
    controls = [
        Control("layer", ["0", "9", "18"], at=2, slider=True),
        Control("way", ["<a>", "b"], at=1, slider=False),
    ]
    path = ROOT / "notebooks" / "14_attention.ipynb"
    soup = BeautifulSoup(page(chapter, path, None, None, {"14.4": controls}), "html.parser")
    (box,) = soup.select(".explorable")
    assert box["data-frames"] == "frames/14.4/"
    slider: Any = box.find("input")
    assert (slider["max"], slider["value"]) == ("2", "2")
    assert json.loads(slider["data-values"]) == ["0", "9", "18"]
    assert [each.text for each in box.find_all("option")] == ["<a>", "b"]
    controls_of_page: Any = box.find_all(["input", "select"])
    assert [each["autocomplete"] for each in controls_of_page] == ["off", "off"], "at a reload"
    assert str(box.find("img"))
    assert "addEventListener" in soup.find_all("script")[-1].text
