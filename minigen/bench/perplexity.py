"""Perplexity of a text, and how far a model's probabilities are from those of a reference.

Perplexity is the exponential of the mean negative log-likelihood (NLL) of the text's tokens. A text
is longer than a context, so it is cut into *windows* of `context` tokens, each of which starts
`stride` tokens after the one before. The model reads a whole window, but only its last `stride`
tokens are *scored*. So every token is scored once, and after the first window each scored token
follows at least `context - stride` others. Numbers of different windows, strides or BOS tokens
cannot be compared.

llama.cpp's `llama-perplexity` has windows of 512 tokens side by side, replaces the first token of
each by BOS if the model uses it, and scores the second half of each window: half of the text is
never scored. transformers' guide to perplexity has the windows of this module, except that its last
one is shorter.

With a reference, both models read the same windows, and each scored token has a pair of rows: the
Kullback-Leibler divergence sum(p_ref log(p_ref / p)) in nats, whether both rows have the same most
likely token, and the change p - p_ref of the right token's probability. These are what
`llama-perplexity --kl-divergence` prints.

Neighbouring tokens are not independent, so intervals come from a bootstrap over windows (Efron
1979; blocks of a series: Kuensch 1989): the windows are drawn again with replacement, and the 2.5th
and 97.5th percentiles of the statistic are the 95 % interval. Both models' values are drawn
together (paired), so what makes a window hard for both of them cancels in a ratio.
"""

import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray
from torch import Tensor

from minigen.errors import CapacityError, MinigenError, OptionError, RequestError
from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.transformer import Transformer
from minigen.sampling.params import SamplingParams
from minigen.sequence import ScheduledChunk, Sequence

ROWS = 128  # rows of logits at a time: 25 MB for a vocabulary of 49,152, and twice that in float64
PIECE = 32  # rows that are compared at a time
RESAMPLES = 2000
AT_ONCE = 50  # resamples, each with a count for every window
PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "largest": 100.0}

# Called with a window's token ids, the index of the first scored one, and a number of rows. Yields
# the logits of which each scored token is predicted, at most that many rows at a time; each piece
# is valid until the next one.
Rows = Callable[[SequenceOf[int], int, int], Iterator[Tensor]]


@dataclass(frozen=True)
class Window:
    """A piece of the text: the model reads the tokens `start` to `stop`, and `first` on count."""

    start: int
    first: int
    stop: int


def windows_of(num_tokens: int, context: int, stride: int, bos: bool) -> list[Window]:
    """Return the windows over a text of `num_tokens` tokens; the last one ends where the text does.

    With `bos`, one of a window's `context` tokens is BOS, so the text's first token is scored, too.
    Raises `OptionError` if the text is shorter than a window, or the stride does not fit.

    >>> for window in windows_of(10, context=6, stride=3, bos=False):
    ...     print(window)
    Window(start=0, first=1, stop=6)
    Window(start=3, first=6, stop=9)
    Window(start=4, first=9, stop=10)
    """
    size = context - bos
    most = size if bos else size - 1
    if most < 1 or not 1 <= stride <= most:
        raise OptionError(
            f"stride {stride} does not fit windows of {context} tokens: take one from 1 to "
            f"{max(most, 1)}, so that each scored token follows at least one other."
        )
    if num_tokens < size:
        raise OptionError(
            f"The text has {num_tokens} tokens, which is too short for one window of {context}: "
            "take a longer text, or a smaller context."
        )
    windows = [Window(0, 0 if bos else 1, size)]
    while windows[-1].stop < num_tokens:
        first = windows[-1].stop
        stop = min(first + stride, num_tokens)
        windows.append(Window(stop - size, first, stop))
    return windows


@dataclass(frozen=True)
class TokenScores:
    """What was found of each scored token; the last four are None without a reference.

    `window` is the token's window, `logprob` the log-probability of the right token in nats. `kl`
    is the divergence of the model's row from the reference's in nats, and `same_top` whether both
    rows have the same most likely token.
    """

    window: ndarray
    logprob: ndarray
    reference_logprob: ndarray | None = None
    kl: ndarray | None = None
    same_top: ndarray | None = None

    @property
    def change_of_p(self) -> ndarray:
        """How much more probability than the reference the model gives to each right token."""
        assert self.reference_logprob is not None, "there is no reference"
        return np.exp(self.logprob) - np.exp(self.reference_logprob)


def token_logprobs(
    logits: Float64[Tensor, "rows vocab"], targets: Int64[Tensor, " rows"]
) -> Float64[Tensor, " rows"]:
    """Return the log-probability of each row's target token."""
    right = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return right - logits.logsumexp(-1)


def kl_divergence(
    reference: Float64[Tensor, "rows vocab"], logits: Float64[Tensor, "rows vocab"]
) -> Float64[Tensor, " rows"]:
    """Return sum(p_ref log(p_ref / p)) of each row in nats; a token of p_ref = 0 adds nothing."""
    wanted, found = reference.log_softmax(-1), logits.log_softmax(-1)
    terms = wanted.exp() * (wanted - found)
    return torch.where(wanted == -math.inf, 0.0, terms).sum(-1)


def same_top(
    reference: Float64[Tensor, "rows vocab"], logits: Float64[Tensor, "rows vocab"]
) -> Bool[Tensor, " rows"]:
    """Return whether the most likely token is the same (the lower id, if several are)."""
    return reference.argmax(-1) == logits.argmax(-1)


def score(
    rows: Rows,
    reference: Rows | None,
    token_ids: SequenceOf[int],
    windows: SequenceOf[Window],
    bos_token_id: int | None,
    num_rows: int = ROWS,
    on_window: Callable[[float], object] = lambda mean_logprob: None,
) -> TokenScores:
    """Score every window, one after another; `on_window` is called with the mean logprob so far.

    `bos_token_id` is put before each window's tokens if it is not None. Raises `MinigenError` if a
    model's logits are not numbers.
    """
    found: list[list[Tensor]] = []
    places: list[int] = []
    total = 0.0
    for index, window in enumerate(windows):
        begins = [] if bos_token_id is None else [bos_token_id]
        ids = [*begins, *token_ids[window.start : window.stop]]
        first = window.first - window.start + len(begins)
        right = torch.tensor(ids[first:])
        own = rows(ids, first, num_rows)
        theirs = repeat(None) if reference is None else reference(ids, first, num_rows)
        for logits, others in zip(own, theirs, strict=reference is not None):
            assert others is None or len(others) == len(logits), "both take equal steps"
            for at in range(0, len(logits), PIECE):
                piece = slice(at, at + PIECE)
                compared = None if others is None else others[piece]
                num_compared = len(logits[piece])
                found.append(_score_rows(logits[piece], compared, right[:num_compared]))
                right = right[num_compared:]
                total += float(found[-1][0].sum())
        assert not len(right), "each scored token has a row"
        places += [index] * (len(ids) - first)
        on_window(total / len(places))
    columns = [torch.cat(each).numpy() for each in zip(*found, strict=True)]
    return TokenScores(np.array(places), *columns)


def _score_rows(logits: Tensor, reference: Tensor | None, targets: Tensor) -> list[Tensor]:
    """Return the columns of `TokenScores` that follow the window, for a few rows."""
    own = logits.to("cpu", torch.float64)
    scores = [token_logprobs(own, targets)]
    if reference is not None:
        others = reference.to("cpu", torch.float64)
        scores += [token_logprobs(others, targets), kl_divergence(others, own)]
        scores.append(same_top(others, own))
    roles = ("model", "reference", "model")  # by which of the two each column is spoiled first
    for role, column in zip(roles, scores, strict=False):
        if column.isnan().any():
            raise MinigenError(
                f"The {role}'s logits are not numbers: its weights are damaged, or too large for "
                "the dtype of the computation (try weights='float32')."
            )
    return scores


def transformer_rows(model: Transformer, windows: SequenceOf[int | None]) -> Rows:
    """Return the logits of a model in memory, which computes each window in one pass.

    There is no KV cache: this is the plain way, and what `engine_rows` is compared with.
    """

    @torch.inference_mode()
    def rows(token_ids: SequenceOf[int], first: int, num_rows: int) -> Iterator[Tensor]:
        ids = torch.tensor(token_ids)
        attend = attend_packed([len(ids)], windows)
        hidden = model(ids, torch.arange(len(ids)), attend)[first - 1 : -1]
        for piece in hidden.split(num_rows):
            yield model.logits(piece)

    return rows


class EngineRows:
    """The logits of a loaded model, by its own runner and KV cache; `seconds` add up its steps.

    A window is computed in steps, as a long prompt is. `num_tokens` counts what was computed, also
    the tokens that were only read. The engine must have no other work meanwhile.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self.seconds, self.num_tokens = 0.0, 0

    def __call__(self, token_ids: SequenceOf[int], first: int, num_rows: int) -> Iterator[Tensor]:
        """Yield the logits of the tokens `first` on, at most `num_rows` rows at a time.

        Raises `RequestError` if the engine is in use, `CapacityError` if its KV cache is too small.
        """
        engine, manager = self.llm.engine, self.llm.manager
        if not engine.claim():
            raise RequestError("The engine is in use: a text is scored while it has no other work.")
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        sequence = Sequence(-1, tuple(token_ids), params, 0, 1, frozenset())
        sequence.prompt_logprobs = [None] * first  # so the runner returns the rows after these
        try:
            if manager.allocate(sequence, 1) == 0:
                raise CapacityError(
                    f"The KV cache of {manager.num_tokens} tokens is too small for a window of "
                    f"{len(token_ids)}: raise num_blocks or kv_cache_memory."
                )
            yield from self._steps(sequence, first, num_rows)
        finally:
            sequence.finish_reason = "stop"
            manager.free(sequence)
            engine.release()

    def _steps(self, sequence: Sequence, first: int, num_rows: int) -> Iterator[Tensor]:
        most, last = self.llm.options.max_num_batched_tokens, len(sequence) - 1
        while sequence.num_computed < last:
            done = sequence.num_computed
            end = min(first - 1, done + most) if done < first - 1 else done + min(num_rows, most)
            count = min(end, last) - done
            reserved = self.llm.manager.allocate_slots(sequence, count)
            assert reserved, "there are blocks for the whole sequence"
            started = time.perf_counter()
            logits = self.llm.engine.runner.logits([ScheduledChunk(sequence, count)])
            self.seconds += time.perf_counter() - started
            self.num_tokens += count
            if len(logits):
                yield logits
            sequence.prompt_logprobs += [None] * len(logits)
            self.llm.manager.mark_computed(sequence, count)


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval, which is None if there is only one window."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.5g}"
        low, high = self.interval
        return f"{self.value:.5g} [{low:.5g}, {high:.5g}]"


@dataclass(frozen=True)
class Comparison:
    """How far a model is from its reference.

    `ratio` is the model's perplexity divided by the reference's. `kl` is the mean divergence in
    nats, `kl_percentiles` are those of single tokens. Changes are of the right token's probability.
    """

    reference_perplexity: Estimate
    ratio: Estimate
    kl: Estimate
    kl_percentiles: dict[str, float]
    same_top: Estimate
    mean_change_of_p: Estimate
    rms_change_of_p: Estimate


@dataclass(frozen=True)
class Result:
    """The perplexity of a text, and the comparison with a reference if there is one.

    `mean_nll` is its logarithm, in nats per token, and finite where the perplexity is not.
    """

    num_scored: int
    num_windows: int
    mean_nll: Estimate
    perplexity: Estimate
    comparison: Comparison | None


def summarize_scores(scores: TokenScores, resamples: int = RESAMPLES, seed: int = 0) -> Result:
    """Return the statistics of a text's scores, with intervals from a bootstrap over windows."""
    columns = {"nll": -scores.logprob}
    if scores.kl is not None:
        assert scores.reference_logprob is not None
        assert scores.same_top is not None
        columns["reference"] = -scores.reference_logprob
        columns["kl"], columns["same"] = scores.kl, scores.same_top.astype(float)
        columns["change"] = scores.change_of_p
        columns["square"] = scores.change_of_p**2
    means = _Means(scores.window, columns, resamples, seed)
    mean_nll = means.estimate(lambda mean: mean["nll"])
    perplexity = means.estimate(lambda mean: np.exp(mean["nll"]))
    comparison = None
    if scores.kl is not None:
        found = np.percentile(scores.kl, list(PERCENTILES.values())).tolist()
        comparison = Comparison(
            reference_perplexity=means.estimate(lambda mean: np.exp(mean["reference"])),
            ratio=means.estimate(lambda mean: np.exp(mean["nll"] - mean["reference"])),
            kl=means.estimate(lambda mean: mean["kl"]),
            kl_percentiles=dict(zip(PERCENTILES, found, strict=True)),
            same_top=means.estimate(lambda mean: mean["same"]),
            mean_change_of_p=means.estimate(lambda mean: mean["change"]),
            rms_change_of_p=means.estimate(lambda mean: np.sqrt(mean["square"])),
        )
    return Result(len(scores.window), means.num_windows, mean_nll, perplexity, comparison)


class _Means:
    """The means of several columns over all tokens, and over the tokens of windows drawn again."""

    def __init__(self, window: ndarray, columns: dict[str, ndarray], resamples: int, seed: int):
        self._own = {name: np.array(each.mean()) for name, each in columns.items()}
        _, place = np.unique(window, return_inverse=True)
        counts = np.bincount(place)
        self.num_windows = len(counts)
        rng, shares = np.random.default_rng(seed), np.full(len(counts), 1 / len(counts))
        sums = {name: np.bincount(place, each) for name, each in columns.items()}
        means: dict[str, list[ndarray]] = {name: [] for name in columns}
        for start in range(0, resamples, AT_ONCE):
            # How often each resample draws each window.
            size = min(AT_ONCE, resamples - start)
            drawn = rng.multinomial(len(counts), shares, size=size)
            num_tokens = drawn @ counts
            for name, each in sums.items():
                means[name].append(drawn @ each / num_tokens)
        self._drawn = {name: np.concatenate(each) for name, each in means.items()}

    def estimate(self, statistic: Callable[[dict[str, ndarray]], ndarray]) -> Estimate:
        """Return a function of the means, and where 95 % of its values in the resamples lie."""
        with np.errstate(over="ignore"):  # the perplexity of a broken model
            value, drawn = float(statistic(self._own)), statistic(self._drawn)
        if self.num_windows < 2:
            return Estimate(value, None)
        if np.isfinite(drawn).all():
            low, high = np.percentile(drawn, (2.5, 97.5))
        else:  # no number lies between two infinities
            low, high = np.percentile(drawn, (2.5, 97.5), method="nearest")
        return Estimate(value, (float(low), float(high)))
