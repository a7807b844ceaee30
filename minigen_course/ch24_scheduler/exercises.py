"""Chapter 24's exercises: seats that are never empty, prompts in chunks, preemption."""

import random
from typing import Any

from minigen_course.ch24_scheduler.lesson import (
    ChunkingScheduler,
    PreemptingScheduler,
    SlotScheduler,
)
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect_equal
from minigen_course.lab.scheduling import Hall, expect_batches


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
    a_crowd(part, SlotScheduler, 1, seats=3, budget=16, num_blocks=10, block_size=4)


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


SCHEDULER_USE = """from minigen import LLM, SamplingParams

llm = LLM.load(scheduler=mine, max_num_seqs=2{sizes})
prompts = [f"A short story about {{topic}}:" for topic in ("rain", "tea", "owls", "salt")]
for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(answer.text))
print(llm.describe()["scheduler"])"""

EXERCISES = (
    Exercise(
        "SlotScheduler",
        SlotScheduler,
        (
            one_request_alone,
            two_run_together,
            a_seat_that_is_left_is_taken_at_once,
            nobody_has_a_seat_too_many,
            a_prompt_waits_until_it_fits_into_a_step,
            who_begins_has_blocks_for_its_longest_answer,
            who_is_given_up_leaves_seat_and_blocks,
            two_schedulers_share_nothing,
            forty_find_their_seats,
        ),
        (
            "Keep a queue of who waits and a list of who runs. schedule gives one token to each "
            "who runs, ScheduledChunk(sequence, 1), and then looks at the first of the queue, again and "
            "again, until it cannot begin.",
            "It begins by begin_with_room(self.manager, sequence, budget), of "
            "minigen_course.ch24_scheduler.lesson, which says how many tokens to compute, 0 if "
            "there is no room. Look at seats and at the budget before: what has begun holds "
            "blocks.",
            "In commit, ask samples_of(chunks) who gets a token before self.manager.mark_computed counts "
            "the chunks as computed. sequence.append(token.token_id) sets finish_reason at the "
            "end; then release the blocks, and leave the seat.",
        ),
        "Write continuous batching. Whoever runs gets one token in each step. Whoever waits "
        "begins, in the order of arrival, as soon as there is a seat, its whole prompt fits into "
        "what is left of the step's tokens, and there are blocks for its longest answer "
        "(`begin_with_room` of `minigen_course.ch24_scheduler.lesson` sees to the blocks). Nobody "
        "overtakes: if the first of the queue cannot begin, all wait. Whoever has finished leaves "
        "seat and blocks in `commit`.",
        SCHEDULER_USE.format(sizes=""),
        "A prompt longer than a step's tokens never begins here, and blocks all behind it. Let "
        "such a one in alone, or refuse it in `add`: which of the two would you want of a server?",
    ),
    Exercise(
        "ChunkingScheduler",
        ChunkingScheduler,
        (
            one_request_alone,
            a_long_prompt_goes_in_chunks_beside_decodes,
            who_decodes_goes_before_prompts,
            what_is_left_of_a_step_goes_to_the_next,
            a_full_step_lets_nobody_in,
            seats_and_blocks_still_hold,
            two_schedulers_share_nothing,
            forty_go_in_chunks,
        ),
        (
            "sequence.num_wanted is how many tokens are still to be computed: 1 for whoever "
            "decodes, more for a prompt under way. Give min(num_wanted, budget).",
            "Go through those who run in the order of their arrival. Nobody who decodes comes away "
            "empty then: a prompt that takes all that is left came after them.",
            "Who begins gets begin_with_room(self.manager, sequence, budget) tokens, the first "
            "chunk. Let nobody begin when the budget is 0.",
        ),
        "Write `schedule` with chunks. First each who decodes gets its token; then prompts that "
        "are under way, in the order of arrival, get as many tokens as are left; then newcomers "
        "begin with what is left, while there are seats and blocks. No step has more than "
        "`max_num_batched_tokens`. The base class is the package's `SlotScheduler` by another "
        "name; build on your own if you like.",
        SCHEDULER_USE.format(sizes=", max_num_batched_tokens=8"),
        "A short prompt behind a long one waits for all of its chunks. Share what is left of a "
        "step among the prompts under way. What becomes of the long one's time to first token?",
    ),
    Exercise(
        "PreemptingScheduler",
        PreemptingScheduler,
        (
            one_request_alone,
            a_long_prompt_goes_in_chunks_beside_decodes,
            room_for_now_is_enough_to_begin,
            the_last_who_came_gives_way,
            it_comes_back_first_and_is_computed_anew,
            the_last_gives_its_own_way,
            who_gives_way_leaves_the_step,
            two_schedulers_share_nothing,
            forty_in_too_little_memory,
        ),
        (
            "Now self.manager.allocate(sequence, budget) begins with room for what is there, and "
            "self.manager.allocate_slots(sequence, num_tokens) makes slots before each step; it returns "
            "False where blocks lack.",
            "To preempt: take the last of those who run, self.manager.free(it), and put it in "
            "front of the queue. release also sets its num_computed to 0, so that its text, with "
            "what it wrote already, is computed again when it begins. Then try to reserve again.",
            "The last may be the very sequence that asks; then it is not in the step. And if you "
            "do not go in the order of arrival, it may be one that has been given its token in "
            "this step already: take that back.",
        ),
        "Write `schedule` with preemption. Whoever begins needs room for its tokens so far only. "
        "Each step reserves slots for its next tokens; where blocks lack, the last who came gives "
        "its own back and waits again, in front of all who came later, until there is enough. Who "
        "gave way is not in the step.",
        SCHEDULER_USE.format(sizes=", num_blocks=4, block_size=8"),
        "Recomputing costs arithmetic. vLLM could also copy the victim's blocks to the host's "
        "memory and back. From how many tokens on would that be faster, given a bus of 25 GB/s, "
        "23 KB of keys and values a token, and 5,000 tokens a second of prefill?",
    ),
)
