"""The book: every chapter is a page that needs no server, and the contents link to it."""

import json
import re
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from tools import book
from tools.chapters import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["book", str(folder)])
        book.main()
    return folder


def parsed(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def links(soup: BeautifulSoup) -> list[str]:
    return [str(link["href"]) for link in soup.find_all("a", href=True)]


def num_pictures(notebook: Path) -> int:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_contents_link_to_every_chapter(pages: Path) -> None:
    wanted = [f"{path.stem}.html" for path in NOTEBOOKS]
    assert links(parsed(pages / "index.html")) == wanted
    assert all((pages / name).exists() for name in wanted)


@pytest.mark.parametrize("stem", [path.stem for path in NOTEBOOKS])
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
    assert len(figures) == num_pictures(ROOT / "notebooks" / f"{stem}.ipynb")
