"""A student's feedback as one HTML page: what failed, why, hints, and the part in an engine."""

import base64
import re
from collections.abc import Iterator
from html import escape

from minigen_course.grading.exercise import exercises
from minigen_course.grading.hunt import hunts_of
from minigen_course.grading.question import written
from minigen_course.handout.course_files import REPOSITORY, headings
from minigen_course.kit.engine_run import picture
from minigen_course.kit.grade import NOT_YET, Grade, Graded

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; color: #1b1b1b; background: #fff }
h2 { margin-top: 2rem; border-bottom: 1px solid #ccc }
.full { color: #00664d }
.part { color: #8a4b00 }
code { overflow-wrap: anywhere }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .8rem }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 14px }
img { max-width: 100%; height: auto }
figure { margin: 1rem 0 }
li, details { margin: .3rem 0 }"""
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
{body}
</html>
"""


def page(title: str, parts: list[str]) -> str:
    """Return an HTML page of a title, which is escaped here, and parts, which are not."""
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(parts))


def feedback(graded: Graded) -> str:
    """Return a student's feedback as one HTML page."""
    title = f"{graded.student}: {graded.earned:g} of {graded.points} points"
    parts = [f"<h1>{escape(title)}</h1>"]
    if graded.pending:
        more = sum(each.points for each in graded.pending)
        parts.append(f"<p>{more} more points are not graded yet.</p>")
    parts += [f"<p>{escape(each)}</p>" for each in graded.problems]
    for each in graded.grades:
        parts += _on_words(each) if each.is_written else _on_checks(each)
    return page(title, parts)


def _head(grade: Grade) -> Iterator[str]:
    heading = headings()[grade.chapter]
    kind = "full" if grade.earned == grade.points else "part"
    marks = f"{grade.earned:g} of {grade.points}" if grade.is_graded else NOT_YET
    link = f"{REPOSITORY}/blob/main/notebooks/{heading.name}.ipynb"
    yield f'<h2 class="{kind}">{escape(grade.name)}: {marks}</h2>'
    yield f'<p>Chapter {grade.chapter}: <a href="{link}">{escape(heading.title)}</a>.'


def _on_words(grade: Grade) -> list[str]:
    """Return what a person said of an answer in words; the rubric only with the marks."""
    said = [*_head(grade), "</p>"]
    if grade.source:
        said.append(f'<div class="text">{escape(grade.source)}</div>')
    else:
        said.append("<p>No answer was found: its cell is empty or missing.</p>")
    if grade.comment:
        said.append(f"<p><strong>Comment:</strong> {escape(grade.comment)}</p>")
    if grade.source and grade.is_graded:
        said.append(f"<p>Points are for:</p>{rubric(grade)}")
    return said


def rubric(grade: Grade) -> str:
    """Return the rubric of an answer in words, as a list."""
    known = written(grade.chapter)[grade.name].rubric
    rows = (f"<li>{points} points: {escape(what)}</li>" for what, points in known.items())
    return f"<ul>{''.join(rows)}</ul>"


def _on_checks(grade: Grade) -> list[str]:
    said = [*_head(grade), f"{grade.num_passed} of {grade.num_checks} checks passed.</p>"]
    if grade.why:
        said.append(f"<p>Your answer {_marked(_sentence(grade.why))}</p>")
    if grade.failed:
        items = "".join(f"<li>{_marked(each)}</li>" for each in grade.failed)
        said.append(f"<ul>{items}</ul>")
    said += _in_the_engine(grade)
    if grade.earned < grade.points:
        said += [
            f"<details><summary>Hint {number}</summary>{_marked(text)}</details>"
            for number, text in enumerate(_hints(grade), 1)
        ]
    if grade.source:
        code = f"<pre>{escape(grade.source)}</pre>"
        said.append(f"<details><summary>What was graded</summary>{code}</details>")
    return said


def _in_the_engine(grade: Grade) -> Iterator[str]:
    """Yield a picture of what a small engine did with the part, or why there is none."""
    if grade.no_run:
        yield f"<p>In a small engine your part {_marked(_sentence(grade.no_run))}</p>"
    if not grade.run:
        return
    shown = picture(grade.chapter, grade.name, grade.run)
    about = f"Four requests in a small engine with a random model. {shown.said}"
    if grade.failed and shown.is_same:
        about += " These requests do not show what the checks found."
    if shown.png:
        data = base64.b64encode(shown.png).decode("ascii")
        yield (
            f'<figure><img alt="What each request did in each step" '
            f'src="data:image/png;base64,{data}"><figcaption>{escape(about)}</figcaption></figure>'
        )


def _marked(text: str) -> str:
    """Return a text as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _sentence(why: str) -> str:
    if why == "no answer":
        return "was not found: no cell or file has this exercise."
    return why if why.endswith((".", "?")) else f"{why}."


def _hints(grade: Grade) -> tuple[str, ...]:
    known = exercises(grade.chapter)
    if grade.name in known:
        return known[grade.name].hints
    hunts = {each.name: each for each in hunts_of(grade.chapter)}
    return hunts[grade.name].hints if grade.name in hunts else ()
