"""Bug hunt of chapter 35: a checkpoint that works as long as its zero points are all alike."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from minigen_course.grading.exercise import expect_equal
from minigen_course.grading.hunt import Hunt

Matrix = list[list[float]]
Words = list[list[int]]
ReadAWQ = Callable[[Words, Words, Matrix, int], Matrix]


def read_awq(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    """Return the weight that AWQ stores with 4 bits: rows are inputs, columns outputs.

    A word is an int32, maybe negative, and has eight numbers of 4 bits of adjacent columns. From
    the lowest bits upwards they belong to columns 0, 2, 4, 6, 1, 3, 5 and 7, in `qweight` and
    in `qzeros`. `qzeros` and `scales` have one row for every `size` rows of `qweight`. `scales` has
    one value per column, in plain order. A value is (code - zero) * scale.
    """
    weight = []
    for row, words in enumerate(qweight):
        group, values = row // size, []
        for column, scale in enumerate(scales[group]):
            place = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
            code = (words[column // 8] >> (4 * place)) & 15
            zero = (qzeros[group][column // 8] >> (4 * (column % 8))) & 15
            values.append((code - zero) * scale)
        weight.append(values)
    return weight


def test_awq(read_awq: ReadAWQ) -> None:
    """Assert what every correct `read_awq` does, and the one above does not."""

    def words_of(numbers: list[int]) -> list[int]:
        words = []
        for start in range(0, len(numbers), 8):
            places = [numbers[start + each] for each in (0, 2, 4, 6, 1, 3, 5, 7)]
            word = sum(each << (4 * place) for place, each in enumerate(places))
            words.append(word - 2**32 if word >= 2**31 else word)
        return words

    codes = [[(3 * row + 5 * column) % 16 for column in range(16)] for row in range(6)]
    zeros = [[(7 * group + 3 * column + 1) % 16 for column in range(16)] for group in range(3)]
    scales = [[(1 + group + column) / 64 for column in range(16)] for group in range(3)]
    found = read_awq([*map(words_of, codes)], [*map(words_of, zeros)], scales, 2)
    for row in range(6):
        for column in range(16):
            difference = codes[row][column] - zeros[row // 2][column]
            assert found[row][column] == difference * scales[row // 2][column]


PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)
FILES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each place
UNDONE = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each column


def _mended(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    weight = []
    for row, words in enumerate(qweight):
        group, values = row // size, []
        for column, scale in enumerate(scales[group]):
            bits = 4 * (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
            code = (words[column // 8] >> bits) & 15
            zero = (qzeros[group][column // 8] >> bits) & 15
            values.append((code - zero) * scale)
        weight.append(values)
    return weight


def _numbers(words: Sequence[int], order: tuple[int, ...]) -> list[int]:
    """Return the numbers of a row; `order` says which place of a word belongs to each column."""
    return [(word >> (4 * place)) & 15 for word in words for place in order]


def _by_digits(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    """Read hexadecimal digits, which begin with the highest bits, and sort them by column."""

    def columns(words: list[int]) -> list[int]:
        found: list[int] = []
        for word in words:
            digits = f"{word % 2**32:08x}"
            named = sorted(zip((7, 5, 3, 1, 6, 4, 2, 0), digits, strict=True))
            found += [int(digit, 16) for _, digit in named]
        return found

    weight = []
    for row, words in enumerate(qweight):
        read = columns(words), columns(qzeros[row // size]), scales[row // size]
        weight.append([(code - zero) * scale for code, zero, scale in zip(*read, strict=True)])
    return weight


def _with(
    codes: tuple[int, ...] = UNDONE,
    zeros: tuple[int, ...] = UNDONE,
    *,
    factors: tuple[int, ...] = PLAIN,
    more: int = 0,
    group_of: Callable[[int, int, int], int] = lambda row, size, groups: row // size,
) -> ReadAWQ:
    """Return a part that reads codes, zero points and scales (`factors`) in these orders."""

    def part(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
        weight = []
        for row, words in enumerate(qweight):
            group = group_of(row, size, len(scales))
            of_group = scales[group]
            read = (
                _numbers(words, codes),
                _numbers(qzeros[group], zeros),
                [of_group[each // 8 * 8 + factors[each % 8]] for each in range(len(of_group))],
            )
            weight.append([(code - zero - more) * by for code, zero, by in zip(*read, strict=True)])
        return weight

    return part


def _one_word(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    """Take the zero points of a group's first word for all columns."""
    return _mended(qweight, [[words[0]] * len(words) for words in qzeros], scales, size)


def random_checkpoints(part: Any) -> None:
    """random words, zero points and scales:"""
    for seed in range(20):
        drawn = Random(seed)
        size, num_groups, num_words = (drawn.randint(1, 4) for _ in range(3))

        def words(num_rows: int, drawn: Random = drawn, each: int = num_words) -> Words:
            return [
                [drawn.randrange(-(2**31), 2**31) for _ in range(each)] for _ in range(num_rows)
            ]

        qweight, qzeros = words(size * num_groups), words(num_groups)
        scales = [
            [drawn.randint(1, 99) / 256 for _ in range(8 * num_words)] for _ in range(num_groups)
        ]
        found = part(qweight, qzeros, scales, size)
        right = _mended(qweight, qzeros, scales, size)
        where = f"{len(qweight)} rows of {8 * num_words} columns, groups of {size} rows"
        expect_equal(len(found), len(right), f"{where}: the number of rows")
        for row, (mine, wanted) in enumerate(zip(found, right, strict=True)):
            expect_equal([*map(float, mine)], wanted, f"{where}: row {row}")


HUNT = Hunt(
    "nibble_order",
    read_awq,
    test_awq,
    _mended,
    {
        "one that reads hexadecimal digits": _by_digits,
        "one that unpacks whole rows": _with(),
    },
    {
        "reads codes and zero points in plain order": _with(PLAIN, PLAIN),
        "reads the codes in plain order": _with(PLAIN, UNDONE),
        "applies the order instead of undoing it": _with(FILES, FILES),
        "applies the order of the zero points instead of undoing it": _with(UNDONE, FILES),
        "reorders the scales too": _with(factors=UNDONE),
        "adds one to the zero points, as GPTQ's files need": _with(more=1),
        "takes the first group's zero points and scales for all": _with(
            group_of=lambda row, size, groups: 0
        ),
        "takes the groups in turn, row by row": _with(
            group_of=lambda row, size, groups: row % groups
        ),
        "takes the first word's zero points for all columns": _one_word,
    },
    (random_checkpoints,),
    (
        "Choose codes, zero points and scales, pack them yourself by the docstring, and compare "
        "every value. If all zero points of a word are equal, their order cannot be seen.",
        "Two permutations are easily confused: the column of each place, and the place of each "
        "column. Take more than one word per row, more than one group, groups of several rows, and "
        "numbers that make some words negative.",
        "The codes and the zero points of a column are at the same place of their words. Compare "
        "the two lines that read them.",
    ),
    "**The report.** *An AWQ checkpoint whose zero points are all 8 works. The same model with "
    "zero points of its own, which should be better, writes nonsense. I compared the dequantised "
    "matrices: of every eight adjacent outputs, the first and the last are right. Each of the "
    "other six is shifted by a constant within a group: whole steps of its scale.* AWQ's files "
    "and GPTQ's both have eight numbers of 4 bits in a word. GPTQ's are in plain order, and AWQ's "
    "are not, for the sake of the kernel that unpacks them.",
    minutes=20,
)
