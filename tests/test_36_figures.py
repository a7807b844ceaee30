"""The figures of speculation show accepted, own and rejected tokens, gains, slots and trees."""

import time

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.ch36_speculative import figures, reference
from minigen_course.ch36_speculative.lesson import Round, Stored
from minigen_course.figures.explore import png
from minigen_course.figures.style import GREEN

ROUNDS = [
    Round((), 0, (1,)),
    Round((2, 3, 4), 3, (2, 3, 4, 5)),
    Round((6, 7, 8), 1, (6, 9)),
    Round((1, 1), 0, (2,)),
]
COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 2.0}


def texts(made: Figure) -> list[str]:
    return [each.get_text() for axes in made.axes for each in axes.texts]


def grounds(made: Figure) -> list[str]:
    (boxes,) = (each for each in made.axes[0].collections if isinstance(each, PolyCollection))
    return [to_hex(each) for each in np.asarray(boxes.get_facecolor())]


def test_a_run_has_a_box_for_each_token_and_each_rejected_draft() -> None:
    made = figures.rounds(ROUNDS, str)
    found = grounds(made)
    assert found.count(figures.RIGHT) == 4
    assert found.count(figures.OWN.lower()) == 4
    assert found.count(figures.WRONG) == 4
    assert made.axes[0].get_title(loc="left") == "8 tokens in 4 steps"
    png(made)


def test_a_run_is_drawn_up_to_a_step() -> None:
    made = figures.rounds(ROUNDS, str, upto=2)
    assert made.axes[0].get_title(loc="left") == "5 tokens in 2 steps"
    assert len(grounds(made)) == 5


def test_a_long_run_is_drawn_fast_enough_to_be_played() -> None:
    long = [Round(tuple(range(8)), step % 9, tuple(range(step % 9 + 1))) for step in range(16)]
    png(figures.rounds(long, "token{}".format))
    started = time.process_time()
    png(figures.rounds(long, "token{}".format))
    assert time.process_time() - started < 1  # about 0.1 s


def test_a_step_by_hand_counts_what_it_gives() -> None:
    made = figures.by_hand(["a"], ["b", "c", "d"], ["b", "x", "y", "z"])
    assert made.axes[0].get_title(loc="left") == "4 rows, 1 drafts right: 2 tokens from one step"
    faces = [to_hex(each.get_facecolor()) for each in made.axes[0].patches]
    assert faces.count(figures.RIGHT) == 2  # the draft, and the model's equal token
    assert faces.count(figures.WRONG) == 2


def test_dots_mark_the_best_numbers_of_drafts() -> None:
    made = figures.gain_curves({"a form": COSTS}, [0.0, 0.8], most=15)
    dots = [line for line in made.axes[0].lines if line.get_marker() == "o"]
    relative = [float(np.interp(count + 1, [*COSTS], [*COSTS.values()])) for count in range(16)]
    best = [reference.best_count(each, relative) for each in (0.0, 0.8)]
    assert [int(np.asarray(dot.get_xdata())[0]) for dot in dots] == best


def test_the_explored_gain_says_its_rows() -> None:
    made = figures.explored_gain(COSTS, 1.0, 3, 4)
    assert made.axes[0].get_title(loc="left").endswith("16 rows, 1.67 times the step")
    png(made)


def test_both_panels_of_the_explored_gain_are_whole() -> None:
    made = figures.explored_gain(COSTS, 1.0, 15, 32)
    highest = max(np.max(line.get_ydata()) for axes in made.axes for line in axes.lines)
    assert highest < made.axes[1].get_ylim()[1]


def test_break_even_is_where_tokens_equal_the_cost() -> None:
    needed = figures._break_even(4, 3.0)
    assert sum(needed**place for place in range(5)) == pytest.approx(3.0)
    assert figures._break_even(4, 1.0) == pytest.approx(0, abs=1e-6)
    assert figures._break_even(4, 9.0) == pytest.approx(1)


def test_slots_are_counted_and_only_full_right_blocks_are_green() -> None:
    computed, published, _ = reference.after_verifying(10, 5, 2, 4, 4)
    made = figures.rollback(4, 10, 5, 2, published)
    slots = [
        each for each in made.axes[0].patches if isinstance(each, Rectangle) and each.get_fill()
    ]
    faces = [to_hex(each.get_facecolor()) for each in slots]
    assert faces.count(figures.RIGHT) == 2
    assert faces.count(figures.WRONG) == 3
    assert faces.count(figures.PALE.lower()) == 9 + 9 + computed
    assert sum(each.get_hatch() is not None for each in slots) == 3
    green = [each for each in made.axes[0].patches if to_hex(each.get_edgecolor()) == GREEN]
    assert len(green) == published == 3


def test_a_tree_has_its_nodes_and_its_mask() -> None:
    parents = [-1, -1, 0, 0, 1]
    mask = reference.tree_mask(parents)
    made = figures.token_tree(parents, list("abcde"), mask)
    assert {"0 a", "1 b", "2 c", "3 d", "4 e"} <= set(texts(made))
    (image,) = made.axes[1].images
    assert np.array_equal(np.asarray(image.get_array()) > 0, mask)
    png(made)


def test_the_other_figures_are_drawn() -> None:
    png(figures.step_costs({"here": COSTS, "stored": {1: 1.0, 8: 3.0}}))
    shares = {name: np.array([0.5, 0.3, 0.2]) for name in ("p", "q", "classical")}
    made = figures.drift(shares, ["a", "b", "c"])
    assert len(made.axes[0].patches) == 9
    png(figures.shallow({0: 0.0, 2: 0.2, 4: 1.0}, 4))


def test_stored_gains_have_a_panel_for_each_form_and_load() -> None:
    ratios = {
        ("auto", "copying"): {"ngram": {1: 1.5, 16: 1.0}},
        ("bfloat16", "copying"): {"ngram": {1: 3.0, 16: 1.2}, "suffix": {1: 3.0}},
        ("bfloat16", "control"): {"ngram": {1: 1.0, 16: 0.99}},
    }
    spans = {
        panel: {
            way: {batch: (0.9 * each, 1.1 * each) for batch, each in by_batch.items()}
            for way, by_batch in ways.items()
        }
        for panel, ways in ratios.items()
    }
    stored = Stored(ratios, spans)
    made = figures.stored_gains(stored)
    titles = {axes.get_title(loc="left") for axes in made.axes}
    assert titles == {
        *("copying, 4 bits", "control, 4 bits"),
        *("copying, bfloat16", "control, bfloat16"),
    }
    legend = made.axes[0].get_legend()
    assert legend is not None
    assert [each.get_text() for each in legend.get_texts()] == ["ngram", "suffix"]
    png(made)
