"""Tests and parts that learners might hand in for chapter 35's hunt for an order of nibbles."""

import random
from typing import Any

import numpy as np

from minigen_course.ch35_quantization.hunts import nibble_order as hunt

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(rows: list[list[int]]) -> list[list[int]]:
    """Return rows of numbers as AWQ packs them."""
    found = []
    for row in rows:
        words = []
        for start in range(0, len(row), 8):
            places = [row[start + column] for column in ORDER]
            word = sum(each << (4 * place) for place, each in enumerate(places))
            words.append(word - 2**32 if word >= 2**31 else word)
        found.append(words)
    return found


def compare(
    part: Any, codes: list[list[int]], zeros: list[list[int]], scales: Any, size: int
) -> None:
    found = part(packed(codes), packed(zeros), scales, size)
    assert len(found) == len(codes)
    for row, values in enumerate(found):
        group = row // size
        wanted = [
            (code - zero) * scale
            for code, zero, scale in zip(codes[row], zeros[group], scales[group], strict=True)
        ]
        assert [*values] == wanted


def drawn(
    seed: int, num_rows: int, num_columns: int, size: int
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    by = random.Random(seed)
    codes = [[by.randrange(16) for _ in range(num_columns)] for _ in range(num_rows)]
    num_groups = num_rows // size
    zeros = [[by.randrange(16) for _ in range(num_columns)] for _ in range(num_groups)]
    scales = [[by.randint(1, 50) / 32 for _ in range(num_columns)] for _ in range(num_groups)]
    return codes, zeros, scales


# Tests


def random_matrices(read_awq: Any) -> None:
    for seed in range(5):
        compare(read_awq, *drawn(seed, 9, 24, 3), 3)


def one_zero_at_a_time(read_awq: Any) -> None:
    codes = [[(row + column) % 16 for column in range(16)] for row in range(6)]
    scales = [[(1 + column + 20 * group) / 8 for column in range(16)] for group in range(3)]
    for column in range(16):
        for group in range(3):
            zeros = [[0] * 16 for _ in range(3)]
            zeros[group][column] = 9
            compare(read_awq, codes, zeros, scales, 2)


def zeros_all_8(read_awq: Any) -> None:
    codes, _, scales = drawn(0, 6, 16, 2)
    compare(read_awq, codes, [[8] * 16] * 3, scales, 2)


def codes_all_alike(read_awq: Any) -> None:
    _, zeros, scales = drawn(0, 6, 16, 2)
    compare(read_awq, [[5] * 16] * 6, zeros, scales, 2)


def scales_all_alike(read_awq: Any) -> None:
    codes, zeros, _ = drawn(0, 6, 16, 2)
    compare(read_awq, codes, zeros, [[0.5] * 16] * 3, 2)


def one_group(read_awq: Any) -> None:
    compare(read_awq, *drawn(0, 6, 16, 6), 6)


def groups_of_one_row(read_awq: Any) -> None:
    compare(read_awq, *drawn(0, 6, 16, 1), 1)


def one_word(read_awq: Any) -> None:
    compare(read_awq, *drawn(0, 6, 8, 2), 2)


def ends_of_a_word(read_awq: Any) -> None:
    codes, zeros, scales = drawn(0, 4, 8, 2)
    for row, values in enumerate(read_awq(packed(codes), packed(zeros), scales, 2)):
        for column in (0, 7):
            difference = codes[row][column] - zeros[row // 2][column]
            assert values[column] == difference * scales[row // 2][column]


def wants_plain_order(read_awq: Any) -> None:
    found = read_awq([[0x76543210]], [[0]], [[1.0] * 8], 1)
    assert found == [[0, 1, 2, 3, 4, 5, 6, 7]]


# Parts


def by_numpy(qweight: Any, qzeros: Any, scales: Any, size: int) -> list[list[float]]:
    def columns(words: Any) -> Any:
        bits = np.array(words, np.int64)[:, :, None] >> np.arange(0, 32, 4)
        numbers = (bits & 15)[:, :, np.argsort(ORDER)]
        return numbers.reshape(len(words), -1)

    zeros, factors = (np.repeat(each, size, 0) for each in (columns(qzeros), np.array(scales)))
    return ((columns(qweight) - zeros) * factors).tolist()


def by_place(qweight: Any, qzeros: Any, scales: Any, size: int) -> list[list[float]]:
    weight = [[0.0] * len(scales[0]) for _ in qweight]
    for row, words in enumerate(qweight):
        for number, word in enumerate(words):
            other = qzeros[row // size][number]
            for column in ORDER:
                code, zero = word & 15, other & 15
                where = 8 * number + column
                weight[row][where] = (code - zero) * scales[row // size][where]
                word, other = word >> 4, other >> 4
    return weight


def plain_order(qweight: Any, qzeros: Any, scales: Any, size: int) -> Any:
    """Wrong: makes codes and zero points agree, in GPTQ's order."""
    return hunt._with(hunt.PLAIN, hunt.PLAIN)(qweight, qzeros, scales, size)


def order_the_wrong_way(qweight: Any, qzeros: Any, scales: Any, size: int) -> Any:
    """Wrong: takes the column of each place for the place of each column."""
    return hunt._with(ORDER, ORDER)(qweight, qzeros, scales, size)


def zeros_of_8(qweight: Any, qzeros: Any, scales: Any, size: int) -> Any:
    """Wrong: ignores the zero points, since 8 worked."""
    return by_numpy(qweight, packed([[8] * len(scales[0])] * len(qzeros)), scales, size)


def reordered_scales(qweight: Any, qzeros: Any, scales: Any, size: int) -> Any:
    """Wrong: the scales are in plain order already."""
    return hunt._with(factors=ORDER)(qweight, qzeros, scales, size)


def whole_bytes(qweight: Any, qzeros: Any, scales: Any, size: int) -> Any:
    """Wrong: a zero point keeps the bits of its neighbour."""
    weight = by_place(qweight, [[0] * len(words) for words in qzeros], scales, size)
    for row, values in enumerate(weight):
        for column in range(len(values)):
            group, bits = row // size, 4 * ORDER.index(column % 8)
            zero = (qzeros[group][column // 8] >> bits) & 255
            values[column] -= zero * scales[group][column]
    return weight
