"""Tests and parts that learners might hand in for chapter 35's hunt for a text that was seen."""

import random
from typing import Any

from minigen_course.ch35_quantization.hunts import seen_text as hunt

Split = tuple[list[int], list[int]]


def tokens_of(starts: list[int], length: int) -> list[int]:
    return [start + place for start in starts for place in range(length)]


def assert_good(found: Split, sizes: tuple[int, int, int, int]) -> None:
    num_tokens, length, num_calibration, num_test = sizes
    calibration, test = found
    assert (len(calibration), len(test)) == (num_calibration, num_test)
    assert len(set(calibration)) == num_calibration
    tested = tokens_of(test, length)
    assert len(set(tested)) == len(tested)
    assert not set(tokens_of(calibration, length)) & set(tested)
    assert all(each in range(num_tokens - length + 1) for each in [*calibration, *test])


# Tests


def many_sizes(split_text: Any) -> None:
    for length in (2, 5, 8):
        for number in (1, 4, 20):
            for others in (1, 3, 6):
                sizes = (4 * length * (number + others), length, number, others)
                tests = [split_text(*sizes, seed)[1] for seed in range(20)]
                assert all(set(each) == set(tests[0]) for each in tests)
                for seed in range(20):
                    assert_good(split_text(*sizes, seed), sizes)


def a_text_with_ample_space(split_text: Any) -> None:
    sizes = (900, 3, 60, 15)
    first = split_text(*sizes, 0)
    for seed in range(60):
        found = split_text(*sizes, seed)
        assert sorted(found[1]) == sorted(first[1])
        assert_good(found, sizes)


def starts_only(split_text: Any) -> None:
    for seed in range(50):
        calibration, test = split_text(400, 10, 8, 2, seed)
        assert len(calibration) == 8
        assert len(test) == 2
        assert not set(calibration) & set(test)


def one_seed(split_text: Any) -> None:
    sizes = (4 * 3 * 80, 3, 60, 20)
    assert_good(split_text(*sizes, 0), sizes)


def one_test_window(split_text: Any) -> None:
    sizes = (4 * 3 * 40, 3, 39, 1)
    for seed in range(60):
        found = split_text(*sizes, seed)
        assert found[1] == split_text(*sizes, 0)[1]
        assert_good(found, sizes)


def overlap_only(split_text: Any) -> None:
    for seed in range(60):
        calibration, test = split_text(900, 3, 60, 15, seed)
        assert not set(tokens_of(calibration, 3)) & set(tokens_of(test, 3))


def without_the_end(split_text: Any) -> None:
    for seed in range(60):
        calibration, test = split_text(900, 3, 60, 15, seed)
        assert (len(set(calibration)), len(set(test))) == (60, 15)
        assert test == split_text(900, 3, 60, 15, 0)[1]
        tested = tokens_of(test, 3)
        assert len(set(tested)) == len(tested)
        assert not set(tokens_of(calibration, 3)) & set(tested)


def wants_a_sorted_test(split_text: Any) -> None:
    many_sizes(split_text)
    assert split_text(900, 3, 60, 15, 0)[1] == [*range(0, 900, 60)]


def wants_apart(split_text: Any) -> None:
    """Wrong: calibration windows may overlap each other."""
    for seed in range(60):
        calibration, _ = split_text(900, 3, 60, 15, seed)
        tokens = tokens_of(calibration, 3)
        assert len(set(tokens)) == len(tokens)


# Parts


def tests_the_front(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> Split:
    test = [length * each for each in range(num_test)]
    free = [*range(num_test * length, num_tokens - length + 1)]
    random.Random(seed).shuffle(free)
    return free[:num_calibration], test


def drawn_again(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> Split:
    test = [each * (num_tokens // num_test) for each in range(num_test)]
    tested, drawn = set(tokens_of(test, length)), random.Random(seed)
    calibration: list[int] = []
    while len(calibration) < num_calibration:
        start = drawn.randrange(num_tokens - length + 1)
        if start not in calibration and tested.isdisjoint(range(start, start + length)):
            calibration.append(start)
    return calibration, test


def last_token_forgotten(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> Split:
    """Wrong: a window's first token is compared with the tested ones, its last is not."""
    test = [each * (num_tokens // num_test) for each in range(num_test)]
    tested = set(tokens_of(test, length))
    free = [start for start in range(num_tokens - length + 1) if start not in tested]
    return random.Random(seed).sample(free, num_calibration), test


def fewer_windows(*given: int) -> Split:
    """Wrong: leaves windows out after they were drawn."""
    return hunt._removed_afterwards(*given)


def past_the_end(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> Split:
    """Wrong: windows may begin at the last token."""
    test = [each * (num_tokens // num_test) for each in range(num_test)]
    free = [
        start for start in range(num_tokens) if all(abs(start - each) >= length for each in test)
    ]
    return random.Random(seed).sample(free, num_calibration), test


def tests_by_seed(*given: int) -> Split:
    """Wrong: the test is another one with each seed."""
    return hunt._drawn_test(*given)


def same_for_every_seed(
    num_tokens: int, length: int, num_calibration: int, num_test: int, seed: int
) -> Split:
    """Wrong: `seed` changes nothing."""
    return hunt._mended(num_tokens, length, num_calibration, num_test, 0)
