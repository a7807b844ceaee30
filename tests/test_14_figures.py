"""Figures of chapter 14 show the given weights, masks, heads and shapes."""

import pytest
import torch
from matplotlib.patches import Circle, Rectangle

from minigen.model.attention import causal_mask
from minigen_course.ch14_attention import figures
from minigen_course.figures.style import BLUE, FAINT

WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25]])


def test_a_heat_map_shows_the_weights_and_leaves_the_future_white() -> None:
    axes = figures.head_map(WEIGHTS, [" a", "b", "$"], "layer 1").axes[0]
    shown = axes.images[0].get_array()
    assert shown is not None
    assert shown[1].tolist() == [0.25, 0.75, None]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["␣a", "b", r"\$"]


def test_a_sentence_of_one_token_or_of_too_many_is_refused() -> None:
    for count in (1, 41):
        with pytest.raises(ValueError, match=f"has {count} tokens; 2 to 40"):
            figures.head_map(torch.ones(count, count), ["a"] * count, "")


def test_several_heads_are_drawn_side_by_side_with_their_names() -> None:
    drawn = figures.head_maps({"first": WEIGHTS, "second": WEIGHTS}, ["a", "b", "c"])
    panels = drawn.axes[:2]
    assert [axes.get_title(loc="left") for axes in panels] == ["first", "second"]
    assert not panels[1].get_yticklabels()
    assert [axes.child_axes[0].get_ylabel() for axes in panels] == ["weight", "weight"]


def test_a_mask_is_blue_where_a_query_may_attend() -> None:
    axes = figures.masks({"piece": causal_mask(2, 3)}).axes[0]
    colours = [patch.get_facecolor() for patch in axes.patches]
    seen = [Rectangle((0, 0), 1, 1, color=BLUE).get_facecolor() == each for each in colours]
    assert seen == [True, True, False, True, True, True]
    assert Rectangle((0, 0), 1, 1, color=FAINT).get_facecolor() in colours
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]
    assert axes.get_yticks().tolist() == [1.5, 2.5]  # below the row of position 0


def test_every_query_head_is_joined_to_its_own_kv_head() -> None:
    axes = figures.sharing({"grouped": (6, 2)}).axes[0]
    ends = [float(torch.as_tensor(line.get_xdata())[1]) for line in axes.lines]
    assert ends == [1.5, 1.5, 1.5, 4.5, 4.5, 4.5]
    kinds = [type(patch) for patch in axes.patches]
    assert (kinds.count(Circle), kinds.count(Rectangle)) == (6, 2)
    assert [text.get_text() for text in axes.texts] == list("01203451")


def test_each_box_of_the_flow_names_the_shape_that_leaves_it() -> None:
    axes = figures.flow(5, 6, 2, 8).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("[5, 48]") == 4  # the residual stream, the norm, W_o, the sum
    assert texts.count("[5, 6, 8]") == 2  # queries and mixed values
    assert texts.count("[5, 2, 8]") == 2  # keys and values
    assert texts.count("[6, 5, 5]") == 2  # scores and weights
    boxes = [patch.get_bbox() for patch in axes.patches if isinstance(patch, Rectangle)]
    overlaps = [(a, b) for a in boxes for b in boxes if a is not b and a.overlaps(b)]
    assert overlaps == []
