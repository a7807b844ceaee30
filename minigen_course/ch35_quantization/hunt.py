"""Bug hunt of chapter 35: a checkpoint of which one output in eight is right."""

from collections.abc import Callable
from random import Random
from typing import Any

from minigen_course.grading.exercise import expect_equal
from minigen_course.grading.hunt import Hunt

ReadZeros = Callable[[list[int], int], list[int]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the place of each number of a word in AWQ's files


def read_zeros(words: list[int], version: int) -> list[int]:
    """Return the zero points, 0 to 15, of a row of GPTQ's `qzeros`.

    Each word is an int32, so it may be negative, and has eight zero points of 4 bits, the first one
    in the lowest bits. Version 2 stores the zero points as they are. Version 1 stores each of them
    minus one, in 4 bits: 0 is stored as 15.
    """
    zeros: list[int] = []
    for word in words:
        if version == 1:
            word += 1
        zeros += [(word >> (4 * place)) & 15 for place in range(8)]
    return zeros


def test_zeros(read_zeros: ReadZeros) -> None:
    """Assert what every correct `read_zeros` does, and the one above does not."""

    def word_of(numbers: list[int]) -> int:
        word = sum(each << (4 * place) for place, each in enumerate(numbers))
        return word - 2**32 if word >= 2**31 else word

    for start in range(16):
        zeros = [(start + 5 * place) % 16 for place in range(16)]
        halves = zeros[:8], zeros[8:]
        assert read_zeros([word_of(half) for half in halves], 2) == zeros
        less = [[(each - 1) % 16 for each in half] for half in halves]
        assert read_zeros([word_of(half) for half in less], 1) == zeros


def _stored(words: list[int]) -> list[int]:
    return [(word >> (4 * place)) & 15 for word in words for place in range(8)]


def _mended(words: list[int], version: int) -> list[int]:
    zeros: list[int] = []
    for word in words:
        for place in range(8):
            stored = (word >> (4 * place)) & 15
            zeros.append((stored + 1) % 16 if version == 1 else stored)
    return zeros


def _by_text(words: list[int], version: int) -> list[int]:
    """Read the hexadecimal digits from right to left."""
    zeros = []
    for word in words:
        digits = f"{word % 2**32:08x}"
        zeros += [int(digit, 16) for digit in reversed(digits)]
    return [(each + (version == 1)) & 15 for each in zeros]


def _by_bytes(words: list[int], version: int) -> list[int]:
    """Read two numbers from each byte; the words are taken without a sign."""
    zeros: list[int] = []
    for byte in b"".join((word % 2**32).to_bytes(4, "little") for word in words):
        zeros += [byte % 16, byte // 16]
    return zeros if version == 2 else [0 if each == 15 else each + 1 for each in zeros]


def _with(change: Callable[[int, int, int], int], *, order: tuple[int, ...] = ()) -> ReadZeros:
    """Return a part that changes each stored number; `change` gets it, its place, the version."""

    def part(words: list[int], version: int) -> list[int]:
        numbers = _stored(words)
        if order:
            numbers = [numbers[place // 8 * 8 + order[place % 8]] for place in range(len(numbers))]
        return [change(each, place, version) for place, each in enumerate(numbers)]

    return part


def _one_more(stored: int, place: int, version: int) -> int:
    return (stored + 1) % 16 if version == 1 else stored


def zero_points_of_random_words(part: Any) -> None:
    """random words of both versions:"""
    for seed in range(30):
        drawn = Random(seed)
        words = [drawn.randrange(-(2**31), 2**31) for _ in range(drawn.randint(1, 4))]
        for version in (1, 2):
            found, right = part(list(words), version), _mended(words, version)
            expect_equal(found, right, f"words {words} of version {version}: the zero points")


def no_words(part: Any) -> None:
    """a row without words:"""
    for version in (1, 2):
        expect_equal(part([], version), [], f"no words, version {version}: the zero points")


HUNT = Hunt(
    "minus_one",
    read_zeros,
    test_zeros,
    _mended,
    {
        "one that reads hexadecimal digits": _by_text,
        "one that reads bytes": _by_bytes,
        "one that changes all numbers at the end": _with(_one_more),
    },
    {
        "adds nothing": _with(lambda stored, place, version: stored),
        "adds one in version 2, too": _with(lambda stored, place, version: (stored + 1) % 16),
        "takes one version for the other": _with(
            lambda stored, place, version: (stored + (version == 2)) % 16
        ),
        "does not wrap": _with(lambda stored, place, version: stored + (version == 1)),
        "ends at 15": _with(lambda stored, place, version: min(stored + (version == 1), 15)),
        "takes one away": _with(lambda stored, place, version: (stored - (version == 1)) % 16),
        "adds one to the first word only": _with(
            lambda stored, place, version: (stored + (version == 1 and place < 8)) % 16
        ),
        "has the highest bits first": _with(_one_more, order=tuple(range(7, -1, -1))),
        "has AWQ's order": _with(_one_more, order=AWQ_ORDER),
    },
    (zero_points_of_random_words, no_words),
    (
        "Write words whose eight numbers you know, and compare all of them. With numbers that are "
        "all alike, an order that is wrong cannot be seen.",
        "A zero point of 0 is stored as 15 in version 1. And a word with a high last number is a "
        "negative int32. Test both versions, and more than one word.",
        "`word += 1` adds one to the number in the lowest bits. What happens to the other seven? "
        "And to the second one, if the first is 15?",
    ),
    "**The report.** *A GPTQ checkpoint of version 2 works. The same model in version 1 writes "
    "fluent nonsense. I compared the dequantised matrices: of every eight outputs, one is right to "
    "the last bit. The other seven are all shifted by one step of their scale.* The values of a "
    "4-bit matrix are (code - zero) * scale, so a zero point that is wrong by one shifts a whole "
    "group, and the errors of a row all have the same sign: they do not cancel in a sum.",
    minutes=15,
)
