"""Figures of chapter 12: boxes of tokens, training and merges step by step, vocabularies."""

from collections.abc import Sequence

import pytest
from matplotlib.figure import Figure

from minigen_course.ch12_tokenizer import figures
from minigen_course.ch12_tokenizer.reference import train
from minigen_course.figures.explore import png
from minigen_course.lab.texts import ALICE, HARD_UNICODE

RANKS = {(b"h", b"e"): 0, (b"t", b"he"): 1, (b" ", b"the"): 2, (b"a", b"a"): 3}


def written(figure: Figure) -> list[str]:
    return [each.get_text() for each in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        (b" hard", "␣hard"),
        (b"\n\t", "⏎⇥"),
        ("é".encode(), "é"),
        (b"$", r"\$"),
        (b"\xe4\xbd", "E4 BD"),
        ("你".encode(), "U+4F60"),
        ("\u200d".encode(), "U+200D"),
        (b"\x00", "U+0000"),
        (b"", ""),
    ],
)
def test_a_label_is_what_the_font_can_draw(piece: bytes, label: str) -> None:
    assert figures.label(piece) == label


def test_boxes_show_labels_ids_and_bytes_in_order() -> None:
    figure = figures.strip([b"Why", b" is"], [4898, 314], "two", show_bytes=True)
    assert written(figure) == ["Why", "4898", "57 68 79", "␣is", "314", "20 69 73"]
    assert figure.axes[0].get_title(loc="left") == "two"
    figure = figures.strip([b"\xe4\xbd"], [18645], show_bytes=True)
    assert written(figure) == ["E4 BD", "18645", ""]


def test_special_tokens_are_dark_and_long_texts_are_wrapped() -> None:
    figure = figures.strip([b"<|end|>", *[b"word"] * 40], [2, *[7] * 40], special={2})
    faces = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert len(set(faces[:1]) & set(faces[1:])) == 0
    rows = {round(patch.get_y(), 2) for patch in figure.axes[0].patches}
    assert len(rows) > 1
    png(figure)


@pytest.mark.parametrize("count", [0, 500])
def test_what_cannot_be_shown_is_an_error_of_one_sentence(count: int) -> None:
    with pytest.raises(ValueError, match=r"token"):
        figures.strip([b"a"] * count)


def test_stages_merge_the_lowest_rank_first_and_within_words_only() -> None:
    stages = figures.merge_stages([b"the", b" the", b"a", b"a"], RANKS)
    assert [stage.joined for stage in stages] == [None, b"he", b"the", b" the"]
    assert stages[0].pieces == tuple(bytes([byte]) for byte in b"the theaa")
    assert stages[-1].pieces == (b"the", b" the", b"a", b"a")
    assert figures.merge_stages([b"aaa"], RANKS)[-1].pieces == (b"aa", b"a")


@pytest.mark.parametrize("step", [0, 2, 99])
def test_merging_is_drawn_up_to_the_step(step: int) -> None:
    stages = figures.merge_stages([b"the", b" the"], RANKS)
    figure = figures.merging(stages, step)
    last = min(step, len(stages) - 1)
    boxes = sum(len(stage.pieces) for stage in stages[: last + 1])
    assert len(figure.axes[0].patches) == boxes
    assert f"after {last} of 3 merges" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("words", [[], [b"x"] * 200])
def test_merging_takes_only_one_short_line(words: Sequence[bytes]) -> None:
    with pytest.raises(ValueError, match="one short line"):
        figures.merging(figures.merge_stages(words, RANKS), 0)


def test_a_box_of_a_merge_has_the_colour_of_its_final_token() -> None:
    stages = figures.merge_stages([b"then", b" the"], RANKS)
    assert stages[-1].pieces == (b"the", b"n", b" the")
    faces = [patch.get_facecolor() for patch in figures.merging(stages, 0).axes[0].patches]
    assert len(faces) == len(b"then the")
    assert len(set(faces[:3])) == len(set(faces[4:])) == 1
    assert len({faces[0], faces[3], faces[4]}) == 3


COUNTS = {b"the": 4, b"then": 2, b"ten": 3, b"hen": 2}


def test_rounds_of_training_have_the_counts_before_each_merge() -> None:
    rounds = figures.training_rounds(COUNTS, train(COUNTS, 3))
    assert [each.chosen for each in rounds] == [(b"h", b"e"), (b"t", b"he"), (b"t", b"e"), None]
    assert all(each.counts[0][0] == each.chosen for each in rounds[:-1])
    assert [each.counts[0][1] for each in rounds] == [8, 6, 3, 3]
    assert rounds[-1].words[1] == ((b"the", b"n"), 2)


def test_training_is_drawn_with_its_tie() -> None:
    figure = figures.training(figures.training_rounds(COUNTS, train(COUNTS, 3)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == ["single bytes", "after merge 1", "after merge 2", "after merge 3"]
    assert titles[4:] == [
        "merge 1: h + e",
        "merge 2: t + he",
        "merge 3: t + e (a tie)",
        "counts now",
    ]
    png(figure)


def test_the_way_of_a_text_is_aligned_by_its_bytes() -> None:
    rows = [figures.Row("text", (("né!", 4),)), figures.Row("tokens", (("né", 3), ("!", 1)))]
    axes = figures.way(rows).axes[0]
    whole, left, right = axes.patches
    assert left.get_width() < whole.get_width()
    assert right.get_x() > left.get_x() + left.get_width()
    assert [each.get_text() for each in axes.texts] == ["text", "né!", "tokens", "né", "!"]
    assert len({each.get_facecolor() for each in (whole, left, right)}) == 3


def test_vocabularies_and_languages_are_the_data() -> None:
    curves = {"page": {256: 1000.0, 512: 500.0}, "other": {256: 1000.0, 512: 800.0}}
    left, right = figures.vocabulary(curves, 4, 10_000).axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[1000, 500], [1000, 800]]
    assert right.get_lines()[-1].get_ydata() == [512 * 4 / 1e6]
    left, right = figures.languages({"one": 10, "two": 25}, {"one": 40, "two": 20}).axes
    assert [[bar.get_width() for bar in each.patches] for each in (left, right)] == [
        [40, 20],
        [10, 25],
    ]
    assert right.texts[1].get_text() == "25, 2.5 times"
    assert right.get_title(loc="left") == "... takes from 10 to 25 tokens"


def test_every_text_of_the_course_can_be_drawn() -> None:
    for text in (*HARD_UNICODE, ALICE[:200]):
        png(figures.strip([letter.encode() for letter in text]))
