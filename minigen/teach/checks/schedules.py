"""Checks of schedulers: who runs in which step, and with how many tokens."""

import random
from typing import Any

from minigen.teach.checks.scheduling import Hall, expect_batches
from minigen.teach.messages import expect_equal
from minigen.teach.schedulers import ChunkingScheduler, PreemptingScheduler, SeatScheduler


def one_request_alone(part: Any) -> None:
    """a prompt of 5 tokens and an answer of 3:"""
    hall = Hall(part)
    hall.arrive(5, 3)
    expect_batches(hall, [{1: 5}, {1: 1}, {1: 1}, {}])
    hall.expect_whole()


def two_run_together(part: Any) -> None:
    """two that came together, and one later, with seats for all:"""
    hall = Hall(part)
    hall.arrive(3, 4)
    hall.arrive(4, 3)
    expect_batches(hall, [{1: 3, 2: 4}, {1: 1, 2: 1}])
    hall.arrive(2, 2)
    expect_batches(hall, [{1: 1, 2: 1, 3: 2}, {1: 1, 3: 1}, {}])
    hall.expect_whole()


def a_seat_that_is_left_is_taken_at_once(part: Any) -> None:
    """two seats, three requests, the first of which has a short answer:"""
    hall = Hall(part, seats=2)
    for output in (1, 4, 2):
        hall.arrive(3, output)
    expect_batches(hall, [{1: 3, 2: 3}, {2: 1, 3: 3}, {2: 1, 3: 1}, {2: 1}])
    hall.expect_whole()


def nobody_has_a_seat_too_many(part: Any) -> None:
    """three seats and five requests:"""
    hall = Hall(part, seats=3)
    for _ in range(5):
        hall.arrive(2, 2)
    expect_batches(hall, [{1: 2, 2: 2, 3: 2}, {1: 1, 2: 1, 3: 1}, {4: 2, 5: 2}, {4: 1, 5: 1}])
    hall.expect_whole()


def a_prompt_waits_until_it_fits_into_a_step(part: Any) -> None:
    """8 tokens a step: a prompt of 6, then one of 7 beside its decodes, then one of 2:"""
    hall = Hall(part, budget=8)
    for prompt, output in ((6, 3), (7, 2), (1, 1)):
        hall.arrive(prompt, output)
    expect_batches(hall, [{1: 6}, {1: 1, 2: 7}, {1: 1, 2: 1, 3: 1}, {}])
    hall.expect_whole()
    hall = Hall(part, budget=8)
    for prompt, output in ((6, 3), (8, 1), (1, 1)):  # the second needs a step for itself
        hall.arrive(prompt, output)
    expect_batches(hall, [{1: 6}, {1: 1}, {1: 1}, {2: 8}, {3: 1}, {}])


def who_begins_has_blocks_for_its_longest_answer(part: Any) -> None:
    """6 blocks of 4 tokens: requests that take 4, 3 and 1 at their longest, in turn:"""
    hall = Hall(part, num_blocks=6)
    for prompt, output in ((4, 9), (5, 7), (3, 1)):
        hall.arrive(prompt, output)
    expect_batches(hall, [{1: 4}, *[{1: 1}] * 8, {2: 5, 3: 3}])
    hall.drain(6)


def who_is_given_up_leaves_seat_and_blocks(part: Any) -> None:
    """two seats: one who runs is aborted, one who waits, and one who has finished:"""
    hall = Hall(part, seats=2)
    for _ in range(5):
        hall.arrive(3, 4)
    expect_batches(hall, [{1: 3, 2: 3}])
    for number in (1, 4):
        hall.sequences[number - 1].finish_reason = "abort"
        hall.abort(number)
    expect_batches(hall, [{2: 1, 3: 3}, {2: 1, 3: 1}, {2: 1, 3: 1}, {3: 1, 5: 3}])
    hall.abort(2)
    hall.drain(3)


def two_schedulers_share_nothing(part: Any) -> None:
    """two engines, each with a scheduler of its own:"""
    first, second = Hall(part), Hall(part)
    first.arrive(3, 2)
    expect_batches(second, [{}])
    second.arrive(4, 2)
    for hall, batches in ((first, [{1: 3}]), (second, [{1: 4}]), (first, [{1: 1}, {}])):
        expect_batches(hall, batches)
    expect_batches(second, [{1: 1}, {}])


def a_crowd(part: Any, solution: Any, seed: int, **sizes: int) -> None:
    """Forty requests at odd moments: answers as if alone, each step as the solution's."""
    mine, right = Hall(part, **sizes), Hall(solution, **sizes)
    longest = sizes["num_blocks"] * sizes["block_size"]
    rng = random.Random(seed)
    left = 40
    while left or right.live():
        for _ in range(min(left, rng.choice((0, 0, 1, 3)))):
            prompt = rng.randint(1, sizes["budget"] - sizes["seats"])
            output = min(rng.randint(1, 12), longest - prompt)
            mine.arrive(prompt, output)
            right.arrive(prompt, output)
            left -= 1
        expect_batches(mine, [right.step()])
    mine.expect_whole()


def forty_find_their_seats(part: Any) -> None:
    """forty requests that come at odd moments, by the order of their arrival:"""
    a_crowd(part, SeatScheduler, 1, seats=3, budget=16, num_blocks=10, block_size=4)


def a_long_prompt_goes_in_chunks_beside_decodes(part: Any) -> None:
    """8 tokens a step: a prompt of 17 while another is decoded:"""
    hall = Hall(part, budget=8)
    hall.arrive(4, 6)
    expect_batches(hall, [{1: 4}])
    hall.arrive(17, 2)
    expect_batches(hall, [{1: 1, 2: 7}, {1: 1, 2: 7}, {1: 1, 2: 3}, {1: 1, 2: 1}, {1: 1}, {}])
    hall.expect_whole()


def who_decodes_goes_before_prompts(part: Any) -> None:
    """a prompt of 30 that came first, and short ones behind it that decode soon:"""
    hall = Hall(part, budget=8, seats=3)
    hall.arrive(5, 9)
    hall.arrive(30, 2)
    expect_batches(hall, [{1: 5, 2: 3}, {1: 1, 2: 7}])
    hall.arrive(2, 5)
    expect_batches(hall, [{1: 1, 2: 7}, {1: 1, 2: 7}, {1: 1, 2: 6, 3: 1}, {1: 1, 2: 1, 3: 1}])
    hall.drain(8)


def what_is_left_of_a_step_goes_to_the_next(part: Any) -> None:
    """10 tokens a step and prompts of 12, 5 and 6 at once:"""
    hall = Hall(part, budget=10)
    for prompt in (12, 5, 6):
        hall.arrive(prompt, 3)
    expect_batches(hall, [{1: 10}, {1: 2, 2: 5, 3: 3}, {1: 1, 2: 1, 3: 3}])
    hall.drain(4)


def a_full_step_lets_nobody_in(part: Any) -> None:
    """two prompts of 8 tokens and 8 tokens a step: the second has no seat before it has tokens:"""
    hall = Hall(part, budget=8, seats=2)
    hall.arrive(8, 2)
    hall.arrive(8, 2)
    hall.arrive(3, 1)
    expect_batches(hall, [{1: 8}])
    hall.sequences[1].finish_reason = "abort"
    hall.abort(2)
    expect_batches(hall, [{1: 1, 3: 3}, {}])
    hall.expect_whole()


def seats_and_blocks_still_hold(part: Any) -> None:
    """two seats, and blocks for two longest answers:"""
    hall = Hall(part, budget=8, seats=2, num_blocks=7)
    for prompt, output in ((4, 4), (13, 5), (9, 3), (2, 2)):
        hall.arrive(prompt, output)
    expect_batches(hall, [{1: 4, 2: 4}, {1: 1, 2: 7}, {1: 1, 2: 2}, {1: 1, 2: 1}, {2: 1}])
    expect_batches(hall, [{2: 1}, {2: 1}, {3: 8}, {3: 1, 4: 2}, {3: 1, 4: 1}, {3: 1}, {}])
    hall.expect_whole()


def forty_go_in_chunks(part: Any) -> None:
    """forty requests that come at odd moments, in steps of 9 tokens:"""
    a_crowd(part, ChunkingScheduler, 2, seats=4, budget=9, num_blocks=12, block_size=4)
    a_crowd(part, ChunkingScheduler, 5, seats=2, budget=5, num_blocks=6, block_size=2)


def room_for_now_is_enough_to_begin(part: Any) -> None:
    """6 blocks of 4 tokens: three requests that need 1 now and 3 at their longest:"""
    hall = Hall(part, num_blocks=6)
    for _ in range(3):
        hall.arrive(4, 8)
    expect_batches(hall, [{1: 4, 2: 4, 3: 4}, {1: 1, 2: 1, 3: 1}])
    hall.drain(30)


def the_last_who_came_gives_way(part: Any) -> None:
    """6 blocks of 2 tokens, three prompts of 4: all blocks are taken when the first wants more:"""
    hall = Hall(part, num_blocks=6, block_size=2, seats=3)
    for _ in range(3):
        hall.arrive(4, 5)
    expect_batches(hall, [{1: 4, 2: 4, 3: 4}, {1: 1, 2: 1}, {1: 1, 2: 1}])
    computed = hall.sequences[2].num_computed
    expect_equal(computed, 0, "tokens of request 3 that count as computed after it gave way")
    hall.drain(30)


def it_comes_back_first_and_is_computed_anew(part: Any) -> None:
    """the same, and a fourth request that comes while the third waits:"""
    hall = Hall(part, num_blocks=6, block_size=2, seats=3)
    for _ in range(3):
        hall.arrive(4, 3)
    expect_batches(hall, [{1: 4, 2: 4, 3: 4}])
    hall.arrive(1, 1)
    expect_batches(hall, [{1: 1, 2: 1}, {1: 1, 2: 1}, {3: 5, 4: 1}, {3: 1}, {}])
    hall.expect_whole()


def who_gives_way_leaves_the_step(part: Any) -> None:
    """a prompt that asks for its logprobs, so 32 tokens a step, beside three that decode:"""
    hall = Hall(part, num_blocks=6, block_size=16, budget=64)
    hall.arrive(80, 2, logprobs=True)
    for _ in range(3):
        hall.arrive(10, 5)
    expect_batches(hall, [{1: 32, 2: 10, 3: 10, 4: 10}, {1: 32, 2: 1, 3: 1}, {1: 16, 2: 1}])
    hall.drain(20)


def the_last_gives_its_own_way(part: Any) -> None:
    """4 blocks of 2 tokens, two requests: when the second lacks a block, it is the last:"""
    hall = Hall(part, num_blocks=4, block_size=2, seats=2)
    hall.arrive(3, 5)
    hall.arrive(4, 2)
    expect_batches(hall, [{1: 3, 2: 4}, {1: 1}, {1: 1}, {1: 1}, {1: 1}, {2: 5}, {}])
    hall.expect_whole()


def forty_in_too_little_memory(part: Any) -> None:
    """forty requests that come at odd moments, where blocks are always short:"""
    for seed, sizes in enumerate(
        (
            {"seats": 4, "budget": 9, "num_blocks": 7, "block_size": 4},
            {"seats": 5, "budget": 12, "num_blocks": 10, "block_size": 2},
            {"seats": 3, "budget": 16, "num_blocks": 14, "block_size": 1},
        )
    ):
        a_crowd(part, PreemptingScheduler, 10 + seed, **sizes)
