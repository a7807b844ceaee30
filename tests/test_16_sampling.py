"""Every sampler draws from the distribution that it claims, whatever the batch contains."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minigen.errors import MinigenError
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import (
    BatchSampler,
    apply_penalties,
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    uniform_draws,
)
from minigen.sequence import SampledToken, Sequence

LOGITS = [1.5, -0.5, 2.0, 0.25, -1.0, 1.0, 0.0, 1.75, -0.75, 0.5]
NUM_DRAWS = 8_000
ALMOST_ONE = 1 - 2.0**-53

many = settings(max_examples=150, deadline=None, derandomize=True)


def make_sequence(
    params: SamplingParams,
    seed: int = 0,
    choice: int = 0,
    prompt_ids: Iterable[int] = (0,),
    output_ids: Iterable[int] = (),
    end_ids: Iterable[int] = (),
) -> Sequence:
    return Sequence(
        sequence_id=1,
        prompt_ids=tuple(prompt_ids),
        params=params,
        seed=seed,
        max_output=100,
        end_ids=frozenset(end_ids),
        choice=choice,
        output_ids=list(output_ids),
    )


def with_seeds(sequence: Sequence, num_draws: int = NUM_DRAWS) -> list[Sequence]:
    """Return copies of one request, each with a different seed."""
    copies = [copy.copy(sequence) for _ in range(num_draws)]
    for seed, each in enumerate(copies):
        each.seed = seed
    return copies


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    return [token.token_id for token in BatchSampler()(logits, sequences)]


def constrained_by_loops(logits: list[float], sequence: Sequence) -> list[float]:
    """Apply bias, then repetition, frequency and presence penalties, then ban stop tokens."""
    params, outputs = sequence.params, sequence.output_ids
    result = []
    for token_id, logit in enumerate(logits):
        logit += params.logit_bias.get(token_id, 0.0)
        if token_id in sequence.prompt_ids or token_id in outputs:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * outputs.count(token_id)
        if token_id in outputs:
            logit -= params.presence_penalty
        if len(outputs) < params.min_tokens and token_id in sequence.stop_ids:
            logit = -math.inf
        result.append(logit)
    return result


def likeliest_first(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def distribution_by_loops(logits: list[float], sequence: Sequence) -> list[float]:
    """Return probabilities after penalties, temperature, min-p, top-k and top-p, in this order."""
    params = sequence.params
    logits = [logit / params.temperature for logit in constrained_by_loops(logits, sequence)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    kept = [token_id for token_id in likeliest_first(logits) if weights[token_id] >= params.min_p]
    kept = kept[: params.top_k]
    total, mass, nucleus = sum(weights[token_id] for token_id in kept), 0.0, []
    for token_id in kept:
        if mass < params.top_p * total:
            nucleus.append(token_id)
        mass += weights[token_id]
    total = sum(weights[token_id] for token_id in nucleus)
    return [
        weights[token_id] / total if token_id in nucleus else 0.0 for token_id in range(len(logits))
    ]


def p_value(token_ids: Iterable[int], expected: list[float]) -> float:
    """Return the chi-square p-value of the counts; 0 if an impossible token was drawn."""
    counts = np.bincount(list(token_ids), minlength=len(expected))
    probabilities = np.array(expected)
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    wanted = counts.sum() * probabilities[possible]
    assert wanted.min() > 5, "too rare a token for a chi-square test"
    return float(stats.chisquare(counts[possible], wanted).pvalue)


CLAIMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 1/2": {"temperature": 0.5},
    "temperature 2, a whole number": {"temperature": 2},
    "top-k": {"top_k": 4},
    "top-k 1": {"top_k": 1},
    "top-k of all tokens but one": {"top_k": 9},
    "top-k beyond the vocabulary": {"top_k": 10_000},
    "top-p": {"top_p": 0.7},
    "top-p above the first token": {"top_p": 0.3},
    "top-p below the first token": {"top_p": 0.01},
    "min-p": {"min_p": 0.3},
    "min-p and top-k": {"min_p": 0.1, "top_k": 6},
    "top-k, then top-p of what is left": {"top_k": 5, "top_p": 0.8},
    "min-p, then top-p of what is left": {"min_p": 0.4, "top_p": 0.8},
    "temperature, then min-p": {"temperature": 0.5, "min_p": 0.3},
    "temperature, then top-p": {"temperature": 1.5, "top_p": 0.8},
    "all four": {"temperature": 1.3, "min_p": 0.05, "top_k": 7, "top_p": 0.85},
    "repetition penalty": {"repetition_penalty": 1.5},
    "repetition reward, a whole number's inverse": {"repetition_penalty": 0.5},
    "presence penalty": {"presence_penalty": 1},
    "frequency penalty": {"frequency_penalty": 0.4},
    "all penalties": {
        "repetition_penalty": 2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
    },
    "logit bias": {"logit_bias": {4: 3.0, 2: -1.5, 8: 1}},
    "bias, then penalties": {"logit_bias": {4: 3.0, 2: -1.5}, "repetition_penalty": 2.0},
    "bias, penalties, temperature, top-p": {
        "logit_bias": {8: 2.0},
        "frequency_penalty": 0.5,
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "stop tokens banned": {"min_tokens": 5, "stop_token_ids": [2, 3]},
    "stop tokens banned, then top-k": {"min_tokens": 5, "stop_token_ids": [2], "top_k": 3},
    "stop tokens not banned any more": {"min_tokens": 4, "stop_token_ids": [2, 3]},
}


def claim(name: str) -> Sequence:
    return make_sequence(
        SamplingParams(**CLAIMS[name]), prompt_ids=[0, 4, 5], output_ids=[2, 8, 2, 3], end_ids=[7]
    )


@pytest.mark.parametrize("name", CLAIMS)
def test_draws_follow_the_distribution_that_the_settings_claim(name: str) -> None:
    sequence = claim(name)
    token_ids = sample(torch.tensor(LOGITS).expand(NUM_DRAWS, -1), with_seeds(sequence))
    assert p_value(token_ids, distribution_by_loops(LOGITS, sequence)) > 1e-3


def test_this_number_of_draws_distinguishes_every_two_claims() -> None:
    logits = torch.tensor(LOGITS).expand(NUM_DRAWS, -1)
    same = {"plain", "top-k beyond the vocabulary", "stop tokens not banned any more"}
    claimed = {name: distribution_by_loops(LOGITS, claim(name)) for name in CLAIMS}
    for name in ("plain", "temperature 1/2", "all four", "bias, then penalties"):
        token_ids = sample(logits, with_seeds(claim(name)))
        for other, expected in claimed.items():
            if other != name and not {other, name} <= same:
                assert p_value(token_ids, expected) < 1e-6, (name, other)


def test_the_order_of_the_stages_matters_for_what_is_claimed() -> None:
    top_k_first = keep_top_p(
        keep_top_k(torch.tensor([LOGITS]), torch.tensor([5])), torch.tensor([0.8])
    )
    top_p_first = keep_top_k(
        keep_top_p(torch.tensor([LOGITS]), torch.tensor([0.8])), torch.tensor([5])
    )
    assert top_k_first.isfinite().sum() < top_p_first.isfinite().sum()


def test_the_draws_of_one_answer_follow_the_distribution_from_step_to_step() -> None:
    steps = range(NUM_DRAWS)
    logits = torch.tensor(LOGITS).expand(NUM_DRAWS, -1)
    uniform = uniform_draws([7] * NUM_DRAWS, [0] * NUM_DRAWS, steps)
    token_ids = draw(logits, uniform).numpy()
    expected = torch.tensor(LOGITS).double().softmax(-1)
    assert p_value(token_ids, expected.tolist()) > 1e-3
    # The token of a step is also independent of the next one.
    pairs = token_ids[:-1] * len(LOGITS) + token_ids[1:]
    frequent = [2, 7, 0, 5]
    common = np.isin(token_ids[:-1], frequent) & np.isin(token_ids[1:], frequent)
    observed = np.bincount(pairs[common], minlength=100).reshape(10, 10)[frequent][:, frequent]
    assert stats.chi2_contingency(observed).pvalue > 1e-3


def test_penalties_are_what_a_plain_loop_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 30, generator=generator) * 3
    prompts = torch.randint(0, 30, (40, 8), generator=generator).tolist()
    outputs = torch.randint(0, 12, (40, 15), generator=generator).tolist()
    penalties = torch.rand(40, 3, generator=generator) * torch.tensor([2.0, 4.0, 2.0])
    penalties -= torch.tensor([0.0, 2.0, 1.0])
    in_prompt, counts = torch.zeros(40, 30, dtype=torch.bool), torch.zeros(40, 30)
    expected = []
    for row in range(40):
        in_prompt[row, prompts[row]] = True
        for token_id in outputs[row]:
            counts[row, token_id] += 1
        repetition, presence, frequency = penalties[row].tolist()
        params = SamplingParams(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
        )
        sequence = make_sequence(params, prompt_ids=prompts[row], output_ids=outputs[row])
        expected.append(constrained_by_loops(logits[row].tolist(), sequence))
    ours = apply_penalties(logits, in_prompt, counts, *penalties.T)
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-4, rtol=1e-5)


# --- What is kept, exactly ---

# Only a few values, so that ties are common; -inf is a token that was dropped before.
TIED_LOGITS = st.lists(
    st.sampled_from([-math.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=90
).filter(lambda logits: max(logits) > -math.inf)


def kept_ids(logits: Tensor) -> list[int]:
    return logits[0].isfinite().nonzero().flatten().tolist()


@many
@given(logits=TIED_LOGITS, data=st.data())
def test_top_k_keeps_exactly_the_k_likeliest_lower_ids_first(
    logits: list[float], data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, len(logits)))
    kept = keep_top_k(torch.tensor([logits]), torch.tensor([top_k]))
    expected = sorted(each for each in likeliest_first(logits)[:top_k] if logits[each] > -math.inf)
    assert kept_ids(kept) == expected
    assert kept[0, expected].tolist() == [logits[token_id] for token_id in expected]


@many
@given(logits=TIED_LOGITS, top_p=st.floats(1e-3, 1, exclude_max=True))
def test_top_p_keeps_the_fewest_likeliest_that_reach_p(logits: list[float], top_p: float) -> None:
    order = likeliest_first(logits)
    weights = [math.exp(logits[token_id]) for token_id in order]
    reached = np.cumsum(weights) / sum(weights)
    assume(abs(reached - top_p).min() > 1e-5)  # exactly on the boundary, rounding decides
    num_kept = int((reached < top_p).sum()) + 1
    kept = keep_top_p(torch.tensor([logits]), torch.tensor([top_p], dtype=torch.float64))
    assert kept_ids(kept) == sorted(order[:num_kept])


@pytest.mark.parametrize(
    ("top_p", "num_kept"),
    [(1e-300, 1), (0.25, 1), (0.25 + 1e-9, 2), (0.5, 2), (0.75, 3), (0.75 + 1e-9, 4), (1.0, 4)],
)
def test_top_p_is_reached_by_equality(top_p: float, num_kept: int) -> None:
    quarters = torch.tensor([[1.0, 1.0, -math.inf, 1.0, 1.0]])
    kept = keep_top_p(quarters, torch.tensor([top_p], dtype=torch.float64))
    assert kept_ids(kept) == [0, 1, 3, 4][:num_kept]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.9999])
def test_top_p_of_a_large_vocabulary_is_that_of_sorting_it_whole(
    scale: float, top_p: float
) -> None:
    logits = scale * torch.randn(2, 30_000, generator=torch.Generator().manual_seed(0))
    kept = keep_top_p(logits, torch.tensor([top_p, 0.5], dtype=torch.float64))
    for row, mass in enumerate((top_p, 0.5)):
        ordered = logits[row].double().softmax(-1).sort(descending=True, stable=True)
        reached = ordered.values.cumsum(-1)
        low, high = ((reached < mass + slack).sum() + 1 for slack in (-1e-5, 1e-5))
        num_kept = int(kept[row].isfinite().sum())
        assert low <= num_kept <= high
        assert kept[row, ordered.indices[:num_kept]].isfinite().all()


@many
@given(logits=TIED_LOGITS, min_p=st.floats(0, 1))
def test_min_p_keeps_what_is_at_least_that_share_of_the_likeliest(
    logits: list[float], min_p: float
) -> None:
    shares = [math.exp(logit - max(logits)) for logit in logits]
    assume(min_p == 1 or min(abs(share - min_p) for share in shares) > 1e-5)
    kept = keep_min_p(torch.tensor([logits]), torch.tensor([min_p]))
    expected = [each for each, share in enumerate(shares) if share >= min_p and share > 0]
    assert kept_ids(kept) == expected


def test_the_stages_are_those_of_transformers() -> None:
    logits = 3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 500, (6, 40), generator=torch.Generator().manual_seed(2))
    for top_k in (1, 7, 500):
        ours = keep_top_k(logits, torch.full((6,), top_k))
        assert torch.equal(ours, TopKLogitsWarper(top_k)(ids, logits))
    for top_p in (0.05, 0.5, 0.9, 0.999):
        ours = keep_top_p(logits, torch.full((6,), top_p))
        assert torch.equal(ours, TopPLogitsWarper(top_p)(ids, logits))
    for min_p in (0.001, 0.1, 0.9):
        ours = keep_min_p(logits, torch.full((6,), min_p))
        assert torch.equal(ours, MinPLogitsWarper(min_p)(ids, logits))
    for temperature in (0.3, 1.0, 4.0):
        ours = apply_temperature(logits, torch.full((6,), temperature))
        theirs = TemperatureLogitsWarper(temperature)(ids, logits)
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1))
    for penalty in (0.7, 1.3):
        seen, none = torch.zeros(6, 500, dtype=torch.bool).scatter(1, ids, True), torch.zeros(6)
        ours = apply_penalties(
            logits, seen, torch.zeros(6, 500), torch.full((6,), penalty), none, none
        )
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
        torch.testing.assert_close(ours, theirs)


# --- Random numbers and the draw ---


def splitmix(word: int) -> int:
    """SplitMix64's output function in whole numbers (Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


@many
@given(
    seed=st.integers(-(2**63), 2**64 - 1), choice=st.integers(0, 1023), step=st.integers(0, 2**31)
)
def test_a_number_is_splitmix_of_seed_choice_and_step(seed: int, choice: int, step: int) -> None:
    state = splitmix(splitmix(splitmix(seed % 2**64) ^ choice) ^ step)
    assert uniform_draws([seed], [choice], [step]).tolist() == [(state >> 11) / 2**53]


def test_a_seed_keeps_its_meaning_from_version_to_version() -> None:
    numbers = uniform_draws([42, 42, 42, -1], [0, 0, 1, 0], [0, 1, 0, 0]).tolist()
    assert numbers == [
        0.3869742762400409,
        0.7129353372857994,
        0.577125795355946,
        0.9844383619111032,
    ]


def test_random_numbers_do_not_depend_on_the_other_requests() -> None:
    together = uniform_draws([5, -9, 2**64 - 1], [0, 1, 2], [7, 8, 9]).tolist()
    alone = [
        uniform_draws([seed], [choice], [step]).item()
        for seed, choice, step in ((5, 0, 7), (-9, 1, 8), (2**64 - 1, 2, 9))
    ]
    assert together == alone


COUNT = 100_000
AXES = {
    "seeds": lambda shift: (range(shift, COUNT + shift), [3] * COUNT, [5] * COUNT),
    "choices": lambda shift: ([3] * COUNT, range(shift, COUNT + shift), [5] * COUNT),
    "steps": lambda shift: ([3] * COUNT, [5] * COUNT, range(shift, COUNT + shift)),
}


@pytest.mark.parametrize("axis", AXES)
def test_numbers_are_uniform_and_independent_of_their_neighbours(axis: str) -> None:
    numbers = uniform_draws(*AXES[axis](0)).numpy()
    assert numbers.min() >= 0
    assert numbers.max() <= ALMOST_ONE
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    for shift in (1, 2, 64, 1024):
        neighbours = uniform_draws(*AXES[axis](shift)).numpy()
        assert abs(np.corrcoef(numbers, neighbours)[0, 1]) < 4 / math.sqrt(COUNT)
        grid, _, _ = np.histogram2d(numbers, neighbours, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(grid.flatten()).pvalue > 1e-3
    low_bits = (numbers * 2**53).astype(np.int64) % 256
    assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > 1e-3


def test_seed_choice_and_step_are_not_interchangeable() -> None:
    triples = [(a, b, c) for a in range(20) for b in range(20) for c in range(20)]
    numbers = uniform_draws(*zip(*triples, strict=True)).tolist()
    assert len(set(numbers)) == len(triples)


def test_a_draw_is_where_the_cumulative_probability_passes_the_number() -> None:
    quarters = torch.zeros(1, 4)
    for number, token_id in [
        (0.0, 0),
        (0.25 - 2**-53, 0),
        (0.25, 1),
        (0.5 - 2**-53, 1),
        (0.5, 2),
        (0.75, 3),
        (ALMOST_ONE, 3),
    ]:
        assert draw(quarters, torch.tensor([number], dtype=torch.float64)).tolist() == [token_id]


@many
@given(
    logits=TIED_LOGITS,
    number=st.sampled_from([0.0, 2.0**-53, 0.5, ALMOST_ONE]) | st.floats(0, ALMOST_ONE),
)
def test_a_dropped_token_is_never_drawn(logits: list[float], number: float) -> None:
    (token_id,) = draw(torch.tensor([logits]), torch.tensor([number], dtype=torch.float64)).tolist()
    assert logits[token_id] > -math.inf


def test_a_very_rare_token_is_not_rounded_away() -> None:
    logits = torch.tensor([[0.0, -18.0]])  # 1 + 1e-8 is 1 in float32
    assert draw(logits, torch.tensor([ALMOST_ONE], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("number", [0.0, ALMOST_ONE])
def test_a_dropped_token_is_never_drawn_from_a_large_vocabulary(number: float) -> None:
    logits = torch.randn(50, 30_000, generator=torch.Generator().manual_seed(0))
    logits[:, :100] = logits[:, -100:] = -math.inf
    token_ids = draw(logits, torch.full((50,), number, dtype=torch.float64))
    assert set(token_ids.tolist()) == {100 if number == 0 else 30_000 - 101}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    sequences = with_seeds(make_sequence(SamplingParams(temperature=temperature)), 200)
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits, sequences) == logits.argmax(-1).tolist()


def test_a_huge_temperature_makes_all_tokens_equally_likely() -> None:
    sequences = with_seeds(make_sequence(SamplingParams(temperature=1e6)))
    token_ids = sample(torch.tensor(LOGITS).expand(NUM_DRAWS, -1), sequences)
    assert p_value(token_ids, [0.1] * 10) > 1e-3


def test_very_large_logits_and_biases_can_be_sampled() -> None:
    logits = torch.tensor([[1e30, 1e30, -1e30, 0.0]]).expand(2000, -1)
    params = SamplingParams(
        repetition_penalty=1e-6, presence_penalty=1e6, frequency_penalty=-1e6, top_p=0.9
    )
    token_ids = sample(logits, with_seeds(make_sequence(params, prompt_ids=[0, 1]), 2000))
    assert p_value(token_ids, [0.5, 0.5, 0.0, 0.0]) > 1e-3
    biased = SamplingParams(logit_bias={2: 1e6, 3: -1e6})
    assert set(sample(torch.zeros(50, 4), with_seeds(make_sequence(biased), 50))) == {2}


# --- Each row of a batch is sampled as if it were alone ---

# Plain values, because building the checked classes within a strategy would use beartype's
# `random`.
ROW_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.0, 0.3, 1, 1.7]),
        "top_k": st.none() | st.integers(1, 300),
        "top_p": st.sampled_from([1.0, 1, 0.95, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0, 0.02, 0.5, 1]),
    },
    optional={
        "repetition_penalty": st.sampled_from([1, 1.3, 2]),
        "presence_penalty": st.sampled_from([0, 0.5, 1]),
        "frequency_penalty": st.sampled_from([0, -0.5, 1]),
        "logit_bias": st.dictionaries(
            st.integers(0, 299), st.sampled_from([-100, -1.0, 2]), max_size=3
        ),
        "stop_token_ids": st.lists(st.integers(0, 299), max_size=3),
        "min_tokens": st.just(3),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([0, 1, 5, 400]),
    },
)
ROWS = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**64 - 1), "choice": st.integers(0, 3)},
    optional={
        "prompt_ids": st.lists(st.integers(0, 299), min_size=1, max_size=5),
        "output_ids": st.lists(st.integers(0, 299), max_size=5),
        "end_ids": st.sets(st.integers(0, 299), max_size=2),
    },
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(ROW_PARAMS, ROWS), min_size=2, max_size=5), seed=st.integers(0, 10**6)
)
def test_each_row_of_a_batch_gets_exactly_the_token_that_it_gets_alone(
    rows: list[tuple[dict[str, Any], dict[str, Any]]], seed: int
) -> None:
    sequences = [make_sequence(SamplingParams(**params), **row) for params, row in rows]
    # Multiples of a half, as from a coarse type: ties at the edge of top-k and top-p are common.
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(len(sequences), 300, generator=generator)).round() / 2
    before = logits.clone()
    together = BatchSampler()(logits, sequences)
    alone = [
        BatchSampler()(logits[row : row + 1], [sequence])[0]
        for row, sequence in enumerate(sequences)
    ]
    assert together == alone
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_the_kept_tokens_do_not_depend_on_how_many_other_rows_keep() -> None:
    logits = torch.zeros(1, 300)
    for stage, mine, others in (
        (keep_top_k, torch.tensor([3]), [torch.tensor([each]) for each in (1, 5, 50, 290)]),
        (keep_top_p, torch.tensor([0.01]), [torch.tensor([each]) for each in (0.001, 0.5, 0.99)]),
    ):
        for other in others:
            kept = stage(logits.expand(2, -1), torch.cat([mine, other]))
            assert torch.equal(kept[:1], stage(logits, mine))
            assert kept_ids(kept) == [0, 1, 2]


def test_greedy_rows_take_the_likeliest_token_in_any_batch() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    greedy = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.9)
    others = [
        SamplingParams(temperature=1e6),
        SamplingParams(logit_bias=dict.fromkeys(range(39), -100)),
        SamplingParams(top_k=1, repetition_penalty=3, frequency_penalty=2),
    ]
    sequences = [
        make_sequence(params, prompt_ids=range(20), output_ids=range(10, 30))
        for other in others
        for params in (greedy, other)
    ]
    assert sample(logits, sequences)[::2] == logits.argmax(-1)[::2].tolist()


def test_greedy_rows_apply_penalties_biases_and_bans() -> None:
    logits = torch.tensor([LOGITS])
    for name in CLAIMS:
        sequence = copy.copy(claim(name))
        constrained = constrained_by_loops(LOGITS, sequence)
        sequence.params = SamplingParams(**CLAIMS[name] | {"temperature": 0})
        assert sample(logits, [sequence]) == likeliest_first(constrained)[:1]


def test_the_same_seed_draws_the_same_tokens_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(200, 1, 100, generator=generator)
    params = SamplingParams(temperature=1.2, top_p=0.95)

    def answer(num_others: int) -> list[int]:
        sequence = make_sequence(params, seed=11)
        for step_logits in logits:
            others = [
                make_sequence(SamplingParams(top_k=each + 1), seed=each)
                for each in range(num_others)
            ]
            at = num_others // 2
            batch = [*others[:at], sequence, *others[at:]]
            sequence.output_ids.append(sample(step_logits.expand(len(batch), -1), batch)[at])
        return sequence.output_ids

    assert answer(0) == answer(3) == answer(8)
    assert len(set(answer(0))) > 20


def test_answer_i_of_n_draws_the_numbers_of_seed_and_i_at_its_step() -> None:
    logits = torch.tensor(LOGITS).expand(12, -1)
    sequences = [
        make_sequence(SamplingParams(n=4), seed=99, choice=choice, output_ids=[1] * step)
        for choice in range(4)
        for step in (0, 1, 17)
    ]
    numbers = uniform_draws([99] * 12, [c for c in range(4) for _ in range(3)], [0, 1, 17] * 4)
    token_ids = sample(logits, sequences)
    assert token_ids == draw(logits, numbers).tolist()
    assert len(set(token_ids)) > 3


def test_stop_tokens_are_banned_until_min_tokens_are_reached() -> None:
    logits = torch.tensor([LOGITS])  # token 2 is the likeliest, then 7
    own = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    tokens = [sample(logits, [make_sequence(own, output_ids=[9] * step)]) for step in range(4)]
    assert tokens == [[7], [7], [2], [2]]
    models = SamplingParams(temperature=0, min_tokens=2)
    assert sample(logits, [make_sequence(models, end_ids=[2, 7])]) == [0]
    ignored = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert sample(logits, [make_sequence(ignored, end_ids=[2, 7])]) == [2]


def test_logits_of_inference_mode_can_be_sampled_from_outside_it() -> None:
    with torch.inference_mode():
        logits = torch.tensor(LOGITS).expand(len(CLAIMS), -1).clone()
    assert len(sample(logits, [claim(name) for name in CLAIMS])) == len(CLAIMS)


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf] * 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(row: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0], row])
    sequences = [make_sequence(SamplingParams(temperature=temperature))] * 2
    with pytest.raises(MinigenError, match="logits are not finite"):
        BatchSampler()(logits, sequences)
    assert sample(torch.tensor([[-math.inf, 1.0]] * 2), sequences) == [1, 1]


# --- Log probabilities ---


def only_token(logits: list[float], sequence: Sequence) -> SampledToken:
    (token,) = BatchSampler()(torch.tensor([logits]), [sequence])
    return token


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    expected = torch.tensor(LOGITS).double().log_softmax(-1)
    for name, settings_ in CLAIMS.items():
        sequence = copy.copy(claim(name))
        sequence.params = SamplingParams(**settings_, logprobs=3)
        token = only_token(LOGITS, sequence)
        assert token.logprobs is not None
        assert set(token.logprobs) == {token.token_id, *likeliest_first(LOGITS)[:3]}
        for token_id, logprob in token.logprobs.items():
            assert logprob.logprob == pytest.approx(expected[token_id].item(), abs=1e-6)
            assert logprob.rank == likeliest_first(LOGITS).index(token_id) + 1


def test_the_chosen_token_is_there_even_if_it_is_not_among_the_likeliest() -> None:
    params = SamplingParams(logit_bias={4: 100.0}, logprobs=2)
    token = only_token(LOGITS, make_sequence(params))
    assert token.token_id == 4
    assert token.logprobs is not None
    assert {each: logprob.rank for each, logprob in token.logprobs.items()} == {4: 10, 2: 1, 7: 2}


def test_without_top_logprobs_only_the_chosen_token_is_reported() -> None:
    token = only_token(LOGITS, make_sequence(SamplingParams(logprobs=0)))
    assert token.logprobs is not None
    assert list(token.logprobs) == [token.token_id]
    assert only_token(LOGITS, make_sequence(SamplingParams())).logprobs is None


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = [1.0, 3.0, 3.0, 2.0, 2.0, 0.0]
    for chosen in range(6):
        params = SamplingParams(logit_bias={chosen: 100.0}, logprobs=6)
        token = only_token(logits, make_sequence(params))
        assert token.token_id == chosen
        assert token.logprobs is not None
        ranks = [token.logprobs[token_id].rank for token_id in range(6)]
        assert ranks == [5, 1, 1, 3, 3, 6]


def test_more_top_logprobs_than_tokens_give_all_tokens() -> None:
    token = only_token(LOGITS, make_sequence(SamplingParams(logprobs=1000)))
    assert token.logprobs is not None
    assert sum(math.exp(each.logprob) for each in token.logprobs.values()) == pytest.approx(1)
    assert len(token.logprobs) == len(LOGITS)
