"""Static batches, for engines without continuous batching. Standard library only."""

from collections.abc import Callable

from benchmarks.peers.loads import Request

Answers = list[list[int]]


def in_batches(
    requests: list[Request], at_once: int, answer: Callable[[list[Request]], Answers]
) -> Answers:
    """Return the answers to all requests, in batches of prompts with similar lengths."""
    order = sorted(range(len(requests)), key=lambda index: len(requests[index]["prompt"]))
    answers: Answers = [[] for _ in requests]
    for begin in range(0, len(order), at_once):
        batch = order[begin : begin + at_once]
        for index, found in zip(batch, answer([requests[each] for each in batch]), strict=True):
            answers[index] = found
    return answers
