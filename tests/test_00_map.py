"""The map lists all chapters of chapters.toml; the opening test keeps and compares guesses."""

import json
import re
from pathlib import Path

import pytest

from minigen_course.ch00_map import opening_test
from minigen_course.ch00_map.opening_test import FILE, LETTERS, QUESTIONS
from tools.chapters import BEGIN, END, ROOT, map_table, read_chapters, read_parts, with_map

NOTEBOOK = ROOT / "notebooks" / "00_map.ipynb"


@pytest.fixture(scope="module")
def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_the_map_has_the_table_of_all_chapters(prose: str) -> None:
    source = NOTEBOOK.with_suffix(".py").read_text(encoding="utf-8")
    assert with_map(source) == source, "run python -m tools.chapters --write"
    shown = prose.split(BEGIN)[1].split(END)[0].strip()
    assert shown == map_table(), "run python -m tools.notebooks 00"


def test_the_table_has_every_chapter_part_and_time() -> None:
    rows = map_table().splitlines()[2:]
    assert len(rows) == len(read_chapters()) + 1
    for chapter, row in zip(read_chapters(), rows[:-1], strict=True):
        assert f"({chapter.number}_{chapter.stem}.ipynb)" in row
        assert chapter.title in row
        reading, doing = chapter.minutes
        assert f"| {reading} min | [{doing} min](../{chapter.sheet}) |" in row
    assert all(f"| {digit} {name} |" in map_table() for digit, name in read_parts().items())


def test_the_stack_names_the_chapters_of_each_layer(prose: str) -> None:
    rows = re.findall(r"(?m)^\| (L\d) [^|]*\|[^|]*\|[^|]*\| ([\d, ]*)\|$", prose)
    shown = {layer: re.findall(r"\d\d", numbers) for layer, numbers in rows}
    assert sorted(shown) == [f"L{number}" for number in range(7)]
    for layer, numbers in shown.items():
        owned = [each.number for each in read_chapters()[1:] if each.card["layer"][:2] == layer]
        assert numbers == owned, layer


def test_the_opening_test_has_seven_questions_with_one_best_answer() -> None:
    assert len(QUESTIONS) == 7
    known = {chapter.number for chapter in read_chapters()}
    for question in QUESTIONS.values():
        assert question.text.endswith("?") or "." in question.text
        assert question.right in LETTERS
        assert len(set(question.answers)) == 4
        assert set(re.findall(r"\d\d", question.chapters)) <= known
    assert len({question.right for question in QUESTIONS.values()}) == 4, "no letter is a pattern"


def test_the_questions_are_asked_without_their_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(opening_test, "display", lambda data, raw: shown.append(data))
    opening_test.ask()
    text = shown[0]["text/markdown"]
    for number, (name, question) in enumerate(QUESTIONS.items(), 1):
        assert f"**{number}. `{name}`** {question.text}" in text
        assert question.because not in text


def test_guesses_are_kept_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(opening_test, "display", lambda data, raw: shown.append(data))
    opening_test.keep(tmp_path, first_token=None, four_bits=None)
    assert capsys.readouterr().out.startswith("No guesses yet")
    assert not (tmp_path / FILE).exists()
    opening_test.keep(tmp_path, first_token="b", good_mean="a", four_bits=None)
    assert capsys.readouterr().out == (
        f"2 guesses are kept in {FILE}, in this notebook's folder. 5 to go.\n"
    )
    opening_test.compare(tmp_path, first_token="b", good_mean="c")
    text = shown[0]["text/plain"]
    assert "Right in chapter 00: 1 of 7; right now: 2 of 7." in text
    (mean,) = (line for line in text.splitlines() if line.startswith("The mean response"))
    assert " | a ✗ | c ✓ | c: A few requests" in mean
    assert text.count("(answer first)") == 5, "no solution before an answer"
    assert QUESTIONS["four_bits"].because not in text
    assert "<table>" in shown[0]["text/html"]


def test_the_closing_test_works_without_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(opening_test, "display", lambda data, raw: shown.append(data))
    opening_test.compare(tmp_path)
    text = shown[0]["text/plain"]
    assert "Right in chapter 00: none answered; right now: none answered." in text


def test_a_wrong_name_or_letter_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no question weather; there are first_token"):
        opening_test.keep(tmp_path, weather="a")
    with pytest.raises(ValueError, match="first_token has the answers a, b, c and d, not 'e'"):
        opening_test.keep(tmp_path, first_token="e")
