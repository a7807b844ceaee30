"""What a grading gives back: answers in words, import files, assignments, a picture per part."""

import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from minigen.errors import OptionError
from minigen_course.grading.exercise import CHAPTERS, exercises
from minigen_course.grading.question import written
from minigen_course.handout.workspace import exercise_files
from minigen_course.kit import engine_run
from minigen_course.kit.assignment import Assignment, assignments_of
from minigen_course.kit.box import Limits
from minigen_course.kit.cli import course
from minigen_course.kit.collect import Submission, collect
from minigen_course.kit.for_nbgrader import source_notebook
from minigen_course.kit.grade import Grade, Graded, grade_one
from minigen_course.kit.report.feedback import feedback
from minigen_course.kit.report.folder import left_out, write_all
from minigen_course.kit.report.marks import canvas, moodle
from minigen_course.kit.report.summary import summary
from minigen_course.kit.report.words import (
    PAGE,
    WORDS,
    Table,
    answers_of,
    read_table,
    write,
    write_table,
)
from minigen_course.kit.tasks import Assigned, assigned_in, handed_in, named
from tests.known_answers import graders

SEED = 7
QUICK = ("22", "23", "51")  # chapters with assignments that are graded in a few seconds
EMPTY = "raise NotImplementedError  # your turn"
RIGHT = "return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
PAGED, HUNT = assigned_in(["22"])
HOSTILE = "Gaps <script>alert(1)</script> & paging.\n\nA block table is read."


def assignment() -> Assignment:
    return next(assignments_of("22", SEED))


@pytest.fixture(scope="module")
def released() -> dict[str, Any]:
    """The notebook of chapter 22 as learners get it from nbgrader."""
    notebook = source_notebook(assignment())
    for cell in notebook["cells"]:
        for region in ("SOLUTION", "HIDDEN TESTS"):
            before, begin, rest = cell["source"].partition(f"### BEGIN {region}")
            cell["source"] = before + rest.partition(f"### END {region}")[2] if begin else before
    return notebook


def filled(released: Mapping[str, Any], answers: Mapping[str, str]) -> dict[str, Any]:
    """Return the notebook with the sources of these cells replaced, by their grade ids."""
    notebook: dict[str, Any] = json.loads(json.dumps(released))
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name in answers:
            head = "".join(cell["source"]).splitlines()[0] if cell["cell_type"] == "code" else ""
            cell["source"] = f"{head}\n{answers[name]}"
    return notebook


def save(path: Path, notebook: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_answers_in_words_are_graded_by_a_person(released: dict[str, Any], tmp_path: Path) -> None:
    """Collected, read by a person, counted; what was typed stays, new students are added."""
    built = tmp_path / "course"
    built.mkdir()
    (built / "course.toml").write_text(
        f'chapters = ["22"]\nseed = {SEED}\nformat = "nbgrader"\n', encoding="utf-8"
    )
    handed, target = tmp_path / "class", tmp_path / "class-grades"
    code = f"def slots_of(block_ids, positions, block_size):\n    {RIGHT}"
    answers = {"c22_slots_of": code, "c22_why_blocks": HOSTILE}
    save(handed / "lovelaceada_11_21_22_paged.ipynb", filled(released, answers))
    save(handed / "=bob_12_22_22_paged-1.ipynb", filled(released, {"c22_why_blocks": "Gaps."}))
    save(handed / "hoppergrace_13_23_22_paged.ipynb", released)

    def grade() -> Any:
        words = ["grade", str(handed), "--course", str(built), "--seconds", "5", "--jobs", "1"]
        return CliRunner().invoke(course, words)

    found = grade()
    assert found.exit_code == 0, found.output
    assert "Assignments: 22_paged." in found.stderr
    assert "Skipped, because no submission has them: 22_paged_hunt." in found.stderr
    rows = rows_of(target / WORDS)
    assert rows[1:] == [
        ["'=bob", "22", "why_blocks", "10", "", ""],
        ["lovelaceada", "22", "why_blocks", "10", "", ""],
    ]
    read = (target / PAGE).read_text(encoding="utf-8")
    assert written("22")["why_blocks"].answer[:50] in read
    assert "3 points: internal fragmentation is named" in read
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; paging." in read
    assert "<script>" not in read
    marks = {row[0]: row for row in rows_of(target / "marks.csv")}
    column = marks["student"].index("22 why_blocks (10)")
    earned = {student: row[column] for student, row in marks.items() if student != "student"}
    assert earned == {
        "'=bob": "not graded yet",
        "lovelaceada": "not graded yet",
        "hoppergrace": "0",
    }
    assert "- 22 why_blocks: =bob, lovelaceada" in (target / "summary.md").read_text("utf-8")
    assert "Answers in words that are not graded yet: 2. Read " in found.stderr
    assert "canvas.csv has no column yet for 22_paged" in found.stderr
    assert not (target / "canvas.csv").exists()

    rows[1][4:], rows[2][4:] = ["4.5", "=1+1"], ["9", "<b>And the cost?</b>"]
    with (target / WORDS).open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows(rows)  # as a spreadsheet saves it
    save(handed / "zusekonrad_14_24_22_paged.ipynb", filled(released, answers))
    typed = (target / WORDS).read_text(encoding="utf-8-sig")
    assert grade().exit_code == 0
    now = (target / WORDS).read_text(encoding="utf-8-sig")
    assert now.splitlines() == [*typed.splitlines(), "zusekonrad;22;why_blocks;10;;"]
    shown = (target / "feedback" / "lovelaceada.html").read_text(encoding="utf-8")
    assert "why_blocks: 9 of 10" in shown
    assert "&lt;b&gt;And the cost?&lt;/b&gt;" in shown
    assert "3 points: internal fragmentation is named" in shown
    pending = (target / "feedback" / "zusekonrad.html").read_text(encoding="utf-8")
    assert "why_blocks: not graded yet" in pending
    assert "internal fragmentation is named" not in pending

    text = now.replace("zusekonrad;22;why_blocks;10;;", "zusekonrad;22;why_blocks;10;0,5;short")
    (target / WORDS).write_text(text, encoding="utf-8")
    assert grade().exit_code == 0
    assert (target / WORDS).read_text(encoding="utf-8") == text, "nothing new: left alone"
    table = {row[0]: row for row in rows_of(target / "canvas.csv")}
    assert list(table)[:2] == ["Student", "    Points Possible"]
    assert [row[1] for row in table.values()] == ["ID", "", "12", "13", "11", "14"]
    assert [row[5] for row in table.values()] == ["22_paged", "65", "4.5", "0", "14", "5.5"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("ada,22,why_blocks,10,eleven,", "row 2 (ada, why_blocks): the marks are 'eleven'; they"),
        ("ada,22,why_blocks,10,11,", "they should be a number from 0 to 10, or empty"),
        ("ada,22,why_blocks,10,-1,", "they should be a number from 0 to 10, or empty"),
        ("ada,22,why_blocks,10,nan,", "the marks are 'nan'"),
        ("ada,22,slots_of,5,3,", "chapter 22 has no question slots_of in words"),
        ("ada,99,x,5,3,", "chapter 99 has no question x in words"),
        (
            "ada,22,why_blocks,10,1,\nada,22,why_blocks,10,2,",
            "row 3 (ada, why_blocks): this answer",
        ),
    ],
)
def test_marks_that_cannot_be_counted_are_named(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / WORDS
    path.write_text(f"student,chapter,question,of,marks,comment\n{row}\n", encoding="utf-8")
    with pytest.raises(OptionError) as raised:
        read_table(path)
    assert words in str(raised.value)


def test_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / WORDS
    path.write_text("student,marks\n", encoding="utf-8")
    with pytest.raises(OptionError, match="lacks the column chapter"):
        read_table(path)
    path.write_bytes("student;Zoë".encode("cp1252"))
    with pytest.raises(OptionError, match="CSV UTF-8"):
        read_table(path)


def test_a_row_that_a_person_added_stays(tmp_path: Path) -> None:
    path = tmp_path / WORDS
    path.write_text(
        'mine,student,chapter,question,of,marks,comment\nx,gone,22,why_blocks,10,7,"a\nb"\n',
        encoding="utf-8",
    )
    write_table(path, read_table(path), {("ada", "22", "why_blocks"): "x"})
    assert rows_of(path)[1:] == [
        ["x", "gone", "22", "why_blocks", "10", "7", "a\nb"],
        ["", "ada", "22", "why_blocks", "10", "", ""],
    ]
    assert Table() == read_table(tmp_path / "none.csv")


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    """A process that forks the boxes: pytest's own has threads, and forks badly."""
    with graders(QUICK, jobs=1, seed=SEED) as pool:
        yield pool


@pytest.mark.parametrize(
    "name",
    [
        each.name if each.chapter in QUICK else pytest.param(each.name, marks=pytest.mark.long)
        for each in assigned_in(list(CHAPTERS))
    ],
)
def test_the_model_answers_of_an_assignment_have_full_marks(
    worker: ProcessPoolExecutor, name: str, tmp_path: Path
) -> None:
    """A notebook with solutions, as the instructor has it, is graded with a course's cases."""
    (assigned,) = (each for each in assigned_in(list(CHAPTERS)) if each.name == name)
    (model,) = (each for each in assignments_of(assigned.chapter, SEED) if each.name == name)
    path = save(tmp_path / f"{name}.ipynb", source_notebook(model))
    submission = Submission("ada", (path,))
    grades = worker.submit(grade_one, submission, [assigned], Limits(60.0), SEED).result()[name]
    lost = [each for each in grades if each.earned < each.points]
    assert lost == []
    parts = [each.name for each in model.items if each.kind != "written"]
    assert [each.name for each in grades] == parts


@pytest.mark.parametrize("metadata", [True, False])
def test_an_answer_in_words_is_found_with_and_without_metadata(
    released: dict[str, Any], tmp_path: Path, metadata: bool
) -> None:
    notebook = filled(released, {"c22_why_blocks": "It loses gaps."})
    for cell in notebook["cells"]:
        if not metadata:
            cell["metadata"] = {}
    asked = next(n for n, cell in enumerate(notebook["cells"]) if "## why_blocks" in cell["source"])
    after = {"cell_type": "markdown", "metadata": {}, "source": ["And ", "more."]}
    notebook["cells"].insert(asked + 2, after)
    path = save(tmp_path / "ada" / "22_paged.ipynb", notebook)
    found = answers_of([Submission("ada", (path,))], [PAGED])
    expected = "It loses gaps." if metadata else "It loses gaps.\n\nAnd more."
    assert found == {("ada", "22", "why_blocks"): expected}
    path = save(tmp_path / "bob" / "22_paged.ipynb", released)
    assert answers_of([Submission("bob", (path,))], [PAGED]) == {}


def test_half_a_character_stops_no_report(tmp_path: Path) -> None:
    """An answer's message, code and words may have it."""
    half = "\ud83d"
    cells = [{"cell_type": "markdown", "source": text} for text in ("## why_blocks", half)]
    path = save(tmp_path / "class" / "22_paged.ipynb", {"cells": cells})
    ada = Submission("ada", (path,))
    grade = Grade(
        "22", "slots_of", 5, 0.0, 1, 0, (half,), half, (half,), half, "", half, "22_paged"
    )
    (found,) = write(tmp_path, [Graded("ada", False, (half,), (grade,))], [ada], [PAGED], Table())
    write_all([found], tmp_path)
    for name in (PAGE, "marks.csv", "summary.md", "feedback/ada.html"):
        assert "\\ud83d" in (tmp_path / name).read_text(encoding="utf-8"), name


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_file_with_a_name_in_another_encoding_is_graded(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / os.fsdecode("Zoë.py".encode("latin-1"))).write_text("x = 1\n", encoding="utf-8")
    words = ["grade", str(folder), "--chapters", "22", "--assignment", "22_paged_hunt"]
    found = CliRunner().invoke(course, words)
    assert found.exit_code == 0, found.output
    (_, row) = rows_of(tmp_path / "class-grades" / "marks.csv")
    assert row[0] == "Zo\\xeb"


def graded(student: str = "ada", **ids: str) -> Graded:
    grades = (
        Grade("22", "slots_of", 5, 4.5, 4, 3, assignment="22_paged"),
        Grade("22", "slots", 10, 10.0, 6, 6, assignment="22_paged_hunt"),
    )
    return Graded(student, False, (), grades, **ids)


def test_canvas_reads_its_file() -> None:
    """The columns and rows that Canvas's own importer looks for, by its source."""
    rows = canvas([graded("=ada", canvas_id="1001")])
    assert rows[0] == [
        *("Student", "ID", "SIS User ID", "SIS Login ID", "Section"),
        *("22_paged", "22_paged_hunt"),
    ]
    assert "Points Possible" in rows[1][0]
    assert rows[1][5:] == ["5", "10"]
    assert rows[2] == ["'=ada", "1001", "", "", "", "4.5", "10"]
    assert canvas([]) == []


def test_moodle_reads_its_file() -> None:
    """The columns that Moodle's own importer looks for, and its name for a participant."""
    head, row = moodle([graded("Ada Lovelace", moodle_id="77")])
    assert {"Identifier", "Grade", "Last modified (grade)", "Feedback comments"} <= set(head)
    values = dict(zip(head, row, strict=True))
    assert values["Identifier"] == "Participant 77"
    assert (values["Grade"], values["Maximum Grade"]) == ("14.5", "15")
    assert values["Feedback comments"] == "slots_of: 4.5 of 5; slots: 10 of 10"
    assert moodle([]) == []


def test_what_is_not_graded_is_in_no_import_file() -> None:
    """Canvas would take an empty cell for a mark that was removed."""
    known = graded("ada", canvas_id="1", moodle_id="2")
    pending = Grade(
        *("22", "why_blocks", 10, 0.0, 0, 0),
        **{"assignment": "22_paged", "is_written": True, "is_graded": False},
    )
    waiting = Graded("ada", False, (), (*known.grades, pending), "1", "2")
    assert canvas([waiting])[0][5:] == ["22_paged_hunt"]
    assert moodle([waiting]) == []
    assert (waiting.earned, waiting.points, waiting.pending) == (14.5, 15, (pending,))
    canvas_said, moodle_said = left_out([waiting])
    assert "no column yet for 22_paged:" in canvas_said
    assert "no row yet for ada:" in moodle_said
    assert "- 22 why_blocks: ada" in summary([waiting])


def test_students_of_one_name_stay_apart(tmp_path: Path) -> None:
    for name in ("smithjo_1_5_slots_of.py", "smithjo_2_6_slots_of.py", "king_3_7_slots_of.py"):
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "Jo Smith_8_assignsubmission_file_").mkdir()
    (tmp_path / "Al Bo_9_assignsubmission_file_22_paged.py").write_text("x = 1\n", encoding="utf-8")
    found = {each.student: each for each in collect(tmp_path)}
    assert list(found) == ["Al Bo", "Jo Smith", "king", "smithjo (1)", "smithjo (2)"]
    assert [each.canvas_id for each in found.values()] == ["", "", "3", "1", "2"]
    assert [each.moodle_id for each in found.values()] == ["9", "8", "", "", ""]
    assert PAGED.is_in(found["Al Bo"])
    assert not PAGED.is_in(found["king"])


def test_an_assignment_that_no_student_has_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(exercise_files()["22_paged/slots_of.py"], encoding="utf-8")
    ada = Submission("ada", (path,))
    known = assigned_in(["21", "22"])
    names = [each.name for each in known]
    assert names == ["21_blocks", "22_paged", "22_paged_hunt"]
    assert handed_in(known, [ada]) == ([PAGED], [Assigned("21_blocks", "21"), HUNT])
    assert named(known, ["22_paged_hunt"]) == [HUNT]
    with pytest.raises(OptionError, match="There is no assignment 23_prefix; there are 21_blocks"):
        named(known, ["23_prefix"])
    with pytest.raises(OptionError, match=r"Name the one to grade, as in --assignment 21_blocks\."):
        handed_in(known, [Submission("bob", ())])


def test_a_named_assignment_is_graded_alone(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    (folder / "ada").mkdir(parents=True)
    text = exercise_files()["22_paged/slots_of.py"].replace(EMPTY, RIGHT)
    (folder / "ada" / "slots_of.py").write_text(text, encoding="utf-8")
    words = ["grade", str(folder), "--chapters", "22", "--assignment", "22_paged_hunt"]
    found = CliRunner().invoke(course, words)
    assert found.exit_code == 0, found.output
    (head, row) = rows_of(tmp_path / "class-grades" / "marks.csv")
    assert head == ["student", "late", "22 slots (10)", "total", "of", "to read"]
    assert row[2:5] == ["0", "0", "10"]


def known_answers(chapter: str, name: str) -> Any:
    return import_module(f"tests.answers.{CHAPTERS[chapter].split('.')[1]}").ANSWERS[name]


def runs_of(chapter: str, name: str) -> tuple[list[str], list[str]]:
    """Return what an engine does with each known right answer, and with each wrong one."""
    answers = known_answers(chapter, name)
    right = [exercises(chapter)[name].solution, *answers.right]
    return (
        [engine_run.watch(chapter, name, part) for part in right],
        [_run_or_error(chapter, name, part) for part in answers.wrong.values()],
    )


def _run_or_error(chapter: str, name: str, part: Any) -> str:
    try:
        return engine_run.watch(chapter, name, part)
    except Exception as error:
        return f"raised {type(error).__name__}"


def test_an_engine_shows_what_a_part_does(worker: ProcessPoolExecutor) -> None:
    """Right parts do what the package's do, however they are written; many mistakes show.

    It is run in another process, where no annotation refuses a learner's class.
    """
    known = list(engine_run.VISIBLE)
    found = list(worker.map(runs_of, *zip(*known, strict=True)))
    for (chapter, name), (right, wrong) in zip(known, found, strict=True):
        assert set(right) == {right[0]}, name
        assert engine_run.read_run(right[0]) is not None
        shown = sum(each != right[0] for each in wrong)
        assert shown > len(wrong) // 4, f"{chapter} {name}: {shown} of {len(wrong)} mistakes show"


def test_a_feedback_page_shows_a_part_in_an_engine() -> None:
    answers = known_answers("22", "slots_of")
    right = engine_run.package_run("22", "slots_of")
    wrong = engine_run.watch("22", "slots_of", answers.wrong["as if contiguous"])
    page = feedback(with_run(right))
    assert page.count('<img alt="What each request did in each step" src="data:image/png;') == 1
    assert "took the same steps, and the requests got the same tokens." in page
    assert "These requests do not show" not in page
    assert "requests got other tokens" in feedback(with_run(wrong))
    failed = feedback(with_run(right, failed=("check 1 of 4",)))
    assert "These requests do not show what the checks found." in failed
    page = feedback(with_run("", no_run="raised ValueError: <b>"))
    assert "In a small engine your part raised ValueError: &lt;b&gt;." in page
    assert "<img" not in page


def with_run(run: str, **others: Any) -> Graded:
    grade = Grade("22", "slots_of", 5, 5.0, 4, 4, run=run, assignment="22_paged", **others)
    return Graded("ada", False, (), (grade,))


def test_what_a_box_says_of_an_engine_is_not_trusted() -> None:
    """Whatever is said either is no run at all, or can be drawn."""
    right = engine_run.package_run("24", "PreemptingScheduler")
    assert engine_run.read_run(right) is not None
    for text in ("", "{}", "[]", "<svg>", "[" * 5000, '["a", "b", "c", "d"]', "[[], [], [], []]"):
        assert engine_run.read_run(text) is None
    random, numbers = Random(0), "0123456789"
    num_read = 0
    for _ in range(300):
        places = [place for place, each in enumerate(right) if each in numbers]
        changed = list(right)
        for place in random.sample(places, 3):
            changed[place] = random.choice([*numbers, "[]", "-1", "1e9", "null", "true", '"<b>"'])
        found = engine_run.read_run("".join(changed))
        if found is not None and num_read < 25:
            num_read += 1
            shown = engine_run.picture("24", "PreemptingScheduler", "".join(changed))
            assert shown.png.startswith(b"\x89PNG")
    assert num_read > 0
