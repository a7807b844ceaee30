"""Chapter 41's hunt: ranks that schedule alike as long as they have equally many blocks."""

from typing import Any

import torch

from minigen.parallel.comm import Comm
from minigen_course.ch41_tensor_parallel.lesson import (
    AgreedBlocks,
    on_ranks,
    serve_on_ranks,
)
from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.grading.hunt import Hunt


def agreed_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of every rank's pool: as many as fit on all ranks.

    Each rank calls it with its own free memory, and with the part of it that the rank needs as
    working memory. A block takes the same number of bytes on every rank.
    """
    free = comm.all_gather(torch.tensor([free_bytes]))
    left = int(free.min()) - working_bytes
    return left // block_bytes


def test_agreed_blocks(agreed_blocks: AgreedBlocks) -> None:
    """Assert what holds for every right `agreed_blocks`, and does not hold for the one above.

    `on_ranks(agreed_blocks, [(free, working), ...], block_bytes)` of
    minigen_course.ch41_tensor_parallel.lesson runs one rank per pair, and returns the result of
    each.
    """
    for memories in MEMORIES:
        for order in (memories, memories[::-1]):
            fitting = min((free - working) // 10 for free, working in order)
            assert on_ranks(agreed_blocks, order, 10) == [fitting] * len(order)


# (free, working) bytes by rank: equal, less free, more working, both, three ranks with remainders,
# four ranks.
MEMORIES = (
    [(1000, 100), (1000, 100)],
    [(1000, 100), (700, 100)],
    [(1000, 300), (1000, 100)],
    [(900, 20), (1000, 260)],
    [(1009, 20), (1000, 20), (1000, 15)],
    [(1000, 50), (900, 20), (2000, 1500), (1100, 50)],
)


def _least_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = (free_bytes - working_bytes) // block_bytes
    return int(comm.all_gather(torch.tensor([own])).min())


def _least_bytes(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    left = comm.all_gather(torch.tensor([free_bytes - working_bytes]))
    return min(left.tolist()) // block_bytes


def _broadcast_by_rank_0(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    places = torch.zeros(comm.num_ranks, dtype=torch.int64)
    places[comm.rank] = (free_bytes - working_bytes) // block_bytes
    found = comm.all_reduce(places)  # a sum to which each rank adds one number
    return int(comm.broadcast(found.min().reshape(1)))


def _own(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    return (free_bytes - working_bytes) // block_bytes


def _rank_0s(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    return int(comm.broadcast(torch.tensor([(free_bytes - working_bytes) // block_bytes])))


def _mean(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = torch.tensor([(free_bytes - working_bytes) // block_bytes])
    return int(comm.all_reduce(own)) // comm.num_ranks


def _most(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = torch.tensor([(free_bytes - working_bytes) // block_bytes])
    return int(comm.all_gather(own).max())


def _rank_0s_work(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    least = int(comm.all_gather(torch.tensor([free_bytes])).min())
    return (least - int(comm.broadcast(torch.tensor([working_bytes])))) // block_bytes


def _two_only(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = torch.tensor([(free_bytes - working_bytes) // block_bytes])
    return int(comm.all_gather(own)[:2].min())


PROMPTS = ([5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1], [7, 7, 7, 2, 2, 2, 3])


def all_ranks_return_the_most_that_fits(part: Any) -> None:
    """different memories, on 1 to 4 ranks:"""
    for memories in (*MEMORIES, [(640, 40)]):
        fitting = min((free - working) // 10 for free, working in memories)
        what = f"blocks of 10 bytes on each rank, with (free, working) bytes {memories}"
        expect_equal(on_ranks(part, memories, 10), [fitting] * len(memories), what)


def ranks_with_these_blocks_run_the_same_batches(part: Any) -> None:
    """five requests on ranks that each schedule for themselves, with these numbers of blocks:"""
    right = serve_on_ranks(PROMPTS, [40, 40]).answers
    for working in range(0, 50, 7):
        numbers = on_ranks(part, [(130 + working, 30), (130, working)], 10)
        found = serve_on_ranks(PROMPTS, numbers)
        step = found.first_difference
        expect(
            step is None,
            f"with {numbers} blocks the ranks run different batches from step {step} on; they "
            "should always run the same.",
        )
        expect_equal(found.answers, right, f"the answers on both ranks, with {numbers} blocks")


HUNT = Hunt(
    "agreed_blocks",
    agreed_blocks,
    test_agreed_blocks,
    _least_blocks,
    {
        "one that takes the minimum of the bytes left": _least_bytes,
        "one whose rank 0 broadcasts the minimum": _broadcast_by_rank_0,
    },
    {
        "lets each rank take what fits its own memory": _own,
        "takes what fits rank 0 on all ranks": _rank_0s,
        "takes the mean of what fits": _mean,
        "takes the most that fits on any rank": _most,
        "subtracts rank 0's working memory, though other ranks may need more": _rank_0s_work,
        "looks at the first two ranks only": _two_only,
    },
    (all_ranks_return_the_most_that_fits, ranks_with_these_blocks_run_the_same_batches),
    (
        "on_ranks returns one number per rank. What must hold between these numbers?",
        "Which of the values that go into the result are the same on all ranks, and which differ "
        "by rank?",
        "A number on which all ranks agree may still be too large for one of them. Try a rank with "
        "less memory, one that needs more working memory, and more than two ranks.",
    ),
    "**The report.** *A model runs on two devices. Each question alone gets the right answer. In "
    "the afternoon, when memory is full and requests are preempted, some answers are nonsense, and "
    "once a day everything hangs, without an error.* Every rank there schedules for itself, by the "
    "same rules, and a preempted request returns as soon as there are enough free blocks. Engines "
    "therefore make the ranks agree on the size of the KV cache first: vLLM takes the smallest "
    "number of blocks that any of its workers can have, SGLang the smallest free memory of all "
    "ranks.",
    minutes=25,
)
