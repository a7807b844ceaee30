"""Bug hunt of chapter 35: a calibration that gets better the closer it is to the test."""

import random
from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.grading.hunt import Hunt

Starts = list[int]
SplitText = Callable[[int, int, int, int, int], tuple[Starts, Starts]]


def split_text(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Return the windows of a text to calibrate on and those to test on, by their first tokens.

    Each window has `length` adjacent tokens. No start occurs twice, no token is in two test
    windows, and none is in a calibration window and in a test window. `seed` draws the calibration
    windows alone: results can be compared only if the test is always the same. The text has at
    least four times as many tokens as all windows together.
    """
    step = num_tokens // num_test
    test = [number * step for number in range(num_test)]
    free = [start for start in range(num_tokens - length + 1) if start not in test]
    return random.Random(seed).sample(free, num_calibration), test


def test_split(split_text: SplitText) -> None:
    """Assert what every correct `split_text` does, and the one above does not."""
    for length in (1, 2, 3, 7):
        for num_calibration, num_test in [(1, 1), (2, 5), (12, 2)]:
            num_tokens = 4 * length * (num_calibration + num_test)
            tests = set()
            for seed in range(40):
                found = split_text(num_tokens, length, num_calibration, num_test, seed)
                calibration, test = found
                tests.add(tuple(sorted(test)))
                assert len(set(calibration)) == len(calibration) == num_calibration
                assert len(set(test)) == len(test) == num_test
                assert all(0 <= start <= num_tokens - length for start in [*calibration, *test])
                tested = [start + place for start in test for place in range(length)]
                assert len(set(tested)) == len(tested)
                seen = {start + place for start in calibration for place in range(length)}
                assert not seen & set(tested)
            assert len(tests) == 1


def _mended(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    step = num_tokens // num_test
    test = [number * step for number in range(num_test)]
    free = [
        start
        for start in range(num_tokens - length + 1)
        if all(abs(start - each) >= length for each in test)
    ]
    return random.Random(seed).sample(free, num_calibration), test


def _test_at_the_end(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    first = num_tokens - num_test * length
    free = range(first - length + 1)
    return random.Random(seed).sample(free, num_calibration), [*range(first, num_tokens, length)]


def _by_slots(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Cut the text into windows that do not overlap, and give each to one of the two."""
    slots = [number * length for number in range(num_tokens // length)]
    random.Random(0).shuffle(slots)
    return random.Random(seed).sample(slots[num_test:], num_calibration), slots[:num_test]


def _with(is_free: Callable[[int, list[int], int], bool]) -> SplitText:
    """Return a part that draws the starts that are free: `is_free(start, test, length)`."""

    def part(
        num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
    ) -> tuple[list[int], list[int]]:
        step = num_tokens // num_test
        test = [number * step for number in range(num_test)]
        starts = range(num_tokens - length + 1)
        free = [start for start in starts if is_free(start, test, length)]
        return random.Random(seed).sample(free, num_calibration), test

    return part


def _then(change: Callable[[Starts, Starts, int, int], tuple[Starts, Starts]]) -> SplitText:
    """Return a part that changes a right result: `change(calibration, test, length, seed)`."""

    def part(
        num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
    ) -> tuple[list[int], list[int]]:
        found = _mended(num_tokens, length, num_calibration, num_test, seed)
        return change(*found, length, seed)

    return part


def _removed_afterwards(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Draw from the whole text, and leave the windows out that overlap the test's."""
    _, test = _mended(num_tokens, length, num_calibration, num_test, seed)
    drawn = random.Random(seed).sample(range(num_tokens - length + 1), num_calibration)
    return [each for each in drawn if all(abs(each - one) >= length for one in test)], test


def _test_removed(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Draw from the whole text, and leave out the test windows that overlap."""
    _, test = _mended(num_tokens, length, num_calibration, num_test, seed)
    drawn = random.Random(seed).sample(range(num_tokens - length + 1), num_calibration)
    return drawn, [one for one in test if all(abs(each - one) >= length for each in drawn)]


def _drawn_test(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Draw both from the windows that do not overlap."""
    slots = range(0, num_tokens - length + 1, length)
    drawn = random.Random(seed).sample(slots, num_calibration + num_test)
    return drawn[:num_calibration], drawn[num_calibration:]


def _past_the_end(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> tuple[list[int], list[int]]:
    """Have windows of which only the first token is in the text."""
    drawn, test = _mended(num_tokens, length, num_calibration, num_test, seed)
    return [num_tokens - 1, *(each for each in drawn if each != num_tokens - 1)][: len(drawn)], test


def no_token_is_calibrated_on_and_tested(part: Any) -> None:
    """texts of any length, with windows of any length:"""
    for case in range(60):
        drawn = random.Random(case)
        length, num_calibration, num_test = (drawn.randint(1, most) for most in (9, 12, 6))
        num_tokens = 4 * length * (num_calibration + num_test) + drawn.randint(0, 20)
        sizes = num_tokens, length, num_calibration, num_test
        where = f"split_text{(*sizes, case)}"
        calibration, test = part(*sizes, case)
        for name, starts, number in (
            ("calibration", calibration, num_calibration),
            ("test", test, num_test),
        ):
            expect_equal(len(starts), number, f"{where}: the number of {name} windows")
            expect(len(set(starts)) == number, f"{where} has a {name} window twice: {starts}.")
            for start in starts:
                inside = 0 <= start <= num_tokens - length
                expect(inside, f"{where}: the {name} window at {start} is not inside the text.")
        tested = [start + place for start in test for place in range(length)]
        expect(len(set(tested)) == len(tested), f"{where}: test windows overlap: {sorted(test)}.")
        for start in calibration:
            both = set(range(start, start + length)) & set(tested)
            what = f"the calibration window at {start} has tested tokens: {sorted(both)}"
            expect(not both, f"{where}: {what}.")


def the_test_is_always_the_same(part: Any) -> None:
    """other seeds:"""
    sizes = (600, 10, 5, 4)
    found = [part(*sizes, seed) for seed in range(12)]
    for seed, (_, test) in enumerate(found):
        expect_equal(sorted(test), sorted(found[0][1]), f"the test windows with seed {seed}")
    different = {tuple(sorted(calibration)) for calibration, _ in found}
    expect(len(different) > 1, "12 seeds draw the same calibration windows each time.")


HUNT = Hunt(
    "seen_text",
    split_text,
    test_split,
    _mended,
    {
        "one that tests on the end of the text": _test_at_the_end,
        "one that cuts the text into windows first": _by_slots,
    },
    {
        "draws from the whole text": _with(lambda start, test, length: True),
        "looks at test windows that begin earlier only": _with(
            lambda start, test, length: all(not 0 <= start - each < length for each in test)
        ),
        "looks at test windows that begin later only": _with(
            lambda start, test, length: all(not 0 <= each - start < length for each in test)
        ),
        "allows one token of overlap": _with(
            lambda start, test, length: all(
                abs(start - each) >= max(length - 1, 1) for each in test
            )
        ),
        "looks at the first test window only": _with(
            lambda start, test, length: abs(start - test[0]) >= length and start not in test
        ),
        "returns fewer calibration windows": _removed_afterwards,
        "returns fewer test windows": _test_removed,
        "draws other test windows with another seed": _drawn_test,
        "goes past the end of the text": _past_the_end,
        "takes one calibration window again and again": _then(
            lambda calibration, test, length, seed: (calibration[:1] * len(calibration), test)
        ),
        "has test windows that overlap": _then(
            lambda calibration, test, length, seed: (
                calibration,
                [test[0] + each for each in range(length)][: len(test)]
                + test[min(length, len(test)) :],
            )
        ),
    },
    (no_token_is_calibrated_on_and_tested, the_test_is_always_the_same),
    (
        "Two windows can share tokens without having the same first token. Write down the tokens "
        "of all windows, and compare the sets.",
        "A single draw may be right by chance. Try many seeds, short windows, many calibration "
        "windows beside few test windows, and the other way round.",
        "A split must not avoid an overlap by another mistake. Assert how many windows there are, "
        "that they are inside the text and different, that test windows share no token, and that "
        "the test does not depend on the seed. How far apart must two starts be?",
    ),
    "**The report.** *With more calibration windows the quantised model comes closer and closer to "
    "the float one. With very many, its perplexity is the best that I have seen at 3 bits. On "
    "another text of the same kind, more windows hardly help beyond some number. I have made "
    "sure that no test window is used for calibration.* A method that adapts a weight to its "
    "calibration text must be judged on text that it has not seen. Otherwise the test measures how "
    "well it remembers.",
    minutes=20,
)
