"""Figures of chapter 13 show their data, and recorded values are those of the model."""

import pytest
import torch
from matplotlib.text import Annotation

from minigen import LLM
from minigen.model.attention import attention
from minigen.model.layers import rotary_frequencies
from minigen_course.ch13_layers import figures
from minigen_course.lab.inspect_model import (
    head_scores,
    log_probabilities,
    next_logits,
    perplexity,
    recorded_heads,
    recorded_states,
    transformer_of,
    turned_back,
)

FREQUENCIES = rotary_frequencies(8, 100.0)
QUERY = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 1.0, 2.0, 1.0])
KEY = torch.tensor([0.5, -1.0, 1.0, 1.0, 2.0, 0.0, 1.0, -0.5])


def test_points_of_a_pair_turn_by_its_frequency_and_keep_their_radius() -> None:
    points = figures.turned(QUERY, FREQUENCIES, [0, 1, 2])
    torch.testing.assert_close(points[0], QUERY)
    angles = torch.atan2(points[:, 4 + 1], points[:, 1])
    torch.testing.assert_close(angles.diff(), FREQUENCIES[1].expand(2))
    drawn = figures.turning(QUERY, FREQUENCIES, (0, 1), last=2).axes
    ends = [text.xy for text in drawn[1].texts if isinstance(text, Annotation)]
    torch.testing.assert_close(torch.tensor(ends).float(), points[:, [1, 5]])
    assert drawn[1].get_title(loc="left") == "pair 1: 18.1° per position"
    assert drawn[0].get_xlim() == drawn[1].get_xlim(), "lengths can be compared"


def test_dense_arrows_show_their_first_and_last_position() -> None:
    slow = figures.turning(QUERY, FREQUENCIES, (3,), last=24).axes[0]
    numbers = [text.get_text() for text in slow.texts if text.get_text()]
    assert {"0", "384"} <= set(numbers), "16 times as far"
    assert len(numbers) < 10
    alone = figures.turning(QUERY, FREQUENCIES, (0,), last=0).axes[0]
    assert [text.get_text() for text in alone.texts if text.get_text()] == ["0"]


def test_scores_of_quarter_turns_are_equal_on_each_diagonal() -> None:
    query, key = [(2, 1), (-1, 2), (-2, -1)], [(1, 1), (-1, 1), (-1, -1)]
    left, _, table = figures.quarter_turns(query, key, ("0", "1", "2")).axes
    ends = [text.xy for text in left.texts if isinstance(text, Annotation)]
    assert ends == query
    shown = [text.get_text() for text in table.texts]
    assert shown == ["3", "-1", "-3", "1", "3", "-1", "-3", "1", "3"]


def test_the_curve_of_the_score_is_the_same_for_every_position_of_the_key() -> None:
    axes = figures.by_distance(QUERY, KEY, FREQUENCIES, farthest=20).axes[0]
    near, *others = (torch.tensor(line.get_ydata()) for line in axes.lines)
    assert float(near[0]) == pytest.approx(float(QUERY @ KEY) / 8**0.5)
    for other in others:
        torch.testing.assert_close(other, near, atol=1e-2, rtol=0)
    assert axes.get_title(loc="left").endswith(f"a distance of {int(near.argmax())}")


def test_sinusoidal_vectors_and_alibi_are_drawn_as_given() -> None:
    waves, biases = torch.rand(4, 6), torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.01, -0.02]])
    heat, lines = figures.added_and_subtracted(waves, biases).axes[:2]
    assert torch.equal(torch.tensor(heat.images[0].get_array()), waves)
    drawn = [torch.as_tensor(line.get_ydata()) for line in lines.lines]
    torch.testing.assert_close(torch.stack(drawn), biases.flip(0))
    assert [text.get_text() for text in lines.texts] == ["head 1", "head 0"]
    alike = torch.tensor([[0.0, -2.0], [0.0, -0.02], [0.0, -0.01]])
    shared = figures.added_and_subtracted(waves, alike).axes[1]
    assert [text.get_text() for text in shared.texts] == ["heads 1 to 2", "head 0"]


def test_one_layer_is_drawn_with_its_shapes() -> None:
    axes = figures.layer_flow(5, 576, 1536, (9, 3, 64)).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert "[5, 1536]" in texts
    assert texts.count("RMSNorm") == 2
    assert sum("k, v [5, 3, 64]" in text for text in texts) == 2


def test_two_tokens_are_shown_with_their_angle_distance_and_score() -> None:
    drawn = figures.two_tokens(QUERY, KEY, FREQUENCIES, query_at=7, key_at=4, pair=0)
    circle, curve = drawn.axes
    assert circle.get_title(loc="left") == "pair 0: query turned 171.9° further"
    (score,) = figures.scores(QUERY, KEY, FREQUENCIES, [7], [4]).tolist()
    assert curve.get_title(loc="left") == f"distance 3: score {score:.2f}"


@pytest.mark.parametrize(
    ("query_at", "key_at", "pair", "words"),
    [(3, 4, 0, "looks back"), (3, -1, 0, "looks back"), (3, 1, 4, "There are 4 pairs")],
)
def test_positions_and_pairs_that_make_no_sense_are_refused(
    query_at: int, key_at: int, pair: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        figures.two_tokens(QUERY, KEY, FREQUENCIES, query_at=query_at, key_at=key_at, pair=pair)


def test_the_other_figures_draw_what_they_are_given() -> None:
    states = torch.tensor([[[1.0, -1.0]], [[30.0, 40.0]], [[600.0, 800.0]], [[1.0, 7.0]]])
    largest, median = figures.sizes(states).axes[0].lines[:2]
    assert torch.as_tensor(largest.get_ydata()).tolist() == [1, 40, 800, 7]
    assert float(torch.as_tensor(median.get_ydata())[3]) == pytest.approx(5)
    likely = figures.found_likely(["a b", "$"], {"own": torch.tensor([0.25, 1.0])}).axes[0]
    assert [label.get_text() for label in likely.get_xticklabels()] == ["a␣b", r"\$"]
    gates = figures.gates(torch.tensor([[-0.9, -0.2, -9.0, 0.5]])).axes[1]
    assert gates.get_title(loc="left").startswith("75%")
    assert sum(bar.get_height() for bar in gates.patches) == 4
    assert likely.get_title(loc="left") == "Mean probability: 0.62 with own"
    waves = figures.wavelengths({"as trained": FREQUENCIES}, 50).axes[0]
    assert waves.get_title(loc="left").startswith("2 of 4 pairs")
    curves = figures.reach([10, 100], {"as trained": [1.0, 50.0]}, 50, 20.0).axes[0]
    assert list(curves.lines[0].get_ydata()) == [1.0, 50.0]


def test_log_probabilities_and_states_are_those_of_the_forward_pass(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenizer.encode("hello there")
    found = log_probabilities(tiny_llm, ids)
    assert found.shape == (len(ids) - 1,)
    states = recorded_states(tiny_llm, ids)
    model = transformer_of(tiny_llm)
    assert torch.equal(states[0], model.embed(torch.tensor(ids)))
    expected = model.logits(states[-1]).log_softmax(-1)
    torch.testing.assert_close(found[-1], expected[-2, ids[-1]])
    torch.testing.assert_close(model.logits(states[-1])[-1], next_logits(tiny_llm, "hello there"))


def test_positions_and_frequencies_can_be_others(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenizer.encode("hello there")
    own = log_probabilities(tiny_llm, ids)
    places = torch.arange(len(ids))
    torch.testing.assert_close(log_probabilities(tiny_llm, ids, places + 7), own)
    frequencies = transformer_of(tiny_llm).frequencies
    halved = log_probabilities(tiny_llm, ids, 2 * places, frequencies / 2)
    torch.testing.assert_close(halved, own)
    assert not torch.allclose(log_probabilities(tiny_llm, ids, 2 * places), own)


def test_perplexity_counts_equally_likely_choices() -> None:
    assert perplexity(torch.tensor([0.25, 0.25, 0.25]).log()) == pytest.approx(4)


def test_a_text_without_tokens_is_named(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llm.tokenizer, "encode", lambda text: [])
    with pytest.raises(ValueError, match="at least one word"):
        next_logits(tiny_llm, "")
    with pytest.raises(ValueError, match="at least one word"):
        recorded_heads(tiny_llm, [])


def test_recorded_heads_are_what_attention_was_given(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenizer.encode("hello there")
    heads = recorded_heads(tiny_llm, ids)
    assert len(heads) == tiny_llm.config.num_layers
    plain = turned_back(tiny_llm, heads[0])
    torch.testing.assert_close(plain.q[0], heads[0].q[0])
    torch.testing.assert_close(plain.k.norm(dim=-1), heads[0].k.norm(dim=-1))
    assert not torch.allclose(plain.q, heads[0].q)
    weights = head_scores(heads[1]).softmax(-1)
    values = heads[1].v.repeat_interleave(heads[1].q.shape[1] // heads[1].v.shape[1], dim=1)
    mixed = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(mixed, attention(heads[1].q, heads[1].k, heads[1].v))
