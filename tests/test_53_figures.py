"""The figures of structured outputs show states, live branches, masks, retries and forced text."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from minigen_course.ch53_structured_output import figures
from minigen_course.ch53_structured_output.automaton import automaton_of, parse
from minigen_course.ch53_structured_output.lesson import Piece, Tries
from minigen_course.figures.style import AMBER, BLUE, FAINT


def texts(made: Figure) -> list[str]:
    return [each.get_text() for axes in made.axes for each in axes.texts]


def heights_of(line: Line2D) -> list[float]:
    found: list[float] = np.asarray(line.get_ydata()).tolist()
    return found


def test_bytes_are_spelled_as_ranges() -> None:
    assert figures.spelled(b"abcx") == "a-c x"
    assert figures.spelled(range(48, 58)) == "0-9"
    assert figures.spelled([0xC3]) == "c3"
    assert figures.spelled(b"aceg ") == "5 bytes"


def test_a_diagram_has_every_state_and_two_circles_at_ends() -> None:
    automaton = automaton_of(parse("ab*c|d"))
    made = figures.state_diagram(automaton, now=0)
    circles = [each for each in made.axes[0].patches if isinstance(each, Circle)]
    assert len(circles) == len(automaton.moves) + len(automaton.ends)
    assert {str(state) for state in range(len(automaton.moves))} <= set(texts(made))
    made.canvas.draw()


def test_live_branches_of_a_trie_are_blue() -> None:
    words = {1: b"ye", 2: b"yes", 3: b"no", 4: b"nah", 5: b"x"}
    made = figures.token_trie(words, automaton_of(parse("yes|no")), 0)
    (axes,) = made.axes
    boxes = [line for line in axes.lines if line.get_marker() == "s"]
    assert sorted(line.get_color() for line in boxes) == sorted([BLUE] * 3 + [FAINT] * 2)
    bold = {each.get_text() for each in axes.texts if each.get_fontweight() == "bold"}
    assert bold == {"ye", "yes", "no"}


def test_a_strip_shows_the_mask_and_what_it_leaves() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    made = figures.mask_strip(logits, np.array([False, True, True]), str, "so far", shown=3)
    (axes,) = made.axes
    heights = [bar.get_height() for bar in axes.containers[1]]
    assert heights == pytest.approx([0, 0.6, 0.4])
    assert texts(made) == ["no", "yes", "yes"]
    assert axes.get_title(loc="left") == "after  so␣far: 2 of 3 tokens allowed"


def test_the_best_allowed_token_is_shown_wherever_it_ranks() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, -2.0])
    mask = np.array([False, False, False, True])
    made = figures.mask_strip(logits, mask, str, "", shown=2)
    assert [each.get_text() for each in made.axes[0].get_xticklabels()] == ["0", "1", "3"]


def test_retries_are_drawn_beside_given_shares() -> None:
    made = figures.retry_curves(Tries([8, 4, 2], 50), shares=(0.5,))
    curve, measured = made.axes[0].lines
    assert heights_of(curve) == heights_of(measured) == [100, 50, 25]


def test_states_stand_beside_the_stack() -> None:
    automaton, stack = figures.states_by_depth([2, 4, 8]).axes[0].lines
    assert heights_of(automaton) == [2, 4, 8]
    assert heights_of(stack) == [1, 1, 2]


def test_forced_pieces_are_counted_and_coloured() -> None:
    made = figures.forced_strip([Piece(b"{", True, 2), Piece(b"a", False, 1)])
    (axes,) = made.axes
    assert axes.get_title(loc="left").startswith("2 of 3 tokens are forced")
    assert "2 tokens" in texts(made)
    assert to_hex(axes.patches[0].get_facecolor()) == AMBER


def test_costs_have_their_values() -> None:
    made = figures.costs({"a mask": 50e-6, "a step": 4e-3})
    assert texts(made) == ["50", "4,000"]
