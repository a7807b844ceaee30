"""Exercises of chapter 24: batch slots that are never idle, chunked prefill, preemption."""

import random
from typing import Any

from minigen_course.ch24_scheduler.lesson import (
    ChunkingScheduler,
    PreemptingScheduler,
    SlotScheduler,
)
from minigen_course.grading.exercise import expect_equal
from minigen_course.lab.toy_engine import SchedulerBench


def one_request_alone(part: Any) -> None:
    """a prompt of 5 tokens and an answer of 3:"""
    bench = SchedulerBench(part)
    bench.arrive(5, 3)
    bench.expect_batches([{1: 5}, {1: 1}, {1: 1}, {}])
    bench.expect_whole()


def two_run_together(part: Any) -> None:
    """two requests that arrive together and one that arrives later, with batch slots for all:"""
    bench = SchedulerBench(part)
    bench.arrive(3, 4)
    bench.arrive(4, 3)
    bench.expect_batches([{1: 3, 2: 4}, {1: 1, 2: 1}])
    bench.arrive(2, 2)
    bench.expect_batches([{1: 1, 2: 1, 3: 2}, {1: 1, 3: 1}, {}])
    bench.expect_whole()


def a_free_batch_slot_is_taken_at_once(part: Any) -> None:
    """two batch slots and three requests, the first of which has a short answer:"""
    bench = SchedulerBench(part, max_num_seqs=2)
    for output in (1, 4, 2):
        bench.arrive(3, output)
    bench.expect_batches([{1: 3, 2: 3}, {2: 1, 3: 3}, {2: 1, 3: 1}, {2: 1}])
    bench.expect_whole()


def no_batch_slot_is_used_twice(part: Any) -> None:
    """three batch slots and five requests:"""
    bench = SchedulerBench(part, max_num_seqs=3)
    for _ in range(5):
        bench.arrive(2, 2)
    bench.expect_batches([{1: 2, 2: 2, 3: 2}, {1: 1, 2: 1, 3: 1}, {4: 2, 5: 2}, {4: 1, 5: 1}])
    bench.expect_whole()


def a_prompt_waits_until_it_fits_into_a_step(part: Any) -> None:
    """8 tokens per step: prompts of 6, 7 and 1 tokens, then prompts of 6, 8 and 1:"""
    bench = SchedulerBench(part, budget=8)
    for prompt, output in ((6, 3), (7, 2), (1, 1)):
        bench.arrive(prompt, output)
    bench.expect_batches([{1: 6}, {1: 1, 2: 7}, {1: 1, 2: 1, 3: 1}, {}])
    bench.expect_whole()
    bench = SchedulerBench(part, budget=8)
    for prompt, output in ((6, 3), (8, 1), (1, 1)):  # the second prompt fills a step alone
        bench.arrive(prompt, output)
    bench.expect_batches([{1: 6}, {1: 1}, {1: 1}, {2: 8}, {3: 1}, {}])


def a_request_starts_with_blocks_for_its_longest_answer(part: Any) -> None:
    """6 blocks of 4 tokens: requests that need at most 4, 3 and 1 blocks, in this order:"""
    bench = SchedulerBench(part, num_blocks=6)
    for prompt, output in ((4, 9), (5, 7), (3, 1)):
        bench.arrive(prompt, output)
    bench.expect_batches([{1: 4}, *[{1: 1}] * 8, {2: 5, 3: 3}])
    bench.drain(6)


def an_aborted_request_frees_its_batch_slot_and_blocks(part: Any) -> None:
    """two batch slots: a running, a waiting and a finished request are aborted:"""
    bench = SchedulerBench(part, max_num_seqs=2)
    for _ in range(5):
        bench.arrive(3, 4)
    bench.expect_batches([{1: 3, 2: 3}])
    for number in (1, 4):
        bench.sequences[number - 1].finish_reason = "abort"
        bench.abort(number)
    bench.expect_batches([{2: 1, 3: 3}, {2: 1, 3: 1}, {2: 1, 3: 1}, {3: 1, 5: 3}])
    bench.abort(2)
    bench.drain(3)


def two_schedulers_share_no_state(part: Any) -> None:
    """two engines, each with its own scheduler:"""
    first, second = SchedulerBench(part), SchedulerBench(part)
    first.arrive(3, 2)
    second.expect_batches([{}])
    second.arrive(4, 2)
    for bench, batches in ((first, [{1: 3}]), (second, [{1: 4}]), (first, [{1: 1}, {}])):
        bench.expect_batches(batches)
    second.expect_batches([{1: 1}, {}])


def random_requests(part: Any, solution: Any, seed: int, **sizes: int) -> None:
    """Serve forty requests that arrive at random; expect each step to be the solution's step."""
    mine, right = SchedulerBench(part, **sizes), SchedulerBench(solution, **sizes)
    longest = sizes["num_blocks"] * sizes["block_size"]
    rng = random.Random(seed)
    left = 40
    while left or right.live():
        for _ in range(min(left, rng.choice((0, 0, 1, 3)))):
            prompt = rng.randint(1, sizes["budget"] - sizes["max_num_seqs"])
            output = min(rng.randint(1, 12), longest - prompt)
            mine.arrive(prompt, output)
            right.arrive(prompt, output)
            left -= 1
        mine.expect_batches([right.step()])
    mine.expect_whole()


def forty_requests_in_batch_slots(part: Any) -> None:
    """forty requests that arrive at random steps, served in the order of arrival:"""
    random_requests(part, SlotScheduler, 1, max_num_seqs=3, budget=16, num_blocks=10, block_size=4)


def a_long_prompt_is_chunked_beside_decodes(part: Any) -> None:
    """8 tokens per step: a prompt of 17 tokens while another request decodes:"""
    bench = SchedulerBench(part, budget=8)
    bench.arrive(4, 6)
    bench.expect_batches([{1: 4}])
    bench.arrive(17, 2)
    bench.expect_batches([{1: 1, 2: 7}, {1: 1, 2: 7}, {1: 1, 2: 3}, {1: 1, 2: 1}, {1: 1}, {}])
    bench.expect_whole()


def decodes_go_before_prompts(part: Any) -> None:
    """a prompt of 30 tokens that arrives between two requests that decode:"""
    bench = SchedulerBench(part, budget=8, max_num_seqs=3)
    bench.arrive(5, 9)
    bench.arrive(30, 2)
    bench.expect_batches([{1: 5, 2: 3}, {1: 1, 2: 7}])
    bench.arrive(2, 5)
    bench.expect_batches([{1: 1, 2: 7}, {1: 1, 2: 7}, {1: 1, 2: 6, 3: 1}, {1: 1, 2: 1, 3: 1}])
    bench.drain(8)


def the_rest_of_a_step_goes_to_the_next_prompt(part: Any) -> None:
    """10 tokens per step, and prompts of 12, 5 and 6 tokens that arrive together:"""
    bench = SchedulerBench(part, budget=10)
    for prompt in (12, 5, 6):
        bench.arrive(prompt, 3)
    bench.expect_batches([{1: 10}, {1: 2, 2: 5, 3: 3}, {1: 1, 2: 1, 3: 3}])
    bench.drain(4)


def a_full_step_admits_no_request(part: Any) -> None:
    """8 tokens per step, prompts of 8 tokens: none starts in a step without tokens left:"""
    bench = SchedulerBench(part, budget=8, max_num_seqs=2)
    bench.arrive(8, 2)
    bench.arrive(8, 2)
    bench.arrive(3, 1)
    bench.expect_batches([{1: 8}])
    bench.sequences[1].finish_reason = "abort"
    bench.abort(2)
    bench.expect_batches([{1: 1, 3: 3}, {}])
    bench.expect_whole()


def batch_slots_and_blocks_still_limit(part: Any) -> None:
    """two batch slots, and blocks for the longest answers of two requests:"""
    bench = SchedulerBench(part, budget=8, max_num_seqs=2, num_blocks=7)
    for prompt, output in ((4, 4), (13, 5), (9, 3), (2, 2)):
        bench.arrive(prompt, output)
    bench.expect_batches([{1: 4, 2: 4}, {1: 1, 2: 7}, {1: 1, 2: 2}, {1: 1, 2: 1}, {2: 1}])
    bench.expect_batches([{2: 1}, {2: 1}, {3: 8}, {3: 1, 4: 2}, {3: 1, 4: 1}, {3: 1}, {}])
    bench.expect_whole()


def forty_requests_in_chunks(part: Any) -> None:
    """forty requests that arrive at random steps, in steps of 9 and of 5 tokens:"""
    random_requests(
        part, ChunkingScheduler, 2, max_num_seqs=4, budget=9, num_blocks=12, block_size=4
    )
    random_requests(
        part, ChunkingScheduler, 5, max_num_seqs=2, budget=5, num_blocks=6, block_size=2
    )


def prompts_with_logprobs_take_32_tokens_per_step(part: Any) -> None:
    """two prompts with prompt_logprobs (at most 32 tokens per step), 64 tokens per step:"""
    bench = SchedulerBench(part, budget=64, block_size=16)
    bench.arrive(80, 2, logprobs=True)
    bench.arrive(40, 2, logprobs=True)
    bench.expect_batches([{1: 32, 2: 32}, {1: 32, 2: 8}, {1: 16, 2: 1}])
    bench.drain(4)


def blocks_for_now_are_enough_to_start(part: Any) -> None:
    """6 blocks of 4 tokens: three requests that need 1 block now and at most 3 later:"""
    bench = SchedulerBench(part, num_blocks=6)
    for _ in range(3):
        bench.arrive(4, 8)
    bench.expect_batches([{1: 4, 2: 4, 3: 4}, {1: 1, 2: 1, 3: 1}])
    bench.drain(30)


def the_last_request_is_preempted(part: Any) -> None:
    """6 blocks of 2 tokens, three prompts of 4: no block is free when the first needs one more:"""
    bench = SchedulerBench(part, num_blocks=6, block_size=2, max_num_seqs=3)
    for _ in range(3):
        bench.arrive(4, 5)
    bench.expect_batches([{1: 4, 2: 4, 3: 4}, {1: 1, 2: 1}, {1: 1, 2: 1}])
    computed = bench.sequences[2].num_computed
    expect_equal(computed, 0, "num_computed of request 3 after its preemption")
    bench.drain(30)


def a_preempted_request_is_recomputed_first(part: Any) -> None:
    """6 blocks of 2 tokens: a fourth request waits when the third of three is preempted:"""
    bench = SchedulerBench(part, num_blocks=6, block_size=2, max_num_seqs=3)
    for _ in range(3):
        bench.arrive(4, 3)
    bench.expect_batches([{1: 4, 2: 4, 3: 4}])
    bench.arrive(1, 1)
    bench.expect_batches([{1: 1, 2: 1}, {1: 1, 2: 1}, {3: 5, 4: 1}, {3: 1}, {}])
    bench.expect_whole()


def a_preempted_request_leaves_the_step(part: Any) -> None:
    """a prompt with prompt_logprobs (at most 32 tokens per step), and three that decode:"""
    bench = SchedulerBench(part, num_blocks=6, block_size=16, budget=64)
    bench.arrive(80, 2, logprobs=True)
    for _ in range(3):
        bench.arrive(10, 5)
    bench.expect_batches([{1: 32, 2: 10, 3: 10, 4: 10}, {1: 32, 2: 1, 3: 1}, {1: 16, 2: 1}])
    bench.drain(20)


def the_last_request_preempts_itself(part: Any) -> None:
    """4 blocks of 2 tokens: the second of two requests needs a block, and is itself the last:"""
    bench = SchedulerBench(part, num_blocks=4, block_size=2, max_num_seqs=2)
    bench.arrive(3, 5)
    bench.arrive(4, 2)
    bench.expect_batches([{1: 3, 2: 4}, {1: 1}, {1: 1}, {1: 1}, {1: 1}, {2: 5}, {}])
    bench.expect_whole()


def forty_requests_in_too_little_memory(part: Any) -> None:
    """forty requests that arrive at random steps, with too few blocks all the time:"""
    for seed, sizes in enumerate(
        (
            {"max_num_seqs": 4, "budget": 9, "num_blocks": 7, "block_size": 4},
            {"max_num_seqs": 5, "budget": 12, "num_blocks": 10, "block_size": 2},
            {"max_num_seqs": 3, "budget": 16, "num_blocks": 14, "block_size": 1},
        )
    ):
        random_requests(part, PreemptingScheduler, 10 + seed, **sizes)


CHECKS = {
    "SlotScheduler": (
        one_request_alone,
        two_run_together,
        a_free_batch_slot_is_taken_at_once,
        no_batch_slot_is_used_twice,
        a_prompt_waits_until_it_fits_into_a_step,
        a_request_starts_with_blocks_for_its_longest_answer,
        an_aborted_request_frees_its_batch_slot_and_blocks,
        two_schedulers_share_no_state,
        forty_requests_in_batch_slots,
    ),
    "ChunkingScheduler": (
        one_request_alone,
        a_long_prompt_is_chunked_beside_decodes,
        decodes_go_before_prompts,
        the_rest_of_a_step_goes_to_the_next_prompt,
        a_full_step_admits_no_request,
        batch_slots_and_blocks_still_limit,
        prompts_with_logprobs_take_32_tokens_per_step,
        two_schedulers_share_no_state,
        forty_requests_in_chunks,
    ),
    "PreemptingScheduler": (
        one_request_alone,
        a_long_prompt_is_chunked_beside_decodes,
        blocks_for_now_are_enough_to_start,
        the_last_request_is_preempted,
        a_preempted_request_is_recomputed_first,
        the_last_request_preempts_itself,
        a_preempted_request_leaves_the_step,
        two_schedulers_share_no_state,
        forty_requests_in_too_little_memory,
    ),
}
