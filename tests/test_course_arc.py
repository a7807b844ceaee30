"""The arc of a chapter: what every chapter's notebook has, and in which order.

A chapter with a card in its head keeps the ways of the course; one with a summary has the whole
arc.
"""

import ast
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minigen_course.figures.claims import NOT_TESTED
from minigen_course.grading.exercise import CHAPTERS, Exercise, exercises
from minigen_course.grading.stub import source_of
from tools.chapters import CARD_BEGIN, ROOT, read_chapters, with_card

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))
SHORTEST = 14  # characters of a statement that says something about a solution
MOST_SHOWN = 1 / 3  # of a solution's statements may stand above its exercise
HEADINGS = ("## Your turn", "## Claims", "## Summary")
PREDICTIONS, QUESTIONS, LINKS = 3, 3, 6
WITHOUT_FORMULA = {"51"}


@cache
def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def text_of(path: Path, kind: str) -> str:
    return "\n\n".join("".join(c["source"]) for c in cells(path) if c["cell_type"] == kind)


def at_the_ways() -> list[Path]:
    return [path for path in NOTEBOOKS if CARD_BEGIN in text_of(path, "markdown")]


def at_the_arc() -> list[Path]:
    return [path for path in NOTEBOOKS if "\n## Summary\n" in text_of(path, "markdown")]


by_way = pytest.mark.parametrize("path", at_the_ways(), ids=lambda path: path.stem)
by_arc = pytest.mark.parametrize("path", at_the_arc(), ids=lambda path: path.stem)


def calls(source: str, name: str) -> list[ast.Call]:
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    return [
        each
        for each in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name
    ]


def code_of(path: Path) -> str:
    return text_of(path, "code")


@by_way
def test_the_head_has_the_card_of_chapters_toml(path: Path) -> None:
    (chapter,) = (each for each in read_chapters() if path.stem.startswith(each.number))
    source = path.with_suffix(".py").read_text(encoding="utf-8")
    assert with_card(source, chapter) == source, "run python -m tools.chapters --write"
    assert calls(code_of(path), "chapter_map"), "the map of the engine stands at the head"
    reading, doing = chapter.minutes
    said = " ".join(text_of(path, "markdown").split())
    sheet = f"[exercises](../exercises/{path.stem}.ipynb)"
    assert f"about {reading} minutes to read and try, about {doing} for the {sheet}" in said


@by_way
def test_outcomes_of_claims_are_computed(path: Path) -> None:
    claims = calls(code_of(path), "Claim")
    assert claims
    for each in claims:
        given = {word.arg: word.value for word in each.keywords}
        outcome = given.get("outcome") or each.args[2]
        assert not isinstance(outcome, ast.Constant), ast.unparse(each)
        names = {node.id for node in ast.walk(outcome) if isinstance(node, ast.Name)}
        assert names & {"within", "holds", "NOT_TESTED"}, f"{ast.unparse(outcome)}: {NOT_TESTED}"


@by_way
def test_captions_are_visible_and_numbered_in_order(path: Path) -> None:
    printed = [
        "".join(output["data"].get("text/plain", ""))
        for cell in cells(path)
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    numbers = [found[1] for text in printed if (found := re.match(r"Figure (\d\d\.\d+)\.", text))]
    assert numbers == [f"{path.stem[:2]}.{place}" for place in range(1, len(numbers) + 1)]
    pictures = sum(
        "image/png" in output.get("data", {})
        for cell in cells(path)
        for output in cell.get("outputs", ())
    )
    assert len(numbers) == pictures - 1, "all but the map have a number"


@by_way
def test_no_cell_above_an_exercise_holds_its_solution(path: Path) -> None:
    chapter = path.stem[:2]
    for exercise in exercises(chapter).values() if chapter in CHAPTERS else ():
        place = place_of(exercise, path)
        if place is None:
            continue  # it stands in the workspace only
        share, shown = shown_above(exercise, cells(path)[:place])
        assert share <= MOST_SHOWN, f"{exercise.name}: {share:.0%} stands above it: {shown}"


def place_of(exercise: Exercise, path: Path) -> int | None:
    """Return the number of the cell with the exercise's stub."""
    for place, cell in enumerate(cells(path)):
        if "".join(cell["source"]).startswith(f"# exercise: {exercise.dotted}\n"):
            return place
    return None


def shown_above(exercise: Exercise, above: list[dict[str, Any]]) -> tuple[float, list[str]]:
    """Return the share of the solution's statements in cells and outputs, and these statements."""
    solution = statements(source_of(exercise.dotted))
    stubs = [cell for cell in above if not "".join(cell["source"]).startswith("# exercise:")]
    texts = [text for cell in stubs if cell["cell_type"] == "code" for text in texts_of(cell)]
    seen = set().union(*map(statements, texts)) if texts else set()
    shown = sorted(solution & seen)
    return len(shown) / max(1, len(solution)), shown


def texts_of(cell: dict[str, Any]) -> list[str]:
    outputs = [
        "".join(output["data"].get("text/plain", ""))
        for output in cell["outputs"]
        if "data" in output
    ]
    return ["".join(cell["source"]), *outputs]


def statements(source: str) -> set[str]:
    """Return the statements of a source as normalised text, without docstrings and short ones."""
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return set()  # an output that is no source
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert)
    found = {
        ast.unparse(each)
        for each in ast.walk(tree)
        if isinstance(each, simple)
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    }
    tests = {
        ast.unparse(each.test if isinstance(each, ast.If | ast.While) else each.iter)
        for each in ast.walk(tree)
        if isinstance(each, ast.If | ast.While | ast.For)
    }
    return {each for each in found | tests if len(each) >= SHORTEST}


@by_arc
def test_a_chapter_has_its_parts_in_order(path: Path) -> None:
    prose = text_of(path, "markdown")
    head = prose.split("\n## ")[0]
    for wanted in ("**Afterwards you can**", "**You need**", "**Time:**"):
        assert wanted in head, wanted
    places = [prose.index(f"\n{heading}") for heading in HEADINGS]
    places += [
        prose.index("**Check yourself**"),
        prose.index("\n## What the production engines do"),
    ]
    places.append(prose.index("\n## Further reading"))
    assert places == sorted(places)
    assert prose.count("<details>") >= QUESTIONS
    assert len(set(re.findall(r"\]\((https?://[^)]+)\)", prose))) >= LINKS
    assert "$" in prose or path.stem[:2] in WITHOUT_FORMULA


@by_arc
def test_predictions_are_open_and_compared(path: Path) -> None:
    source = code_of(path)
    predictions = calls(source, "predict")
    assert len(predictions) >= PREDICTIONS
    assert all(ast.unparse(each.args[1]) == "None" for each in predictions)
    assert source.count(".compare(") >= len(predictions)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_to_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(\.\./([\w./-]+)(?:#([\w-]+))?\)", text_of(path, "markdown"))
    for name, anchor in links:
        assert (ROOT / name).exists(), name
        if name.endswith("glossary.md") and anchor:
            assert f'<a id="{anchor}">' in (ROOT / name).read_text(encoding="utf-8"), anchor


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_markdown_goes_on_after_a_folded_answer(path: Path) -> None:
    lines = text_of(path, "markdown").splitlines()
    joined = [
        f"{line} {after}"
        for line, after in itertools.pairwise(lines)
        if line.rstrip().endswith("</details>") and after.strip()
    ]
    assert not joined, "HTML lasts until an empty line"


def test_a_printed_solution_is_noticed() -> None:
    (exercise,) = (each for each in exercises("14").values() if each.name == "causal_mask")
    shown = {"cell_type": "code", "source": [source_of(exercise.dotted)], "outputs": []}
    printed = {
        "cell_type": "code",
        "source": ["show(x)"],
        "outputs": [{"data": {"text/plain": ["# a.b\n", source_of(exercise.dotted)]}}],
    }
    other = {"cell_type": "code", "source": ["a = 1"], "outputs": []}
    assert shown_above(exercise, [shown])[0] == 1
    assert shown_above(exercise, [printed])[0] == 1
    assert shown_above(exercise, [other])[0] == 0


def test_the_knobs_of_the_cards_are_flags() -> None:
    documented = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    documented += (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    flags = [
        flag for each in read_chapters() for flag in re.findall(r"--[a-z-]+", each.card["knob"])
    ]
    assert flags
    assert not [flag for flag in flags if f"`{flag}" not in documented]
