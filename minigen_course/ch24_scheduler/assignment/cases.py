"""Cases of chapter 24's exercises, drawn by a seed."""

from random import Random
from typing import Any

from minigen_course.grading.exercise import expect
from minigen_course.grading.varied import Varied
from minigen_course.lab.toy_engine import SchedulerBench

MOST_STEPS = 80

Request = tuple[int, int, int]  # step of its arrival, tokens of its prompt and of its answer


def _requests(random: Random, count: int, longest_prompt: int, longest_answer: int) -> Any:
    found: list[Request] = []
    step = 0
    for _ in range(count):
        prompt, answer = random.randint(1, longest_prompt), random.randint(1, longest_answer)
        found.append((step, prompt, answer))
        step += random.choice((0, 0, 1, 2))
    return found


def _most_blocks(requests: list[Request], block_size: int) -> int:
    return max(-(-(prompt + answer) // block_size) for _, prompt, answer in requests)


def _slot_scheduler(random: Random) -> dict[str, Any]:
    budget, size = random.randint(7, 10), random.choice((2, 3, 4))
    requests = _requests(random, 5, budget - 1, 5)
    stop = random.randint(1, 3)
    arrived = [number for number, (step, *_) in enumerate(requests, 1) if step <= stop]
    return {
        "max_num_seqs": random.choice((2, 2, 3)),
        "max_num_batched_tokens": budget,
        "num_blocks": _most_blocks(requests, size) + random.randint(1, 4),
        "block_size": size,
        "requests": requests,
        "aborted": (stop, random.choice(arrived[-2:])),
    }


def _chunking_scheduler(random: Random) -> dict[str, Any]:
    budget, size = random.randint(5, 8), random.choice((2, 3, 4))
    requests = _requests(random, 5, 2 * budget, 4)
    return {
        "max_num_seqs": random.choice((2, 3)),
        "max_num_batched_tokens": budget,
        "num_blocks": _most_blocks(requests, size) + random.randint(2, 6),
        "block_size": size,
        "requests": requests,
    }


def _preempting_scheduler(random: Random) -> dict[str, Any]:
    size = random.choice((1, 2, 3))
    requests = [
        (step // 2, prompt, answer + 3) for step, prompt, answer in _requests(random, 4, 5, 4)
    ]
    return {
        "max_num_seqs": random.choice((3, 4)),
        "max_num_batched_tokens": random.randint(6, 9),
        "num_blocks": _most_blocks(requests, size) + random.randint(0, 1),
        "block_size": size,
        "requests": requests,
    }


def _served(
    part: Any,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
    block_size: int,
    requests: list[Request],
    aborted: tuple[int, int] | None = None,
) -> Any:
    """Serve requests, each (step of its arrival, tokens of its prompt, tokens of its answer).

    Requests are numbered from 1. The result has, for each step, the tokens that it computes, by
    request.
    """
    bench = SchedulerBench(part, max_num_seqs, max_num_batched_tokens, num_blocks, block_size)
    for now in range(MOST_STEPS):
        for step, prompt, answer in requests:
            if step == now:
                bench.arrive(prompt, answer)
        if aborted is not None and aborted[0] == now:
            sequence = bench.sequences[aborted[1] - 1]
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                bench.abort(aborted[1])
        if len(bench.sequences) == len(requests) and not bench.live():
            break
        bench.step()
    left = [each.sequence_id for each in bench.live()]
    expect(not left, f"after {MOST_STEPS} steps requests {left} should have finished.")
    bench.expect_whole()
    return bench.batches


def _served_with_an_abort(part: Any, **inputs: Any) -> Any:
    """Serve requests, each (step of its arrival, tokens of its prompt, tokens of its answer).

    Requests are numbered from 1. At the beginning of the step `aborted[0]`, request `aborted[1]`
    is aborted if it has not finished. The result has, for each step, the tokens that it computes,
    by request.
    """
    return _served(part, **inputs)


VARIED = {
    "SlotScheduler": Varied(
        "the limits, five requests, and which of them is aborted",
        _slot_scheduler,
        _served_with_an_abort,
        num_cases=8,
    ),
    "ChunkingScheduler": Varied(
        "the limits, and five requests", _chunking_scheduler, _served, num_cases=8
    ),
    "PreemptingScheduler": Varied(
        "the limits, and four requests in too little memory",
        _preempting_scheduler,
        _served,
        num_cases=8,
    ),
}
