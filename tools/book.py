"""Write all chapters as one static site: `python -m tools.book [FOLDER]` (default: build/book).

The site works without a server: open index.html, the table of contents, as a file. Explorables are
shown as pictures.
"""

import re
import sys
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from rich.progress import track

from minigen_course.grading.task import SOURCE
from tools.chapters import BUILD, ROOT, Chapter, read_chapters, read_parts

NOTEBOOKS = ROOT / "notebooks"
STYLE = """
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
a { color: #0072b2 } td { padding: 0.2rem 1rem 0.2rem 0; vertical-align: top }
"""
BAR = "padding:0.6rem 1rem;font-family:sans-serif;border-bottom:1px solid #d9d9d9"


def main() -> None:
    """Write a page for every chapter that has a notebook, and the table of contents."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILD / "book"
    folder.mkdir(parents=True, exist_ok=True)
    chapters = [each for each in read_chapters() if _notebook(each).exists()]
    for number, chapter in enumerate(track(chapters, "writing", transient=True)):
        before = chapters[number - 1] if number else None
        after = chapters[number + 1] if number + 1 < len(chapters) else None
        page = folder / f"{_name(chapter)}.html"
        page.write_text(_page(chapter, before, after), encoding="utf-8")
    (folder / "index.html").write_text(_contents(chapters), encoding="utf-8")
    print(folder / "index.html")


def _name(chapter: Chapter) -> str:
    return f"{chapter.number}_{chapter.stem}"


def _notebook(chapter: Chapter) -> Path:
    return NOTEBOOKS / f"{_name(chapter)}.ipynb"


def _page(chapter: Chapter, before: Chapter | None, after: Chapter | None) -> str:
    notebook = nbformat.read(_notebook(chapter), as_version=4)
    for output in (each for cell in notebook.cells for each in cell.get("outputs", ())):
        if "image/png" in output.get("data", {}):
            output.data = {"text/html": _image(output.data)}
    name = f"{chapter.number} {chapter.title}"
    body, _ = HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": name}})
    body = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="\1.html"', body)
    body = body.replace('href="../', f'href="{SOURCE}/')  # documents, such as the glossary
    links = [_link(before, "← ") if before else "", '<a href="index.html">contents</a>']
    links.append(_link(after, "", " →") if after else "")
    bar = f'<nav style="{BAR}">{" &nbsp; ".join(filter(None, links))}</nav>'
    return re.sub(r"(<body[^>]*>)", rf"\1{bar}", body, count=1)


def _image(data: dict[str, str]) -> str:
    """Return a picture with its caption, to replace a widget that needs a kernel."""
    caption = escape(data["text/plain"])
    return f'<img alt="{caption}" src="data:image/png;base64,{data["image/png"].strip()}">'


def _link(chapter: Chapter, left: str, right: str = "") -> str:
    text = escape(f"{left}{chapter.number} {chapter.stem}{right}")
    return f'<a href="{_name(chapter)}.html">{text}</a>'


def _contents(chapters: list[Chapter]) -> str:
    parts, rows = read_parts(), []
    for chapter in chapters:
        link = f'<a href="{_name(chapter)}.html">{chapter.number} {escape(chapter.title)}</a>'
        rows.append(f"<tr><td>{escape(parts[chapter.number[0]])}</td><td>{link}</td></tr>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>minigen</title>'
        f"<style>{STYLE}</style></head><body><h1>minigen</h1>"
        "<p>An LLM inference engine that you can hold in your head, built step by step.</p>"
        f"<table>{''.join(rows)}</table></body></html>\n"
    )


if __name__ == "__main__":
    main()
