"""From logits to the next token, for a whole batch at once, each row under its own settings.

The order is vLLM's: what must not be chosen yet, logit bias, penalties, temperature, min-p, top-k,
top-p, one draw. Sources: top-p, Holtzman et al. 2019; repetition penalty, Keskar et al. 2019;
min-p, Nguyen et al. 2024; the random numbers, SplitMix64 of Steele et al. 2014, used as a hash of
(seed, choice, step): a draw depends on nothing else in the batch, and can be made again.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from minigen.errors import MinigenError
from minigen.sampling.logprobs import chosen_logprobs
from minigen.sequence import SampledToken, Sequence

Logits = Float[Tensor, "rows vocab"]


def likeliest_tokens(logits: Logits) -> Int64[Tensor, " rows"]:
    """Each row's likeliest token, of equally likely ones the lowest; or its first NaN.

    NumPy's argmax looks at a vector of numbers at a time, torch's at one.
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
    """Make tokens that were there before less likely.

    Repetition divides positive logits (and multiplies negative ones) of tokens in prompt or
    output; presence is taken off once, frequency once per occurrence, for tokens in the output.
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(-1) * output_counts - presence.unsqueeze(-1) * in_output


def apply_temperature(logits: Logits, temperature: Float[Tensor, " rows"]) -> Logits:
    """Divide the logits' distances from the largest: below 1 sharpens, above 1 flattens."""
    above_zero = temperature.clamp(min=torch.finfo(torch.float32).tiny)  # 1e-300 would round to 0
    return (logits - logits.amax(dim=-1, keepdim=True)) / above_zero.unsqueeze(-1)


def keep_min_p(logits: Logits, min_p: Float[Tensor, " rows"]) -> Logits:
    """Drop tokens less likely than `min_p` times the likeliest one."""
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    return logits.masked_fill(logits < floor, -math.inf)


def keep_top_k(logits: Logits, top_k: Int64[Tensor, " rows"]) -> Logits:
    """Keep exactly each row's `top_k` likeliest tokens; of equally likely ones the lower ids."""
    likeliest = logits.topk(int(top_k.max()), dim=-1).values
    return _keep_likeliest(logits, likeliest, top_k)


def keep_top_p(logits: Logits, top_p: Float[Tensor, " rows"]) -> Logits:
    """Keep each row's fewest likeliest tokens that together reach a probability of `top_p`."""
    probabilities, top_p = logits.softmax(dim=-1), top_p.unsqueeze(-1)
    # Tokens below this floor come to less than 1 - top_p even all together: none of them can be
    # needed, and only the few above it have to be sorted.
    floor = (1 - top_p) / (2 * logits.shape[-1])
    num_candidates = int((probabilities >= floor).sum(dim=-1).max())
    likeliest, token_ids = logits.topk(num_candidates, dim=-1)
    reached = probabilities.gather(-1, token_ids).double().cumsum(dim=-1)
    num_kept = 1 + (reached < top_p).sum(dim=-1)
    return _keep_likeliest(logits, likeliest, num_kept.clamp(max=num_candidates))


def _keep_likeliest(
    logits: Logits, likeliest: Float[Tensor, "rows most"], num_kept: Int64[Tensor, " rows"]
) -> Logits:
    """Keep `num_kept` tokens of each row, whose largest logits in descending order are given.

    Not by topk's own token ids: which of several equal logits it returns depends on how many are
    asked for, and so on the other rows.
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
    """One number in [0, 1) for each (seed, choice, step), the same whenever it is asked for."""
    state = np.zeros(len(seeds), np.uint64)
    for part in (seeds, choices, steps):
        words = np.array([word % 2**64 for word in part], dtype=np.uint64)
        state = _splitmix(state ^ words)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(logits: Logits, uniform: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """The token at which the cumulated probability first passes `uniform`; never a dropped one."""
    cumulated = logits.softmax(dim=-1).double().cumsum(dim=-1)
    # Below the total even for the largest uniform number, 1 - 2^-53, however the product rounds.
    passed = uniform.unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, passed, right=True).squeeze(-1)


# A token for each row of logits, -1 where they are not finite.
Choose = Callable[[Tensor, SequenceOf[Sequence]], list[int]]


class BatchSampler:
    """Chooses every sequence's next token, and says how likely it was where that is asked for."""

    def __init__(self, choose: Choose | None = None):
        self.choose = choose_tokens if choose is None else choose

    def __call__(
        self, logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
    ) -> list[SampledToken]:
        """Raises `MinigenError` when a row of logits holds no finite largest number."""
        token_ids = self.choose(logits, sequences)
        if min(token_ids) < 0:
            raise MinigenError(
                "The model's logits are not finite: its weights are damaged, or too large for "
                "the type that they are computed in (try weights='float32')."
            )
        logprobs = chosen_logprobs(logits, token_ids, sequences)
        return [SampledToken(*each) for each in zip(token_ids, logprobs, strict=True)]


def choose_tokens(
    logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
) -> list[int]:
    """Each row's next token, or -1; the stages that no row asks for are left out."""
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
    """The likeliest tokens, but a drawn one for each sequence that wants that."""
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
    """The logits with bans, biases and penalties applied; the same tensor when there are none."""
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
    penalised = [row for row, sequence in enumerate(sequences) if sequence.params.has_penalties]
    if not (banned or biased or penalised):
        return logits
    logits = logits.clone()
    if biased:
        rows, ids, biases = zip(*biased, strict=True)
        logits[list(rows), list(ids)] += torch.tensor(biases, dtype=logits.dtype)
    if penalised:
        logits[penalised] = _penalised(logits[penalised], [sequences[row] for row in penalised])
    if banned:
        rows, ids = zip(*banned, strict=True)
        logits[list(rows), list(ids)] = -math.inf
    return logits


def _penalised(logits: Logits, sequences: SequenceOf[Sequence]) -> Logits:
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
