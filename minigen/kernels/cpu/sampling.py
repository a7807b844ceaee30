"""From rows of logits to tokens, one row at a time: the kernel twin of `minigen.sampling.sampler`.

A row is read once to find its maximum, and once more, only where a token is drawn, to write a
weight e^((logit - maximum) / temperature) per token. Top-k and top-p do not sort the vocabulary:
tokens are counted by the upper bits of their weights, which for positive numbers have the numbers'
order, and only those in the bin at the limit are sorted.

Bytes: 4 x vocab read for a greedy row; a drawn one writes and reads 4 x vocab more.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from minigen.kernels.cpu.elementwise import exponential
from minigen.kernels.cpu.simd import (
    all_lanes,
    fused,
    keep_above,
    larger,
    largest_lane,
    load,
    store,
    sum_of_lanes,
)
from minigen.kernels.cpu.thread_pool import begin, enter, finish, leave, take

BLOCK = 512  # tokens whose sum and largest weight are known, so that most need not be visited
BIN_SHIFT = 20  # of a weight's 32 bits, the upper 12 choose its bin: eight bins to a factor of two
NUM_BINS = (0x3F800000 >> BIN_SHIFT) + 1  # up to the weight 1.0, the peak's


@njit
def heavy_ids(weights, peaks, vocab, floor, ids):
    """Write the tokens that weigh at least `floor`, and something; returns how many."""
    num = 0
    for block in range(len(peaks)):
        if peaks[block] >= floor:
            for token in range(block * BLOCK, min(block * BLOCK + BLOCK, vocab)):
                ids[num] = token
                num += (weights[token] >= floor) & (weights[token] > 0)
    return num


@njit
def keep_heaviest(weights, ids, num, most, mass, counts, masses):
    """Keep the fewest heaviest of the ids that are `most` or weigh `mass`; returns how many.

    Of equally heavy ones those of lower ids; the ids stay in order.
    """
    counts[:] = 0
    masses[:] = 0.0
    bits = weights.view(np.int32)
    for index in range(num):
        counts[bits[ids[index]] >> BIN_SHIFT] += 1
        masses[bits[ids[index]] >> BIN_SHIFT] += weights[ids[index]]
    kept, held, limit = 0, 0.0, NUM_BINS - 1
    while limit > 0 and kept + counts[limit] < most and held + masses[limit] < mass:
        kept, held, limit = kept + counts[limit], held + masses[limit], limit - 1
    inside = np.empty(counts[limit], np.float32)
    found = 0
    for index in range(num):
        if bits[ids[index]] >> BIN_SHIFT == limit:
            inside[found] = weights[ids[index]]
            found += 1
    inside.sort()
    lightest, equals, position = np.float32(2.0), 0, found  # the least that is kept
    while position > 0 and kept < most and held < mass:
        position -= 1
        equals = equals + 1 if inside[position] == lightest else 1
        lightest = inside[position]
        kept, held = kept + 1, held + lightest
    num_kept = 0
    for index in range(num):
        weight = weights[ids[index]]
        if bits[ids[index]] >> BIN_SHIFT > limit or weight > lightest:
            ids[num_kept] = ids[index]
            num_kept += 1
        elif weight == lightest and equals > 0:
            ids[num_kept] = ids[index]
            num_kept, equals = num_kept + 1, equals - 1
    return num_kept


@njit
def sum_of(weights, ids, num):
    total = 0.0
    for index in range(num):
        total += weights[ids[index]]
    return total


LOWEST = np.float32(-3.0e38)


class SamplingBatch(NamedTuple):
    """How each row wants its token; what differs in length lies flat, `starts` saying where.

    `seen` are the tokens of prompt and output of rows with penalties, `num_prompt` of them the
    prompt's; `banned` must not be chosen.
    """

    temperature: np.ndarray  # float32; 0 takes the likeliest
    top_k: np.ndarray  # int64; the vocabulary's size for all
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
    """What workers write on their way, [workers, ...]."""

    logits: np.ndarray  # [vocab], changed as the row asks
    weights: np.ndarray  # [vocab]
    ids: np.ndarray  # [vocab], tokens that are still in the draw
    seen: np.ndarray  # [vocab], zeros between rows
    sums: np.ndarray  # [blocks], of weights
    peaks: np.ndarray  # [blocks], the heaviest weight of each
    counts: np.ndarray  # [bins]
    masses: np.ndarray  # [bins]


def make_room(num_workers: int, vocab: int) -> SamplingScratch:
    """SamplingScratch for so many workers; nothing is written before it is needed."""
    return SamplingScratch(
        np.empty((num_workers, vocab), np.float32),
        np.empty((num_workers, vocab), np.float32),
        np.empty((num_workers, vocab), np.int32),
        np.zeros((num_workers, vocab), np.int32),
        np.empty((num_workers, -(-vocab // BLOCK)), np.float64),
        np.empty((num_workers, -(-vocab // BLOCK)), np.float32),
        np.empty((num_workers, NUM_BINS), np.int64),
        np.empty((num_workers, NUM_BINS), np.float64),
    )


@njit
def _likeliest(numbers, at, vocab, may_be_banned):
    """The index of the largest number from `at` on, the lowest of equals; -1 if none is finite.

    Without bans a NaN or infinity anywhere is -1, too.
    """
    zero, check = all_lanes(np.float32(0.0)), all_lanes(np.float32(0.0))
    best, best_start = LOWEST, -1
    for start in range(at, at + vocab, BLOCK):
        top = all_lanes(LOWEST)
        for index in range(start, min(start + BLOCK, at + vocab), 16):
            lanes = load(numbers, index)
            top = larger(lanes, top)
            check = fused(lanes, zero, check)  # 0 x NaN and 0 x infinity are NaN
        largest = largest_lane(top)
        if largest > best:
            best, best_start = largest, start
    unsound = not may_be_banned and sum_of_lanes(check) != np.float32(0.0)
    if best_start < 0 or unsound or best == np.inf:
        return -1
    index = best_start
    while numbers[index] != best:
        index += 1
    return index - at


def likeliest_rows(crew, step, logits, vocab, out):
    """The likeliest token of each row of flat `logits`; -1 where they are not finite."""
    if enter(crew, step):
        begin(crew)
        row = take(crew, len(out))
        while row < len(out):
            out[row] = _likeliest(logits, row * vocab, vocab, False)
            row = take(crew, len(out))
        finish(crew, len(out))
        leave(crew)


@njit
def _change(row, asked, numbers, seen):
    """Add biases, take penalties off, and ban, in the order of `minigen.sampling.sampler`."""
    for entry in range(asked.biased_starts[row], asked.biased_starts[row + 1]):
        numbers[asked.biased[entry]] += asked.biases[entry]
    first, end = asked.seen_starts[row], asked.seen_starts[row + 1]
    repetition, presence = asked.penalties[row, 0], asked.penalties[row, 1]
    frequency = asked.penalties[row, 2]
    for entry in range(first, end):  # 1 for the prompt, 2 for each time in the output
        token = asked.seen[entry]
        seen[token] = seen[token] | 1 if entry - first < asked.num_prompt[row] else seen[token] + 2
    for entry in range(first, end):
        token = asked.seen[entry]
        if seen[token] > 0:
            times = np.float32(seen[token] >> 1)
            number = numbers[token]
            number = number / repetition if number > 0 else number * repetition
            number = number - frequency * times
            numbers[token] = number - presence * np.float32(times > 0)
            seen[token] = 0
    for entry in range(asked.banned_starts[row], asked.banned_starts[row + 1]):
        numbers[asked.banned[entry]] = -np.inf


@njit
def _weigh(numbers, at, vocab, peak, temperature, weights, sums, peaks):
    """Write e^((number - peak) / temperature), each block's sum and its largest.

    Returns the sum of all.
    """
    sharpness = all_lanes(np.float32(1.0) / temperature)
    lowest, top, total = all_lanes(np.float32(-87.0)), all_lanes(peak), 0.0
    for start in range(0, vocab, BLOCK):
        added, heaviest = all_lanes(np.float32(0.0)), all_lanes(np.float32(0.0))
        for index in range(start, min(start + BLOCK, vocab), 16):
            distance = (load(numbers, at + index) - top) * sharpness
            weight = keep_above(exponential(distance), distance, lowest)
            store(weights, index, weight)
            added, heaviest = added + weight, larger(weight, heaviest)
        sums[start // BLOCK] = sum_of_lanes(added)
        peaks[start // BLOCK] = largest_lane(heaviest)
        total += sums[start // BLOCK]
    return total


@njit
def _draw_from_all(weights, sums, vocab, wanted):
    """The token at which the cumulated weight passes `wanted`; never one of no weight."""
    block, last = 0, 0
    while block < (vocab - 1) // BLOCK and wanted >= sums[block]:
        wanted -= sums[block]
        block += 1
    for token in range(block * BLOCK, min(block * BLOCK + BLOCK, vocab)):
        if weights[token] > 0:
            if wanted < weights[token]:
                return token
            wanted -= weights[token]
            last = token
    return last  # what rounding left over


@njit
def _draw_from_some(row, asked, vocab, total, weights, peaks, ids, counts, masses):
    """Draw among what min-p, top-k and top-p leave."""
    top_k, top_p = asked.top_k[row], asked.top_p[row]
    floor = asked.min_p[row]
    if top_k <= len(peaks):  # so many tokens are as heavy as so many blocks' heaviest
        floor = max(floor, np.sort(peaks)[len(peaks) - top_k])
    elif top_k >= vocab and floor == 0:
        # All lighter tokens together weigh less than what top-p may leave out.
        floor = np.float32(total * (1.0 - top_p) / (2.0 * vocab))
    num = heavy_ids(weights, peaks, vocab, floor, ids)
    if asked.min_p[row] > 0 or top_k < vocab:
        if top_k < num:
            num = keep_heaviest(weights, ids, num, top_k, np.inf, counts, masses)
        total = sum_of(weights, ids, num)
    if top_p < 1:
        num = keep_heaviest(weights, ids, num, num, top_p * total, counts, masses)
        total = sum_of(weights, ids, num)
    wanted = asked.uniform[row] * total
    for index in range(num):
        wanted -= weights[ids[index]]
        if wanted < 0:
            return ids[index]
    return ids[num - 1]


@njit
def _choose(row, logits, vocab, asked, room, worker):
    numbers, at = logits, row * vocab
    if _likeliest(logits, at, vocab, False) < 0:
        return -1
    changed = (
        asked.seen_starts[row + 1] > asked.seen_starts[row]
        or asked.biased_starts[row + 1] > asked.biased_starts[row]
        or asked.banned_starts[row + 1] > asked.banned_starts[row]
    )
    if changed:
        numbers, at = room.logits[worker], 0
        for index in range(0, vocab, 16):
            store(numbers, index, load(logits, row * vocab + index))
        _change(row, asked, numbers, room.seen[worker])
    likeliest = _likeliest(numbers, at, vocab, True)
    if asked.temperature[row] == 0 or likeliest < 0:
        return likeliest
    weights, sums, peaks = room.weights[worker], room.sums[worker], room.peaks[worker]
    peak = numbers[at + likeliest]
    total = _weigh(numbers, at, vocab, peak, asked.temperature[row], weights, sums, peaks)
    if asked.top_k[row] >= vocab and asked.top_p[row] >= 1 and asked.min_p[row] == 0:
        return _draw_from_all(weights, sums, vocab, asked.uniform[row] * total)
    return _draw_from_some(
        row, asked, vocab, total, weights, peaks, room.ids[worker], room.counts[worker],
        room.masses[worker],
    )  # fmt: skip


def choose_rows(crew, step, logits, vocab, asked, room, out):
    """Each row's next token, as its settings ask; -1 where its logits are not finite.

    `logits` is flat, [rows x vocab]; vocab is a multiple of 16. No row depends on another.
    """
    if enter(crew, step):
        begin(crew)
        row = take(crew, len(out))
        while row < len(out):
            out[row] = _choose(row, logits, vocab, asked, room, crew.worker)
            row = take(crew, len(out))
        finish(crew, len(out))
        leave(crew)
