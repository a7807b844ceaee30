"""The figure of a next-token distribution shows the stages of the sampler."""

import pytest
import torch

from minigen_course.ch16_sampling.figures import cut, next_token, tail_mass


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
    (axes,) = next_token(logits, str, top_k=3, seed=1).axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights[:5] == pytest.approx([0.4, 0.3, 0.2, 0.06, 0.04])
    assert heights[5:10] == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0, 0])
    assert axes.lines[0].get_xdata()[0] == 2.5
    assert axes.get_title(loc="left").startswith("3 of 5 tokens may be drawn; drawn: '")


def test_temperature_0_is_refused_in_a_sentence(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="At temperature 0 nothing is drawn"):
        next_token(logits, str, temperature=0)


def test_the_tail_is_the_rest_after_the_likeliest(logits: torch.Tensor) -> None:
    (axes,) = tail_mass({"a": logits}).axes
    assert list(axes.lines[0].get_ydata()[:4]) == pytest.approx([0.6, 0.3, 0.1, 0.04])
