"""Which tokens top-k and top-p keep, without sorting the vocabulary.

Tokens are counted and weighed by the upper bits of their weights, which for positive numbers are in
the numbers' order; only those in the bin where the limit falls are sorted.
"""

import numpy as np
from numba import njit

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
