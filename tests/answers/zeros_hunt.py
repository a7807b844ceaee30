"""Tests and parts that learners might hand in for chapter 35's hunt."""

import random
from typing import Any

import numpy as np


def word_of(numbers: list[int]) -> int:
    word = sum(each << (4 * place) for place, each in enumerate(numbers))
    return word - 2**32 if word >= 2**31 else word


# Tests


def every_number_at_every_place(read_zeros: Any) -> None:
    for place in range(16):
        for zero in range(16):
            zeros = [(3 * each + 1) % 16 for each in range(16)]
            zeros[place] = zero
            words = [word_of(zeros[:8]), word_of(zeros[8:])]
            assert read_zeros(words, 2) == zeros
            less = [(each - 1) % 16 for each in zeros]
            assert read_zeros([word_of(less[:8]), word_of(less[8:])], 1) == zeros


def random_zeros(read_zeros: Any) -> None:
    drawn = random.Random(0)
    for _ in range(100):
        zeros = [drawn.randrange(16) for _ in range(24)]
        for version in (1, 2):
            stored = [(each - (version == 1)) % 16 for each in zeros]
            words = [word_of(stored[start : start + 8]) for start in (0, 8, 16)]
            assert list(read_zeros(words, version)) == zeros


def only_version_2(read_zeros: Any) -> None:
    assert read_zeros([word_of([*range(8)])], 2) == [*range(8)]


def only_the_first(read_zeros: Any) -> None:
    for zero in range(1, 16):
        assert read_zeros([word_of([zero - 1, *range(7)])], 1)[0] == zero


def all_alike(read_zeros: Any) -> None:
    assert read_zeros([0x77777777], 1) == [8] * 8
    assert read_zeros([0x77777777], 2) == [7] * 8


def never_zero(read_zeros: Any) -> None:
    zeros = [1, 9, 4, 13, 6, 2, 15, 7]
    less = word_of([each - 1 for each in zeros])
    assert read_zeros([less, less], 1) == [*zeros, *zeros]
    assert read_zeros([word_of(zeros)], 2) == zeros


def one_word_only(read_zeros: Any) -> None:
    zeros = [0, 9, 4, 13, 6, 2, 15, 7]
    assert read_zeros([word_of([(each - 1) % 16 for each in zeros])], 1) == zeros
    assert read_zeros([word_of(zeros)], 2) == zeros


def wants_16(read_zeros: Any) -> None:
    assert read_zeros([word_of([15, 1, 2, 3, 4, 5, 6, 7])], 1) == [16, 2, 3, 4, 5, 6, 7, 8]


# Parts


def by_numpy(words: list[int], version: int) -> list[int]:
    bits = np.array(words, np.int64)[:, None] >> np.arange(0, 32, 4)
    return ((bits + (2 - version)) & 15).ravel().tolist()


def by_table(words: list[int], version: int) -> list[int]:
    table = [*range(1, 16), 0] if version == 1 else [*range(16)]
    zeros = []
    for word in words:
        left = word % 2**32
        for _ in range(8):
            left, stored = divmod(left, 16)
            zeros.append(table[stored])
    return zeros


def ones_with_carry(words: list[int], version: int) -> list[int]:
    """Wrong: adds one to each number at once, so a 15 carries into the next one."""
    if version == 1:
        words = [word + 0x11111111 for word in words]
    return [(word >> (4 * place)) & 15 for word in words for place in range(8)]


def without_sign(words: list[int], version: int) -> list[int]:
    """Wrong: takes the magnitude of a negative word."""
    return by_table([abs(word) for word in words], version)


def adds_one_to_all(words: list[int], version: int) -> list[int]:
    """Wrong: version 2 is shifted, too."""
    return by_table(words, 1)


def not_wrapped(words: list[int], version: int) -> list[int]:
    """Wrong: 16 instead of 0."""
    return [each + (version == 1) for each in by_table(words, 2)]
