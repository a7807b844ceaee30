"""Chapter 41's hunt: ranks that schedule alike, as long as they have the same room."""

from typing import Any

import torch

from minigen.parallel.comm import Comm
from minigen_course.ch41_tensor_parallel.lesson import (
    AgreedBlocks,
    on_ranks,
    serve_on_ranks,
)
from minigen_course.grading.hunt import Hunt
from minigen_course.grading.messages import expect, expect_equal


def agreed_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """How many blocks every rank's pool has: as many as fit on all of them.

    Each rank calls it with its own free memory, and what of it the rank needs to work in; a block
    takes the same bytes on every rank.
    """
    everybodys = comm.all_gather(torch.tensor([free_bytes]))
    left = int(everybodys.min()) - working_bytes
    return left // block_bytes


def test_agreed_blocks(agreed_blocks: AgreedBlocks) -> None:
    """Assert what holds for every right `agreed_blocks`, and does not for the one above.

    `on_ranks(agreed_blocks, [(free, working), ...], block_bytes)` of
    minigen_course.ch41_tensor_parallel.lesson has a rank for each pair, and returns what
    each says.
    """
    for memories in MEMORIES:
        for order in (memories, memories[::-1]):
            fitting = min((free - working) // 10 for free, working in order)
            assert on_ranks(agreed_blocks, order, 10) == [fitting] * len(order)


# (free, working) bytes by rank: alike, less memory, more work, both, several ranks, odd remainders.
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


def _told_by_rank_0(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    places = torch.zeros(comm.num_ranks, dtype=torch.int64)
    places[comm.rank] = (free_bytes - working_bytes) // block_bytes
    found = comm.all_reduce(places)  # a sum, to which each rank gives one number
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


def all_ranks_say_the_most_that_fits(part: Any) -> None:
    """memories that differ, with 1 to 4 ranks:"""
    for memories in (*MEMORIES, [(640, 40)]):
        fitting = min((free - working) // 10 for free, working in memories)
        what = f"blocks of 10 bytes by rank, where (free, working) bytes are {memories}"
        expect_equal(on_ranks(part, memories, 10), [fitting] * len(memories), what)


def ranks_with_so_many_blocks_stay_together(part: Any) -> None:
    """five requests on ranks that schedule for themselves, with as many blocks as they say:"""
    right = serve_on_ranks(PROMPTS, [40, 40]).answers
    for working in range(0, 50, 7):
        numbers = on_ranks(part, [(130 + working, 30), (130, working)], 10)
        found = serve_on_ranks(PROMPTS, numbers)
        step = found.first_difference
        expect(
            step is None,
            f"with {numbers} blocks the ranks run different batches from step {step} on; they "
            "should never.",
        )
        expect_equal(found.answers, right, f"the answers on both ranks, with {numbers} blocks")


HUNT = Hunt(
    "agreed_blocks",
    agreed_blocks,
    test_agreed_blocks,
    _least_blocks,
    {
        "one that takes the least of what is left": _least_bytes,
        "one whose rank 0 tells the least to all": _told_by_rank_0,
    },
    {
        "lets each rank take what fits its own memory": _own,
        "takes what fits rank 0 on all ranks": _rank_0s,
        "takes the mean of what fits": _mean,
        "takes the most that fits anywhere": _most,
        "takes off what rank 0 needs to work in, though others may need more": _rank_0s_work,
        "looks at the first two ranks only": _two_only,
    },
    (all_ranks_say_the_most_that_fits, ranks_with_so_many_blocks_stay_together),
    (
        "on_ranks returns a number for each rank. What must hold between them?",
        "Which of the numbers that go into the result are the same on all ranks, and which are "
        "each rank's own?",
        "Numbers that all ranks share may still be too many for one of them. Try a rank with less "
        "memory, one with more to work in, and more than two ranks.",
    ),
    "**The report.** *A model on two devices. Each question alone is answered rightly. In the "
    "afternoon, when memory is full and requests are preempted, some answers are nonsense, and "
    "once a day everything stands still, without an error.* Every rank schedules for itself there, "
    "in the same way, and a preempted request returns as soon as there is room. Engines therefore "
    "have ranks agree on their room first: vLLM takes the least number of blocks that any of its "
    "workers can have, SGLang the least free memory of all ranks.",
)
