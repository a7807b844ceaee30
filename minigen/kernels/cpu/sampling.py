"""Sampling kernels, from rows of logits to tokens: the compiled twin of `minigen.sampling.sampler`.

A row is read once to find its maximum. If a token is drawn at random, the row is read again, to
write a weight e^((logit - maximum) / temperature) per token (softmax without its division). Top-k
and top-p do not sort the vocabulary: tokens are counted in bins by the upper bits of their weights,
which have the same order as the weights because they are positive, and only the bin at the limit is
sorted.

Bytes: a greedy row reads 4 x vocab; a random draw writes and reads 4 x vocab more.
"""

import numpy as np

from minigen.kernels.cpu.arrays.sampling import BIN_SHIFT, BLOCK, NUM_BINS
from minigen.kernels.cpu.elementwise import exponential
from minigen.kernels.cpu.simd import (
    all_lanes,
    fused,
    keep_above,
    kernel,
    larger,
    largest_lane,
    load,
    store,
    sum_of_lanes,
)
from minigen.kernels.cpu.thread_pool import barrier, join_step, leave_step, next_phase, take


@kernel
def heavy_ids(weights, peaks, vocab, floor, ids):
    """Write the tokens whose weight is positive and at least `floor`; return their number."""
    num = 0
    for block in range(len(peaks)):
        if peaks[block] >= floor:
            for token in range(block * BLOCK, min(block * BLOCK + BLOCK, vocab)):
                ids[num] = token
                num += (weights[token] >= floor) & (weights[token] > 0)
    return num


@kernel
def _sift_down(numbers, root, end):
    """Let a number sink in a heap, whose parents are at least as large as their children."""
    number, child = numbers[root], 2 * root + 1
    while child < end:
        if child + 1 < end and numbers[child + 1] > numbers[child]:
            child += 1
        if numbers[child] <= number:
            break
        numbers[root] = numbers[child]
        root, child = child, 2 * child + 1
    numbers[root] = number


@kernel
def sort(numbers, num):
    """Sort the first `num` numbers in ascending order, in place (heapsort: Williams 1964).

    Numba's own sort allocates memory, which a kernel must not do.
    """
    for root in range(num // 2 - 1, -1, -1):
        _sift_down(numbers, root, num)
    for end in range(num - 1, 0, -1):
        numbers[0], numbers[end] = numbers[end], numbers[0]
        _sift_down(numbers, 0, end)


@kernel
def keep_heaviest(worker, ids, num, most, mass, scratch):
    """Keep the heaviest ids until they are `most` or weigh `mass` together; return their number.

    Among equal weights, lower ids are kept. The ids stay in ascending order.
    """
    weights, bits, inside = scratch.weights[worker], scratch.bits[worker], scratch.sorted[worker]
    counts, masses = scratch.counts[worker], scratch.masses[worker]
    counts[:] = 0
    masses[:] = 0.0
    for index in range(num):
        counts[bits[ids[index]] >> BIN_SHIFT] += 1
        masses[bits[ids[index]] >> BIN_SHIFT] += weights[ids[index]]
    kept, held, limit = 0, 0.0, NUM_BINS - 1
    while limit > 0 and kept + counts[limit] < most and held + masses[limit] < mass:
        kept, held, limit = kept + counts[limit], held + masses[limit], limit - 1
    found = 0
    for index in range(num):
        if bits[ids[index]] >> BIN_SHIFT == limit:
            inside[found] = weights[ids[index]]
            found += 1
    sort(inside, found)
    lightest, equals, position = np.float32(2.0), 0, found  # the smallest weight that is kept
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


@kernel
def sum_of(weights, ids, num):
    total = 0.0
    for index in range(num):
        total += weights[ids[index]]
    return total


LOWEST = np.float32(-3.0e38)


@kernel
def _likeliest(numbers, at, vocab, may_be_banned):
    """Return the index of the largest number from `at` on; the lowest of equals.

    It is -1 if no number is finite, or, without bans, if any number is NaN or infinite.
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


def likeliest_rows(pool, step, logits, vocab, out):
    """Write the most likely token of each row of flat `logits`; -1 where they are not finite."""
    if join_step(pool, step):
        next_phase(pool)
        row = take(pool, len(out))
        while row < len(out):
            out[row] = _likeliest(logits, row * vocab, vocab, False)
            row = take(pool, len(out))
        barrier(pool, len(out))
        leave_step(pool)


@kernel
def _adjust_logits(row, batch, numbers, seen):
    """Apply biases, penalties and bans, in the order of `minigen.sampling.sampler`."""
    for entry in range(batch.biased_starts[row], batch.biased_starts[row + 1]):
        numbers[batch.biased[entry]] += batch.biases[entry]
    first, end = batch.seen_starts[row], batch.seen_starts[row + 1]
    repetition, presence = batch.penalties[row, 0], batch.penalties[row, 1]
    frequency = batch.penalties[row, 2]
    for entry in range(first, end):  # bit 0: in the prompt; above it: times in the output
        token = batch.seen[entry]
        seen[token] = seen[token] | 1 if entry - first < batch.num_prompt[row] else seen[token] + 2
    for entry in range(first, end):
        token = batch.seen[entry]
        if seen[token] > 0:
            times = np.float32(seen[token] >> 1)
            number = numbers[token]
            number = number / repetition if number > 0 else number * repetition
            number = number - frequency * times
            numbers[token] = number - presence * np.float32(times > 0)
            seen[token] = 0
    for entry in range(batch.banned_starts[row], batch.banned_starts[row + 1]):
        numbers[batch.banned[entry]] = -np.inf


@kernel
def _exp_weights(numbers, at, vocab, peak, temperature, weights, sums, peaks):
    """Write weights e^((number - peak) / temperature), and each block's sum and maximum.

    Returns the sum of all weights.
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


@kernel
def _draw_from_all(weights, sums, vocab, wanted):
    """Return the token at which the cumulative weight passes `wanted`; its weight is never 0."""
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
    return last  # rounding left a remainder


@kernel
def _draw_from_some(row, batch, vocab, total, scratch, worker):
    """Draw among the tokens that min-p, top-k and top-p keep."""
    weights, peaks, ids = scratch.weights[worker], scratch.peaks[worker], scratch.ids[worker]
    top_k, top_p = batch.top_k[row], batch.top_p[row]
    floor = batch.min_p[row]
    if top_k <= len(peaks):  # at least top_k tokens weigh as much as the top_k-th largest peak
        by_weight = scratch.sorted[worker]
        for block in range(len(peaks)):
            by_weight[block] = peaks[block]
        sort(by_weight, len(peaks))
        floor = max(floor, by_weight[len(peaks) - top_k])
    elif top_k >= vocab and floor == 0:
        # All tokens below this floor together weigh less than what top-p removes.
        floor = np.float32(total * (1.0 - top_p) / (2.0 * vocab))
    num = heavy_ids(weights, peaks, vocab, floor, ids)
    if batch.min_p[row] > 0 or top_k < vocab:
        if top_k < num:
            num = keep_heaviest(worker, ids, num, top_k, np.inf, scratch)
        total = sum_of(weights, ids, num)
    if top_p < 1:
        num = keep_heaviest(worker, ids, num, num, top_p * total, scratch)
        total = sum_of(weights, ids, num)
    wanted = batch.uniform[row] * total
    for index in range(num):
        wanted -= weights[ids[index]]
        if wanted < 0:
            return ids[index]
    return ids[num - 1]


@kernel
def _choose(row, logits, vocab, batch, scratch, worker):
    numbers, at = logits, row * vocab
    if _likeliest(logits, at, vocab, False) < 0:
        return -1
    changed = (
        batch.seen_starts[row + 1] > batch.seen_starts[row]
        or batch.biased_starts[row + 1] > batch.biased_starts[row]
        or batch.banned_starts[row + 1] > batch.banned_starts[row]
    )
    if changed:
        numbers, at = scratch.logits[worker], 0
        for index in range(0, vocab, 16):
            store(numbers, index, load(logits, row * vocab + index))
        _adjust_logits(row, batch, numbers, scratch.seen[worker])
    likeliest = _likeliest(numbers, at, vocab, True)
    if batch.temperature[row] == 0 or likeliest < 0:
        return likeliest
    weights, sums, peaks = scratch.weights[worker], scratch.sums[worker], scratch.peaks[worker]
    peak = numbers[at + likeliest]
    total = _exp_weights(numbers, at, vocab, peak, batch.temperature[row], weights, sums, peaks)
    if batch.top_k[row] >= vocab and batch.top_p[row] >= 1 and batch.min_p[row] == 0:
        return _draw_from_all(weights, sums, vocab, batch.uniform[row] * total)
    return _draw_from_some(row, batch, vocab, total, scratch, worker)


def choose_rows(pool, step, logits, vocab, batch, scratch, out):
    """Write each row's next token according to its settings; -1 where its logits are not finite.

    `logits` is flat, [rows x vocab]; vocab is a multiple of 16. Rows are independent.
    """
    if join_step(pool, step):
        next_phase(pool)
        row = take(pool, len(out))
        while row < len(out):
            out[row] = _choose(row, logits, vocab, batch, scratch, pool.worker)
            row = take(pool, len(out))
        barrier(pool, len(out))
        leave_step(pool)
