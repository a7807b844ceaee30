"""Tests and parts that learners might hand in for chapter 41's hunt."""

from typing import Any

import torch

from minigen_course.ch41_tensor_parallel import hunt
from minigen_course.ch41_tensor_parallel.lesson import on_ranks, serve_on_ranks


def least_of_all(agreed_blocks: Any) -> None:
    for memories in (
        [(500, 0), (300, 0), (400, 0)],
        [(500, 300), (500, 0)],
        [(500, 0), (500, 300)],
        [(600, 0), (500, 0), (400, 0)],
    ):
        found = on_ranks(agreed_blocks, memories, 7)
        assert set(found) == {min((free - working) // 7 for free, working in memories)}


def agrees_and_fits(agreed_blocks: Any) -> None:
    for first in range(0, 400, 90):
        for second in range(0, 400, 90):
            memories = [(1000, first), (900, second), (800, 150)]
            found = on_ranks(agreed_blocks, memories, 10)
            assert len(set(found)) == 1
            for blocks, (free, working) in zip(found, memories, strict=True):
                assert 10 * blocks + working <= free


def ranks_alike(agreed_blocks: Any) -> None:
    assert on_ranks(agreed_blocks, [(100, 20), (100, 20)], 10) == [8, 8]


def only_agreement(agreed_blocks: Any) -> None:
    for memories in ([(100, 20), (100, 50)], [(100, 20), (50, 20)]):
        assert len(set(on_ranks(agreed_blocks, memories, 10))) == 1


def only_rank_0_is_small(agreed_blocks: Any) -> None:
    assert on_ranks(agreed_blocks, [(90, 40), (100, 20)], 10) == [5, 5]


def two_ranks_only(agreed_blocks: Any) -> None:
    for memories in ([(100, 20), (90, 40)], [(90, 40), (100, 20)], [(100, 70), (90, 0)]):
        fitting = min((free - working) // 10 for free, working in memories)
        assert on_ranks(agreed_blocks, memories, 10) == [fitting, fitting]


def only_answers(agreed_blocks: Any) -> None:
    numbers = on_ranks(agreed_blocks, [(130, 30), (130, 30)], 10)
    first, second = serve_on_ranks(hunt.PROMPTS, numbers).answers
    assert first == second


def wants_own_numbers(agreed_blocks: Any) -> None:
    assert on_ranks(agreed_blocks, [(100, 20), (90, 40)], 10) == [8, 5]


def least_and_most(comm: Any, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """Wasteful: the minimum of free memory minus the maximum of working memory."""
    both = comm.all_gather(torch.tensor([free_bytes, working_bytes])).unflatten(0, (-1, 2))
    return (int(both[:, 0].min()) - int(both[:, 1].max())) // block_bytes


def one_fewer(comm: Any, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = torch.tensor([(free_bytes - working_bytes) // block_bytes])
    return int(comm.all_gather(own).min()) - 1


def only_rank_0_asks(comm: Any, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    own = torch.tensor([(free_bytes - working_bytes) // block_bytes])
    return int(comm.all_gather(own).min()) if comm.rank == 0 else int(own)


def none_at_all(comm: Any, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    return 0
