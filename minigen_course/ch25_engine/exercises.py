"""Exercise of chapter 25: an engine loop that delivers every token once, to its own request."""

from typing import Any

from minigen.errors import RequestError
from minigen_course.grading.exercise import Wrong, expect_equal
from minigen_course.lab.toy_engine import LoopBench


def one_answer_is_delivered_token_by_token(part: Any) -> None:
    """a prompt of 5 tokens and an answer of 3:"""
    bench = LoopBench(part)
    sequence = bench.arrive(5, 3)
    expect_equal(sorted(bench.loop.live), [1], "ids in live after add")
    for count in (1, 2, 3):
        bench.step()
        after = f"after step {count - 1}"
        expect_equal(len(bench.delivered), count, f"tokens delivered {after}")
        expect_equal(len(sequence.output_ids), count, f"tokens in the answer {after}")
    bench.expect_whole()


def a_step_without_work_does_nothing(part: Any) -> None:
    """a step before the first request, and a step after the last answer:"""
    bench = LoopBench(part)
    expect_equal(bench.step(), 0, "what a step without requests returns")
    bench.arrive(2, 1)
    bench.step()
    expect_equal(bench.step(), 0, "what a step after the last answer returns")


def a_chunk_of_a_prompt_gives_no_token(part: Any) -> None:
    """a prompt of 20 tokens in steps of 8 tokens: the third step gives the first token:"""
    bench = LoopBench(part, budget=8)
    bench.arrive(20, 2)
    for number, count in enumerate((0, 0, 1, 2)):
        bench.step()
        expect_equal(len(bench.delivered), count, f"tokens delivered after step {number}")
    bench.expect_whole()


def each_row_goes_to_its_own_sequence(part: Any) -> None:
    """five requests that arrive and finish in different steps, one of them with a long prompt:"""
    bench = LoopBench(part, budget=12)
    for prompt, output in ((3, 4), (25, 3), (2, 9)):
        bench.arrive(prompt, output)
    bench.step()
    bench.arrive(4, 1)
    bench.step()
    bench.arrive(1, 5)
    bench.drain()


def several_answers_to_one_prompt(part: Any) -> None:
    """three answers to one prompt, which fork after it, next to another request:"""
    bench = LoopBench(part)
    bench.arrive(6, 3, n=3)
    bench.arrive(2, 5)
    expect_equal(sorted(bench.loop.live), [1, 2, 3, 4], "ids in live (siblings are live too)")
    bench.drain()


def a_preempted_request_repeats_no_token(part: Any) -> None:
    """8 blocks of 4 tokens, four requests of up to 20 tokens: some are preempted and recomputed:"""
    bench = LoopBench(part, num_blocks=8)
    for _ in range(4):
        bench.arrive(8, 12)
    bench.drain()


def an_id_is_free_again_when_its_request_has_finished(part: Any) -> None:
    """a second request with the same id: rejected while the first is live, accepted afterwards:"""
    bench = LoopBench(part)
    bench.arrive(3, 2, n=2)
    for number in (1, 2):
        try:
            bench.arrive(4, 1, number=number)
        except RequestError:
            continue
        raise Wrong(f"add accepted id {number}, which is in use; it should raise RequestError.")
    bench.step()
    bench.step()
    bench.sequences.clear()
    bench.delivered.clear()
    bench.arrive(4, 1, number=1)
    bench.drain()


def an_aborted_request_gets_no_more_tokens(part: Any) -> None:
    """a running request, a request that was just added and an unknown one are aborted:"""
    bench = LoopBench(part)
    running, _, waiting = (bench.arrive(3, 4) for _ in range(3))
    bench.step()
    late = bench.arrive(2, 2)
    for each in (running, late):
        each.finish_reason = "abort"
        bench.calls = []
        bench.loop.abort(each.sequence_id)
        expect_equal(bench.calls, ["abort"], "the calls of the scheduler in abort")
    expect_equal(sorted(bench.loop.live), [2, waiting.sequence_id], "ids in live after two aborts")
    for number in (running.sequence_id, 99):
        try:
            bench.loop.abort(number)
        except RequestError:
            continue
        raise Wrong(
            f"abort({number}) was accepted, but this id is not live; it should raise RequestError."
        )
    bench.drain()


CHECKS = {
    "StepLoop": (
        one_answer_is_delivered_token_by_token,
        a_step_without_work_does_nothing,
        a_chunk_of_a_prompt_gives_no_token,
        each_row_goes_to_its_own_sequence,
        several_answers_to_one_prompt,
        a_preempted_request_repeats_no_token,
        an_id_is_free_again_when_its_request_has_finished,
        an_aborted_request_gets_no_more_tokens,
    ),
}
