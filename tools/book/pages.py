"""A chapter, its exercises, and the contents as pages. They need no network and fit a phone."""

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_output
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from minigen_course.grading.task import SOURCE
from tools.book.formulas import with_mathml
from tools.book.frames import Control
from tools.chapters import Chapter, read_parts

BADGE = r"!\[([^]]+)\]\(https://(?:colab\.research|mybinder)[^)]+\)"  # a picture from elsewhere
Controls = dict[str, list[Control]]  # number of a figure -> what the reader sets


def page(
    chapter: Chapter,
    path: Path,
    before: Chapter | None,
    after: Chapter | None,
    explorables: Controls,
) -> str:
    """Return the page of a chapter, with links to its neighbours and to its exercises.

    A picture whose number is in `explorables` gets its controls; its frames are in frames/NUMBER.
    """
    bar = [
        _link(before, "← ") if before else "",
        '<a href="index.html">contents</a>',
        f'<a href="{exercises_name(chapter)}">exercises</a>',
        _link(after, "", " →") if after else "",
    ]
    script = f"<script>{_asset('explorable.js')}</script>" if explorables else ""
    title = f"{chapter.number} {chapter.title}"
    return _document(title, f"{_bar(bar)}<main>{_body(path, explorables)}</main>{script}")


def exercises_page(chapter: Chapter, path: Path, after: Chapter | None) -> str:
    """Return the page of a chapter's exercises, with links to the chapter and to the next one."""
    bar = [
        _link(chapter, "← "),
        '<a href="index.html">contents</a>',
        _link(after, "", " →") if after else "",
    ]
    body = f"{_bar(bar)}<main>{_body(path, {})}</main>"
    return _document(f"Exercises of chapter {chapter.number}", body)


def exercises_name(chapter: Chapter) -> str:
    """Return the name of the page of a chapter's exercises."""
    return f"{_name(chapter)}_exercises.html"


def _bar(links: list[str]) -> str:
    return f"<nav>{' '.join(filter(None, links))}</nav>"


def _body(path: Path, explorables: Controls) -> str:
    """Return the cells of a notebook as HTML."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(re.sub(BADGE, r"[\1]", cell.source))
        outputs = cell.get("outputs", [])
        for output, number in zip(outputs, _numbers(outputs), strict=True):
            data = output.get("data", {})
            if "image/png" in data:
                output.data = {"text/html": _picture(data, number, explorables)}
            elif "text/markdown" in data:
                data["text/markdown"] = with_mathml(data["text/markdown"])
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            _fold(cell)
    body: str
    body, _ = _exporter().from_notebook_node(notebook)
    body = re.sub(r'href="\.\./exercises/(\d\d_\w+)\.ipynb"', r'href="\1_exercises.html"', body)
    body = re.sub(r'href="(?:\.\./notebooks/)?(\d\d_\w+)\.ipynb"', r'href="\1.html"', body)
    return body.replace('href="../', f'href="{SOURCE}/')  # documents, such as the glossary


@cache  # it compiles its templates
def _exporter() -> HTMLExporter:
    return HTMLExporter(template_name="basic")


def _fold(cell: NotebookNode) -> None:
    """Fold the source of a code cell, so that what it shows comes first."""
    code = highlight(cell.source, PythonLexer(), HtmlFormatter())
    html = f"<details><summary>The code of what follows</summary>{code}</details>"
    cell.outputs.insert(0, new_output("display_data", {"text/html": html}))
    cell.metadata["transient"] = {"remove_source": True}


def contents(chapters: list[Chapter]) -> str:
    """Return the table of contents."""
    parts = read_parts()
    rows = ["<tr><th>part</th><th>chapter</th><th>exercises</th></tr>"]
    for chapter in chapters:
        link = f'<a href="{_name(chapter)}.html">{chapter.number} {escape(chapter.title)}</a>'
        exercises = f'<a href="{exercises_name(chapter)}">{chapter.minutes[1]}&nbsp;min</a>'
        cells = (escape(parts[chapter.number[0]]), link, exercises)
        rows.append("".join(["<tr>", *(f"<td>{each}</td>" for each in cells), "</tr>"]))
    return _document(
        "minigen",
        "<main><h1>minigen</h1>"
        "<p>An LLM inference engine that you can hold in your head, built step by step.</p>"
        f"<table>{''.join(rows)}</table></main>",
    )


def _numbers(outputs: list[Any]) -> list[str]:
    """Return the number of each output's figure: it stands in the caption, the output after it."""
    texts = ["".join(each.get("data", {}).get("text/plain", "")) for each in outputs]
    captions = [re.match(r"Figure (\d\d\.\d+)\. ", text) for text in texts[1:]]
    captions += [None] * (len(texts) - len(captions))
    return [found[1] if found else "" for found in captions]


def _picture(data: dict[str, str], number: str, explorables: Controls) -> str:
    """Return a picture with its caption as HTML, to replace a widget that needs a kernel."""
    caption = escape(data["text/plain"])
    image = f'<img alt="{caption}" src="data:image/png;base64,{data["image/png"].strip()}">'
    if number not in explorables:
        return image
    controls = "".join(map(_control, explorables[number]))
    return f'<div class="explorable" data-frames="frames/{number}/">{controls}{image}</div>'


def _control(control: Control) -> str:
    """Return a slider or a list; at a reload no browser may set it apart from the picture."""
    name = f"<span>{escape(control.name)}</span>"
    if control.slider:
        values = escape(json.dumps(control.values))
        slider = (
            f'<input type="range" min="0" max="{len(control.values) - 1}" value="{control.at}" '
            f'data-values="{values}" autocomplete="off">'
        )
        return f"<label>{name}{slider}<output>{escape(control.values[control.at])}</output></label>"
    options = "".join(
        f'<option value="{at}"{" selected" * (at == control.at)}>{escape(text)}</option>'
        for at, text in enumerate(control.values)
    )
    return f'<label>{name}<select autocomplete="off">{options}</select></label>'


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('style.css')}{_colours_of_code()}</style>"
        f"</head><body>{body}</body></html>\n"
    )


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _colours_of_code() -> str:
    rules: str = HtmlFormatter().get_style_defs(".highlight")
    return rules


def _name(chapter: Chapter) -> str:
    return f"{chapter.number}_{chapter.stem}"


def _link(chapter: Chapter, left: str, right: str = "") -> str:
    text = escape(f"{left}{chapter.number} {chapter.stem}{right}")
    return f'<a href="{_name(chapter)}.html">{text}</a>'
