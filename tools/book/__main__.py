"""Write all chapters as one static site: `python -m tools.book [FOLDER]` (default: build/book).

Each chapter has a page, and so have its exercises. The site needs no server, no kernel and no
network: open index.html as a file. The explorables of explorables.toml have controls, whose
pictures are drawn now (some minutes); the others are shown as pictures.
"""

import argparse
from pathlib import Path

from rich.progress import track

from tools.book.frames import record, wanted
from tools.book.pages import contents, exercises_name, exercises_page, page
from tools.chapters import BUILD, ROOT, Chapter, read_chapters

NOTEBOOKS = ROOT / "notebooks"


def main() -> None:
    """Write a page for every chapter and its exercises, and the table of contents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder_help = "where to write the site"
    parser.add_argument("folder", nargs="?", type=Path, default=BUILD / "book", help=folder_help)
    quick = "draw nothing: every explorable is one picture (some seconds)"
    parser.add_argument("--pictures", action="store_true", help=quick)
    options = parser.parse_args()
    print(write(options.folder, drawn=not options.pictures))


def write(folder: Path, drawn: bool) -> Path:
    """Write the site into `folder`, and return its first page."""
    folder.mkdir(parents=True, exist_ok=True)
    chapters = [each for each in read_chapters() if _notebook(each).exists()]
    for number, chapter in enumerate(track(chapters, "writing", transient=True)):
        before = chapters[number - 1] if number else None
        after = chapters[number + 1] if number + 1 < len(chapters) else None
        notebook, grids = _notebook(chapter), wanted(chapter.number) if drawn else {}
        explorables = record(notebook, grids, folder / "frames") if grids else {}
        html = page(chapter, notebook, before, after, explorables)
        (folder / f"{notebook.stem}.html").write_text(html, encoding="utf-8")
        html = exercises_page(chapter, ROOT / chapter.sheet, after)
        (folder / exercises_name(chapter)).write_text(html, encoding="utf-8")
    (folder / "index.html").write_text(contents(chapters), encoding="utf-8")
    return folder / "index.html"


def _notebook(chapter: Chapter) -> Path:
    return NOTEBOOKS / f"{chapter.number}_{chapter.stem}.ipynb"


if __name__ == "__main__":
    main()
