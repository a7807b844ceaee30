"""What the sampling kernels read and need: the settings of each row, and scratch memory."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import uniform_draws
from minigen.sequence import Sequence

BLOCK = 512  # tokens per block; its sum and largest weight let a search skip most blocks
BIN_SHIFT = 20  # the upper 12 bits of a weight are its bin: eight bins per factor of two
NUM_BINS = (0x3F800000 >> BIN_SHIFT) + 1  # up to the weight 1.0, that of the peak


class SamplingBatch(NamedTuple):
    """Sampling settings of each row; lists of different lengths are flat, with their offsets.

    `seen` holds the tokens of prompt and output of rows with penalties; the first `num_prompt` of a
    row are the prompt's. The tokens in `banned` must not be chosen.
    """

    temperature: np.ndarray  # float32; 0 is greedy
    top_k: np.ndarray  # int64; the vocabulary's size means no top-k
    top_p: np.ndarray  # float64
    min_p: np.ndarray  # float32
    uniform: np.ndarray  # float64, in [0, 1)
    penalties: np.ndarray  # float32 [rows, 3]: repetition, presence, frequency
    seen_starts: np.ndarray
    seen: np.ndarray
    num_prompt: np.ndarray
    biased_starts: np.ndarray
    biased: np.ndarray
    biases: np.ndarray  # float32
    banned_starts: np.ndarray
    banned: np.ndarray


class SamplingScratch(NamedTuple):
    """Scratch memory of the sampling kernels, [workers, ...]."""

    logits: np.ndarray  # [vocab], after penalties, biases and bans
    weights: np.ndarray  # [vocab]
    bits: np.ndarray  # [vocab], the same memory as int32
    sorted: np.ndarray  # [vocab], weights that are being sorted
    ids: np.ndarray  # [vocab], candidates that remain
    seen: np.ndarray  # [vocab], zeros between rows
    sums: np.ndarray  # [blocks], of weights
    peaks: np.ndarray  # [blocks], the heaviest weight of each
    counts: np.ndarray  # [bins]
    masses: np.ndarray  # [bins]


def make_sampling_scratch(num_workers: int, vocab: int) -> SamplingScratch:
    """Allocate scratch memory for `num_workers` workers; the system maps pages when first used."""
    weights = np.empty((num_workers, vocab), np.float32)
    return SamplingScratch(
        np.empty((num_workers, vocab), np.float32),
        weights,
        weights.view(np.int32),
        np.empty((num_workers, vocab), np.float32),
        np.empty((num_workers, vocab), np.int32),
        np.zeros((num_workers, vocab), np.int32),
        np.empty((num_workers, -(-vocab // BLOCK)), np.float64),
        np.empty((num_workers, -(-vocab // BLOCK)), np.float32),
        np.empty((num_workers, NUM_BINS), np.int64),
        np.empty((num_workers, NUM_BINS), np.float64),
    )


def sampling_batch(sequences: SequenceOf[Sequence], vocab: int) -> SamplingBatch:
    """Return the sampling settings of the sequences as arrays, one row per sequence."""
    params = [sequence.params for sequence in sequences]
    seen = [each.token_ids if each.params.has_penalties else [] for each in sequences]
    banned = [sequence.banned_ids for sequence in sequences]
    biased = [each.logit_bias.keys() for each in params]
    return SamplingBatch(
        temperature=np.array([_temperature(each) for each in params], np.float32),
        top_k=np.array([min(each.top_k or vocab, vocab) for each in params]),
        top_p=np.array([each.top_p for each in params], np.float64),
        min_p=np.array([each.min_p for each in params], np.float32),
        uniform=uniform_draws(
            [sequence.seed for sequence in sequences],
            [sequence.choice for sequence in sequences],
            [len(sequence.output_ids) for sequence in sequences],
        ).numpy(),
        penalties=np.array(
            [
                (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
                for each in params
            ],
            np.float32,
        ),
        seen_starts=_starts(seen),
        seen=_flat(seen),
        num_prompt=np.array([len(each.prompt_ids) for each in sequences]),
        biased_starts=_starts(biased),
        biased=_flat(biased),
        biases=np.fromiter(
            chain.from_iterable(each.logit_bias.values() for each in params), np.float32
        ),
        banned_starts=_starts(banned),
        banned=_flat(banned),
    )


def _temperature(params: SamplingParams) -> float:
    """Return 0 for greedy only; a temperature above 0 stays above 0 in float32."""
    return 0.0 if params.greedy else max(params.temperature, float(np.finfo(np.float32).tiny))


def _starts(lists: Iterable[Any]) -> np.ndarray:
    """Return the offset of each list in their concatenation, and the total length."""
    return np.cumsum([0, *(len(each) for each in lists)])


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), np.int64)
