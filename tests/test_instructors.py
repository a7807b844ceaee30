"""The guide for instructors: its figures are the exercises', its commands run, its plans add up."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.hunt import HUNTS, hunts_of
from tools import slides
from tools.chapters import ROOT, read_chapters, read_parts
from tools.instructors import mistakes, tables
from tools.instructors.__main__ import GUIDE, MISTAKES, SYLLABUS, agrees, syllabus

QUICK = ("00", "21", "24")  # chapters whose wrong answers run in a second
ADDED = "blocks_needed"
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="grading needs fork")


def text_of(name: str) -> str:
    return (GUIDE / name).read_text(encoding="utf-8")


def between(text: str, name: str) -> str:
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shell(script: str, folder: Path) -> str:
    """Run a script with this project's commands; return what it prints."""
    own = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": own, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The first page


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the commands of "Ten minutes" ran, and what they printed."""
    folder = tmp_path_factory.mktemp("ten_minutes")
    return folder, shell("\n".join(blocks(between(text_of("README.md"), "run"), "bash")), folder)


def test_a_page_without_a_chapters_markers_is_refused_with_a_sentence() -> None:
    chapter = next(iter(read_chapters()))
    begin, end = mistakes.markers(chapter)
    with pytest.raises(SystemExit, match=f"no {begin} and no {end}; add the markers"):
        mistakes.with_section("A page.", chapter, "text")


@needs_fork
def test_the_first_commands_print_what_the_page_shows(first_run: tuple[Path, str]) -> None:
    folder, printed = first_run
    marks, feedback = blocks(between(text_of("README.md"), "run"), "text")
    assert printed.splitlines() == marks.splitlines()
    page = (folder / "submissions-grades" / "feedback" / "bob.html").read_text(encoding="utf-8")
    assert feedback.strip() in page
    assert "Hint 1" in page


@pytest.mark.long
@needs_fork
def test_nbgraders_commands_print_what_the_page_shows(first_run: tuple[Path, str]) -> None:
    part = between(text_of("README.md"), "nbgrader")
    (script,), (shown,) = blocks(part, "bash"), blocks(part, "text")
    printed = shell(script, first_run[0])
    assert set(shown.splitlines()) <= set(printed.splitlines())


# The syllabus


def test_the_tables_of_the_syllabus_are_the_exercises_own() -> None:
    text = SYLLABUS.read_text(encoding="utf-8")
    assert syllabus(text) == text, "run python -m tools.instructors --write"


def test_every_chapter_has_a_week_and_every_bug_hunt_a_later_one() -> None:
    weeks = tables.weeks()
    listed = [number for week in weeks for number in week.chapters]
    assert listed == [each.number for each in read_chapters()]
    hunts = {number: place for place, week in enumerate(weeks) for number in week.hunts}
    of_chapter = {number: place for place, week in enumerate(weeks) for number in week.chapters}
    assert set(hunts) == set(HUNTS)
    assert all(hunts[number] > of_chapter[number] for number in hunts)


def test_the_minutes_of_every_plan_add_up() -> None:
    for session in tables.sessions():
        assert sum(each.minutes for each in session.rows) == session.minutes, session.name
        with pytest.raises(ValueError, match=f"{session.name} add up to {session.minutes} minutes"):
            tables.timed(replace(session, minutes=session.minutes + 5))


# Common mistakes


def test_every_exercise_has_its_mistakes() -> None:
    page = MISTAKES.read_text(encoding="utf-8")
    for chapter in CHAPTERS:
        part = between(page, f"mistakes {chapter}")
        names = re.findall(r"^### (.+)$", part, re.MULTILINE)
        wanted = [f"`{name}`" for name in exercises(chapter)]
        wanted += [f"Bug hunt: `{each.name}`" for each in hunts_of(chapter)]
        assert names == wanted, f"run python -m tools.instructors --mistakes {chapter}"
        for each in part.split("\n### ")[1:]:
            assert 3 <= each.count("\n- **") <= mistakes.MOST, each.splitlines()[0]
    said = re.findall(r"^- \*\*.+?\*\*: (.*)$", page, re.MULTILINE)
    assert all(each.startswith("check ") for each in said)


@pytest.mark.parametrize("number", QUICK)
def test_the_checks_say_what_the_page_says(number: str) -> None:
    (chapter,) = (each for each in read_chapters() if each.number == number)
    shown = between(MISTAKES.read_text(encoding="utf-8"), f"mistakes {number}")
    why = f"run python -m tools.instructors --mistakes {number}"
    assert agrees(shown.strip(), mistakes.section(chapter)), why


def test_mistakes_are_chosen_from_different_checks() -> None:
    made = [
        mistakes.Mistake(f"{check}{name}", f"check {check} of 3 x")
        for check in (1, 2)
        for name in "abcd"
    ]
    assert [each.what for each in mistakes.chosen(made)] == ["1a", "1b", "2a", "2b"]
    raised = mistakes.Mistake("r", "check 3 of 3 (x) raised ValueError: y")
    assert raised in mistakes.chosen([*made[:3], raised])
    assert raised not in mistakes.chosen(
        [*made, replace(raised, said=f"check 1 of 3{raised.said}")]
    )


# Adding an exercise


def test_an_exercise_is_added_as_the_page_says(tmp_path: Path) -> None:
    page = text_of("adding.md")
    files = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(files) == 4
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for name, text in files:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(text)
    for name, before, after in (
        ("notebooks/chapters.toml", "minutes = [45, 50]", "minutes = [45, 55]"),
        ("notebooks/21_blocks.py", "try, about 50 for", "try, about 55 for"),
    ):
        path = tmp_path / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name}: adding.md names the minutes of chapter 21"
        path.write_text(text.replace(before, after), encoding="utf-8")
    (script,) = blocks(page, "bash")
    printed = shell(f"export PYTHONPATH={tmp_path} PYTHONDONTWRITEBYTECODE=1\n{script}", tmp_path)
    found = re.search(r"(\d+) passed", printed)
    assert found is not None, printed
    assert int(found[1]) > 60
    assert "failed" not in printed
    assert (tmp_path / "exercises" / "21_blocks" / f"{ADDED}.py").exists()
    for name in ("syllabus.md", "mistakes.md"):
        written = (tmp_path / "docs" / "instructors" / name).read_text(encoding="utf-8")
        assert f"`{ADDED}`" in written, name


# Slides


def test_a_part_is_one_pdf_with_a_page_per_slide(tmp_path: Path) -> None:
    part = "4"
    path = slides.write(part, tmp_path)
    assert path.name == "4_many_devices.pdf"
    assert len(re.findall(rb"/Type /Page\b", path.read_bytes())) == len(slides.slides(part))


def test_no_text_of_a_slide_leaves_its_page_or_covers_a_picture() -> None:
    for slide in slides.slides("4"):
        page = slides.page(slide)
        page.canvas.draw()
        box = page.bbox
        texts = [each.get_window_extent() for each in page.texts]
        for each in texts:
            assert box.x0 <= each.x0 < each.x1 <= box.x1, slide.title
            assert box.y0 <= each.y0 < each.y1 <= box.y1, slide.title
        pictures = [each.get_window_extent() for each in page.axes]
        assert not [each for each in texts for other in pictures if each.overlaps(other)], slide


@pytest.mark.parametrize("part", read_parts())
def test_slides_have_every_chapters_problem_figures_claims_and_exercises(part: str) -> None:
    found = slides.slides(part)
    lines = [line for each in found for line in each.lines]
    for chapter in (each for each in read_chapters() if each.number[0] == part):
        head = f"{chapter.number}  {chapter.title}"
        own = [each for each in found if each.title.startswith(head)]
        assert own[0].lines[0].endswith("?")
        assert own[0].picture, "the map of the engine"
        captions = [each.caption for each in own if each.caption]
        assert [each.split(". ")[0] for each in captions] == [
            f"Figure {chapter.number}.{place}" for place in range(1, len(captions) + 1)
        ]
        for what in ("claims, and what was found", "exercises", "summary"):
            assert any(each.title == f"{head}: {what}" for each in own), what
        for name, each in exercises(chapter.number).items():
            task = f"- {name}: {each.level}, {each.points} points, {each.minutes} min"
            assert task in lines
    assert not [line for line in lines if re.search(r"\\[a-z]{3,}|\*\*|`|\]\(", line)]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="There is no part '9'; there are 0, 1, 2"):
        slides.slides("9")


# The notebook


def test_the_notebook_is_its_source_and_was_run() -> None:
    notebook = nbformat.read(GUIDE / "grading.ipynb", as_version=4)
    source = jupytext.read(GUIDE / "grading.py")
    cells = [(each.cell_type, each.source) for each in notebook.cells]
    assert cells == [(each.cell_type, each.source) for each in source.cells]
    code = [each for each in notebook.cells if each.cell_type == "code"]
    assert [each.execution_count for each in code] == list(range(1, len(code) + 1))
    assert not [each for cell in code for each in cell.outputs if each.output_type == "error"]


@pytest.mark.long
@needs_fork
def test_the_notebook_runs() -> None:
    notebook = jupytext.read(GUIDE / "grading.py")
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    stored = nbformat.read(GUIDE / "grading.ipynb", as_version=4)

    def printed(cells: list[nbformat.NotebookNode]) -> list[str]:
        outputs = [each for cell in cells for each in cell.get("outputs", ())]
        return [each["text"] for each in outputs if each["output_type"] == "stream"]

    system = re.compile(r"own processes, no network|this system allows no namespaces.*")
    now, before = (system.sub("", "".join(printed(each.cells))) for each in (notebook, stored))
    assert now == before
