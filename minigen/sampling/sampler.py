"""Sampling for a whole batch at once: from logits to tokens, each row with its own parameters.

The order is logit bias, penalties, banned tokens, temperature, min-p, top-k, top-p, one draw. vLLM
bans first, with the same result, because minus infinity stays minus infinity. Sources: top-p,
Holtzman et al. 2019; repetition penalty, Keskar et al. 2019, who only divide, and over generated
tokens, with the case for negative logits from the transformers library (its pull request 2303);
min-p, Nguyen et al. 2024; the random numbers, SplitMix64 of Steele et al. 2014, used as a hash of
(seed, choice, step), so that a draw does not depend on the rest of the batch and can be reproduced.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt64
from torch import Tensor

from minigen.errors import MinigenError
from minigen.sampling.logprobs import chosen_logprobs
from minigen.sequence import SampledToken, Sequence

Logits = Float[Tensor, "rows vocab"]


def likeliest_tokens(logits: Logits) -> Int64[Tensor, " rows"]:
    """Return each row's most likely token, the lowest id among equals, or the first NaN.

    It uses NumPy's argmax, because that compares a SIMD vector at a time, and torch's one number.
    """
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def apply_penalties(
    logits: Logits,
    in_prompt: Bool[Tensor, "rows vocab"],
    output_counts: Float[Tensor, "rows vocab"],
    repetition: Float[Tensor, " rows"],
    presence: Float[Tensor, " rows"],
    frequency: Float[Tensor, " rows"],
) -> Logits:
    """Make tokens less likely that occurred before.

    `repetition` divides the positive logits, and multiplies the negative ones, of tokens in the
    prompt or the output. For tokens in the output, `presence` is subtracted once, and `frequency`
    once per occurrence.
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(-1) * output_counts - presence.unsqueeze(-1) * in_output


def apply_temperature(logits: Logits, temperature: Float[Tensor, " rows"]) -> Logits:
    """Subtract each row's largest logit, then divide: below 1 sharpens, above 1 flattens."""
    above_zero = temperature.clamp(min=torch.finfo(torch.float32).tiny)  # 1e-300 would round to 0
    return (logits - logits.amax(dim=-1, keepdim=True)) / above_zero.unsqueeze(-1)


def keep_min_p(logits: Logits, min_p: Float[Tensor, " rows"]) -> Logits:
    """Drop tokens less likely than `min_p` times the most likely one, by setting them to -inf."""
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    return logits.masked_fill(logits < floor, -math.inf)


def keep_top_k(logits: Logits, top_k: Int64[Tensor, " rows"]) -> Logits:
    """Keep exactly the `top_k` most likely tokens of each row; among equals, the lower ids."""
    likeliest = logits.topk(int(top_k.max()), dim=-1).values
    return _keep_likeliest(logits, likeliest, top_k)


def keep_top_p(logits: Logits, top_p: Float[Tensor, " rows"]) -> Logits:
    """Keep the fewest most likely tokens of each row whose probabilities reach `top_p`."""
    probabilities, top_p = logits.softmax(dim=-1), top_p.unsqueeze(-1)
    # Even all tokens below this floor together have a probability of less than 1 - top_p. So none
    # of them is needed, and only the few tokens above it must be sorted.
    floor = (1 - top_p) / (2 * logits.shape[-1])
    num_candidates = int((probabilities >= floor).sum(dim=-1).max())
    likeliest, token_ids = logits.topk(num_candidates, dim=-1)
    reached = probabilities.gather(-1, token_ids).double().cumsum(dim=-1)
    num_kept = 1 + (reached < top_p).sum(dim=-1)
    return _keep_likeliest(logits, likeliest, num_kept.clamp(max=num_candidates))


def _keep_likeliest(
    logits: Logits, likeliest: Float[Tensor, "rows most"], num_kept: Int64[Tensor, " rows"]
) -> Logits:
    """Keep `num_kept` tokens of each row; `likeliest` has its largest logits, in descending order.

    It does not use the token ids from topk, because which of several equal logits topk returns
    depends on its k, and so on the other rows.
    """
    last = likeliest.gather(-1, num_kept.unsqueeze(-1) - 1)
    kept = logits >= last
    surplus = (kept.sum(dim=-1) - num_kept).tolist()
    for row in (row for row, count in enumerate(surplus) if count > 0):
        equal = (logits[row] == last[row]).nonzero().squeeze(-1)
        kept[row, equal[-surplus[row] :]] = False
    return logits.masked_fill(~kept, -math.inf)


def uniform_draws(
    seeds: SequenceOf[int], choices: SequenceOf[int], steps: SequenceOf[int]
) -> Float[Tensor, " rows"]:
    """Return one number in [0, 1) per (seed, choice, step): a pure function of these three."""
    state = np.zeros(len(seeds), np.uint64)
    for part in (seeds, choices, steps):
        words = np.array([word % 2**64 for word in part], dtype=np.uint64)
        state = _splitmix(state ^ words)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(state: UInt64[np.ndarray, " rows"]) -> UInt64[np.ndarray, " rows"]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(logits: Logits, uniform: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """Return the token at which the cumulative probability exceeds `uniform`: no dropped one."""
    cumulated = logits.softmax(dim=-1).double().cumsum(dim=-1)
    # Less than the total even for the largest uniform number, 1 - 2^-53, despite rounding.
    passed = uniform.unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, passed, right=True).squeeze(-1)


# Returns one token per row of logits, or -1 if the row is not finite.
Choose = Callable[[Tensor, SequenceOf[Sequence]], list[int]]


class BatchSampler:
    """Chooses every sequence's next token, and adds its logprobs if the request asks for them."""

    def __init__(self, choose: Choose | None = None):
        self.choose = choose_tokens if choose is None else choose

    def __call__(
        self, logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
    ) -> list[SampledToken]:
        """Return one token per row; raise `MinigenError` if a row's largest logit is not finite."""
        token_ids = self.choose(logits, sequences)
        if min(token_ids) < 0:
            raise MinigenError(
                "The model's logits are not finite: its weights are damaged, or too large for "
                "the dtype of the computation (try weights='float32')."
            )
        logprobs = chosen_logprobs(logits, token_ids, sequences)
        return [SampledToken(*each) for each in zip(token_ids, logprobs, strict=True)]


def choose_tokens(
    logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
) -> list[int]:
    """Return each row's next token, or -1; stages that no row needs are skipped."""
    likeliest = likeliest_tokens(logits)
    finite = logits.gather(-1, likeliest.unsqueeze(-1)).squeeze(-1).isfinite()
    constrained = _constrained(logits, sequences)
    if constrained is not logits:
        likeliest = likeliest_tokens(constrained)
    token_ids = likeliest if not finite.all() else _with_draws(likeliest, constrained, sequences)
    found: list[int] = torch.where(finite, token_ids, -1).tolist()
    return found


def _with_draws(
    token_ids: Int64[Tensor, " rows"], logits: Logits, sequences: SequenceOf[Sequence]
) -> Int64[Tensor, " rows"]:
    """Replace the most likely token by a random draw in the rows that are not greedy."""
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        token_ids[drawn] = _draw_rows(logits[drawn], [sequences[row] for row in drawn])
    return token_ids


def _draw_rows(logits: Logits, sequences: SequenceOf[Sequence]) -> Int64[Tensor, " rows"]:
    params = [sequence.params for sequence in sequences]
    vocab = logits.shape[-1]
    logits = apply_temperature(logits, _column(each.temperature for each in params))
    if any(each.min_p > 0 for each in params):
        logits = keep_min_p(logits, _column(each.min_p for each in params))
    top_ks = [vocab if each.top_k is None else each.top_k for each in params]
    limited = [row for row, top_k in enumerate(top_ks) if top_k < vocab]
    if limited:
        limits = torch.tensor([top_ks[row] for row in limited])
        logits[limited] = keep_top_k(logits[limited], limits)
    cut = [row for row, each in enumerate(params) if each.top_p < 1]
    if cut:
        masses = _column((params[row].top_p for row in cut), torch.float64)
        logits[cut] = keep_top_p(logits[cut], masses)
    uniform = uniform_draws(
        [sequence.seed for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [len(sequence.output_ids) for sequence in sequences],
    )
    return draw(logits, uniform)


def _column(numbers: Iterable[float], dtype: torch.dtype = torch.float32) -> Float[Tensor, " rows"]:
    return torch.tensor(list(numbers), dtype=dtype)


def _constrained(logits: Logits, sequences: SequenceOf[Sequence]) -> Logits:
    """Return the logits after biases, penalties and bans; the same tensor if there are none."""
    banned = [
        (row, token_id)
        for row, sequence in enumerate(sequences)
        for token_id in sequence.banned_ids
    ]
    biased = [
        (row, token_id, bias)
        for row, sequence in enumerate(sequences)
        for token_id, bias in sequence.params.logit_bias.items()
    ]
    penalized = [row for row, sequence in enumerate(sequences) if sequence.params.has_penalties]
    if not (banned or biased or penalized):
        return logits
    logits = logits.clone()
    if biased:
        rows, ids, biases = zip(*biased, strict=True)
        logits[list(rows), list(ids)] += torch.tensor(biases, dtype=logits.dtype)
    if penalized:
        logits[penalized] = _penalized(logits[penalized], [sequences[row] for row in penalized])
    if banned:
        rows, ids = zip(*banned, strict=True)
        logits[list(rows), list(ids)] = -math.inf
    return logits


def _penalized(logits: Logits, sequences: SequenceOf[Sequence]) -> Logits:
    in_prompt = torch.zeros(logits.shape, dtype=torch.bool)
    output_counts = torch.zeros(logits.shape)
    for row, sequence in enumerate(sequences):
        in_prompt[row, list(sequence.prompt_ids)] = True
        output_ids = torch.tensor(sequence.output_ids, dtype=torch.int64)
        output_counts[row].index_add_(0, output_ids, torch.ones(len(output_ids)))
    params = [sequence.params for sequence in sequences]
    return apply_penalties(
        logits,
        in_prompt,
        output_counts,
        _column(each.repetition_penalty for each in params),
        _column(each.presence_penalty for each in params),
        _column(each.frequency_penalty for each in params),
    )
