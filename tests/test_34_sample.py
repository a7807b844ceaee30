"""The sampling kernel chooses the tokens of torch's stages, for each row separately."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen import SamplingParams
from minigen.errors import MinigenError
from minigen.kernels.cpu.arrays.sampling import BLOCK
from minigen.kernels.cpu.runner import KernelChooser
from minigen.sampling.sampler import (
    BatchSampler,
    apply_temperature,
    choose_tokens,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    uniform_draws,
)
from minigen.sequence import Sequence

VOCAB = 2 * BLOCK + 176  # a multiple of 16, but not of a block
KERNEL = KernelChooser(VOCAB, 2)

SETTINGS = {
    # Higher ones leave weights that float32 cannot distinguish.
    "temperature": st.sampled_from([0.0, 1e-300, 0.3, 0.8, 1.0, 20.0]),
    "top_k": st.sampled_from([None, 1, 2, 3, 4, 17, VOCAB - 1, VOCAB, 10**6]),
    "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.3]),
    "logit_bias": st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=4
    ),
    "min_tokens": st.sampled_from([0, 9]),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    "seed": st.integers(0, 2**63),
}
# How much of the total probability rounding may move a limit or a draw.
CLOSE = 1e-5


def sequence_of(params: SamplingParams, sequence_id: int = 1) -> Sequence:
    return Sequence(
        sequence_id, (5, 9, 9, 700), params, params.seed or 0, 100, frozenset({2}),
        output_ids=[9, 11, 11],
    )  # fmt: skip


def make_logits(kind: str, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator)
    if kind == "peaked":
        return logits * 6
    if kind == "rounded":
        return (logits * 2).round()  # many that are equal
    if kind == "equal":
        return torch.full((rows, VOCAB), 0.25)
    return logits


@given(
    kind=st.sampled_from(["plain", "peaked", "rounded", "equal"]),
    seed=st.integers(0, 10**6),
    asked=st.lists(st.fixed_dictionaries(SETTINGS), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_chooses_as_torch_does(kind: str, seed: int, asked: list[Any]) -> None:
    logits = make_logits(kind, len(asked), seed)
    before = logits.clone()
    sequences = [
        sequence_of(SamplingParams(max_tokens=100, **each), i) for i, each in enumerate(asked)
    ]
    found, expected = KERNEL(logits, sequences), choose_tokens(logits, sequences)
    assert torch.equal(logits, before)
    for row, sequence in enumerate(sequences):
        if found[row] != expected[row]:
            assert found[row] in likely_choices(logits[row], sequence)
        alone = KERNEL(logits[row : row + 1].contiguous(), [sequence])
        assert alone == [found[row]]


def likely_choices(logits: torch.Tensor, sequence: Sequence) -> set[int]:
    """Return what torch's stages choose with limits and draw slightly to either side."""
    from minigen.sampling.sampler import _constrained

    params = sequence.params
    row = _constrained(logits.unsqueeze(0), [sequence]).double()
    if params.greedy:
        return set()  # rounding does not excuse another choice
    row = apply_temperature(row, torch.tensor([params.temperature], dtype=torch.float64))
    (uniform,) = uniform_draws([sequence.seed], [0], [len(sequence.output_ids)]).tolist()
    choices = set()
    for side in (-CLOSE, 0.0, CLOSE):
        kept = row
        if params.min_p > 0:
            kept = keep_min_p(kept, torch.tensor([min(params.min_p * (1 - side), 1.0)]))
        if params.top_k is not None and params.top_k < VOCAB:
            kept = keep_top_k(kept, torch.tensor([params.top_k]))
        if params.top_p < 1:
            mass = min(max(params.top_p + side, 1e-12), 1.0)
            kept = keep_top_p(kept, torch.tensor([mass], dtype=torch.float64))
        cumulated = kept.softmax(-1)[0].cumsum(-1)
        for other in (-CLOSE, 0.0, CLOSE):
            wanted = min(max(uniform + other, 0.0), 1 - 1e-12) * float(cumulated[-1])
            choices.add(int(np.searchsorted(cumulated.numpy(), wanted, side="right")))
    return choices


def test_differences_from_torch_are_rare() -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=9) for seed in range(400)
    ]
    sequences = [sequence_of(each, i) for i, each in enumerate(params)]
    logits = make_logits("peaked", len(sequences), 1)
    pairs = zip(KERNEL(logits, sequences), choose_tokens(logits, sequences), strict=True)
    assert sum(found != expected for found, expected in pairs) <= 2


def test_tokens_are_drawn_with_their_probabilities() -> None:
    params = [SamplingParams(temperature=1.5, top_k=40, seed=i) for i in range(4000)]
    sequences = [sequence_of(each, i) for i, each in enumerate(params)]
    row = make_logits("peaked", 1, 3)
    found = np.bincount(KERNEL(row.repeat(4000, 1), sequences), minlength=VOCAB)
    shares = keep_top_k(row / 1.5, torch.tensor([40])).softmax(-1)[0].numpy() * 4000
    likely = shares > 5
    distance = ((found - shares)[likely] ** 2 / shares[likely]).sum()
    assert distance < likely.sum() + 4 * math.sqrt(2 * likely.sum())
    assert not found[shares == 0].any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 600, VOCAB - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(
    wrong: float, place: int, temperature: float
) -> None:
    logits = make_logits("plain", 3, 0)
    logits[1, place] = wrong
    sequences = [sequence_of(SamplingParams(temperature=temperature), i) for i in range(3)]
    assert [token < 0 for token in KERNEL(logits, sequences)] == [False, True, False]
    assert [token < 0 for token in choose_tokens(logits, sequences)] == [False, True, False]
    with pytest.raises(MinigenError, match="not finite"):
        BatchSampler(KERNEL)(logits, sequences)


def test_a_row_whose_tokens_are_all_banned_gives_no_token() -> None:
    everything = SamplingParams(min_tokens=9, max_tokens=20, stop_token_ids=range(VOCAB))
    logits = make_logits("plain", 1, 0)
    assert KERNEL(logits, [sequence_of(everything)]) == [-1]
