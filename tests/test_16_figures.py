"""The figures of sampling show the stages of the sampler, its draws, and what was measured."""

import pytest
import torch

from minigen.sampling.sampler import draw, uniform_draws
from minigen_course.ch16_sampling.figures import (
    cut,
    cuts,
    effective_tokens,
    ladder,
    many_draws,
    next_token,
    penalized,
    pipeline,
    staircase,
    tail_mass,
    temperatures,
)
from minigen_course.ch16_sampling.lesson import mean_of


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()


def test_cut_applies_the_stages_in_the_samplers_order(logits: torch.Tensor) -> None:
    assert (cut(logits, top_k=2) > -torch.inf).sum() == 2
    assert (cut(logits, top_p=0.65) > -torch.inf).sum() == 2
    assert (cut(logits, min_p=0.3) > -torch.inf).sum() == 3
    flat = cut(logits, temperature=10.0, top_p=0.65)
    assert (flat > -torch.inf).sum() == 4, "temperature goes before top-p"


def test_bars_are_the_probabilities_and_the_line_the_cut(logits: torch.Tensor) -> None:
    (axes,) = next_token(logits, str, top_k=3).axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights[:5] == pytest.approx([0.4, 0.3, 0.2, 0.06, 0.04])
    assert heights[5:10] == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0, 0])
    assert [line.get_xdata()[0] for line in axes.lines][-1] == 2.5
    assert axes.get_title(loc="left") == "3 tokens of 5 may be drawn"
    assert next_token(logits, str, top_k=1).axes[0].get_title(loc="left").startswith("1 token of")


def test_a_line_shows_the_probabilities_after_temperature(logits: torch.Tensor) -> None:
    (axes,) = next_token(logits, str, temperature=2.0, top_k=3).axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx((logits / 2).softmax(-1).tolist())


def test_dots_show_how_often_each_token_was_drawn(logits: torch.Tensor) -> None:
    (axes,) = next_token(logits, str, top_k=3, num_draws=200).axes
    (dots,) = (line for line in axes.lines if line.get_label() == "200 draws")
    shares = list(dots.get_ydata())
    assert sum(shares) == pytest.approx(1)
    assert shares[:3] == pytest.approx([4 / 9, 3 / 9, 2 / 9], abs=0.1)
    assert shares[3:] == [0, 0], "a dropped token is never drawn"
    assert axes.get_title(loc="left").endswith("; 0% of 200 draws fell beyond the 5 shown")


def test_many_draws_are_those_of_the_sampler(logits: torch.Tensor) -> None:
    uniform = uniform_draws([3] * 40, [0] * 40, range(40))
    assert torch.equal(many_draws(logits, 40, seed=3), draw(logits.expand(40, -1), uniform))


def test_temperature_0_is_refused_in_a_sentence(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="At temperature 0 nothing is drawn"):
        next_token(logits, str, temperature=0)


def test_the_tail_is_the_rest_after_the_likeliest(logits: torch.Tensor) -> None:
    (axes,) = tail_mass({"a": logits}).axes
    assert list(axes.lines[0].get_ydata()[:4]) == pytest.approx([0.6, 0.3, 0.1, 0.04])


def test_a_distribution_is_as_wide_as_a_number_of_equal_tokens(logits: torch.Tensor) -> None:
    assert effective_tokens(torch.zeros(8)) == pytest.approx(8)
    assert effective_tokens(torch.tensor([0.0, 0.0, -torch.inf])) == pytest.approx(2)
    panels = temperatures(logits, str, values=(0.5, 1.0), shown=3).axes
    heights = [patch.get_height() for patch in panels[1].patches]
    assert heights == pytest.approx([0.4, 0.3, 0.2, 0.1]), "the last bar is all others"
    assert panels[1].get_title(loc="left") == "T = 1: like 3.8 tokens"


def test_marks_stand_at_the_last_token_that_is_kept(logits: torch.Tensor) -> None:
    (axes,) = cuts({"a": logits}, top_k=2, top_p=0.85, min_p=0.45).axes
    marks = [(line.get_marker(), line.get_xdata()) for line in axes.lines[1:4]]
    assert [(marker, list(x)) for marker, x in marks] == [("s", [2]), ("o", [3]), ("^", [3])]


def test_a_penalty_has_a_bar_beside_the_model(logits: torch.Tensor) -> None:
    kinds = {"none": logits, "some": logits - torch.tensor([1.0, 0, 0, 0, 0])}
    (axes,) = penalized(kinds, [" a\n1 ×", "b\n0 ×"], [0, 1], "said").axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights[:2] == pytest.approx([0.4, 0.3])
    assert heights[2] < 0.4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["␣a\n1 ×", "b\n0 ×"]


def test_a_uniform_number_falls_on_the_token_that_the_sampler_draws(logits: torch.Tensor) -> None:
    shares = dict(zip("abcde", logits.exp().tolist(), strict=True))
    (axes,) = staircase(shares, {"u": 0.75}).axes
    drawn = int(draw(logits[None], torch.tensor([0.75], dtype=torch.float64)))
    (level,) = (line for line in axes.lines if list(line.get_ydata()) == [0.75, 0.75])
    assert level.get_xdata()[1] == drawn + 0.5


def test_stages_and_their_taps_are_named() -> None:
    (axes,) = pipeline([("logits", "5 tokens"), ("draw", "1 token")], {0: "logprobs"}).axes
    texts = [each.get_text() for each in axes.texts]
    assert {"logits", "5 tokens", "draw", "1 token", "logprobs"} <= set(texts)


def test_a_ladder_has_a_row_for_each_setting() -> None:
    values = [1.0, 2.0, 3.0]
    found = {"runs, %": {"greedy": (values, mean_of(values)), "draw": ([0.0], mean_of([0.0]))}}
    (axes,) = ladder(found).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["greedy", "draw"]
    assert [line.get_xdata() for line in axes.lines if line.get_marker() == "D"] == [[2], [0]]
