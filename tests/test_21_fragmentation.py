"""Requests move through a memory of slots correctly, and idle slots are counted correctly."""

import random

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from minigen.errors import OutOfBlocksError
from minigen_course.ch21_blocks.figures import answer_bars, pixels_of, shares_bars, strip_map
from minigen_course.ch21_blocks.lesson import (
    AdjacentAllocator,
    Moment,
    Piece,
    RequestLengths,
    Run,
    choose_adjacent,
    num_runs,
    run_through,
    runs_per_table,
)
from minigen_course.figures.style import CYCLE
from minigen_course.lab.texts import QUESTIONS


class Blocks:
    """A memory of blocks; each slot is checked to belong to one request only."""

    def __init__(self, num_slots: int, block_size: int):
        self.free, self.block_size = list(range(num_slots // block_size)), block_size
        self.pieces: dict[int, list[tuple[int, int]]] = {}

    def hold(self, request_id: int, num_tokens: int) -> bool:
        own = self.pieces.get(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(own)
        if missing > len(self.free):
            return False
        new = [(self.free.pop() * self.block_size, self.block_size) for _ in range(missing)]
        self.pieces[request_id] = own + new
        return True

    def give_back(self, request_id: int) -> None:
        self.free += [first // self.block_size for first, _ in self.pieces.pop(request_id)]


def tokens_of(moment: Moment) -> dict[int, int]:
    found: dict[int, int] = {}
    for piece in moment.pieces:
        found[piece.request_id] = found.get(piece.request_id, 0) + piece.used
    return found


def test_one_request_grows_by_a_token_a_step_and_leaves() -> None:
    run = run_through(Blocks(8, 2), 8, [RequestLengths(prompt=3, answer=2)])
    assert [tokens_of(each) for each in run.moments] == [{0: 4}, {0: 5}, {}]
    assert run.moments[1].pieces == (Piece(6, 2, 2, 0), Piece(4, 2, 2, 0), Piece(2, 2, 1, 0))
    assert [each.refused for each in run.moments] == [None] * 3


def test_the_first_request_continues_and_the_last_waits_and_holds_its_slots() -> None:
    run = run_through(Blocks(8, 1), 8, [RequestLengths(2, 4), RequestLengths(2, 4)])
    assert [tokens_of(each) for each in run.moments] == [
        *({0: 3, 1: 3}, {0: 4, 1: 4}, {0: 5}, {0: 6}, {1: 5}, {1: 6}, {})
    ]
    assert [each.refused for each in run.moments] == [None, None, 5, 5, None, None, None]


def test_tokens_that_are_computed_again_are_counted() -> None:
    """In 8 slots, the second of two requests is preempted, and starts again with 4 tokens."""
    run = run_through(Blocks(8, 1), 8, [RequestLengths(2, 4), RequestLengths(2, 4)])
    assert run.num_recomputed == 4
    assert run_through(Blocks(12, 1), 12, [RequestLengths(2, 4)] * 2).num_recomputed == 0


def test_free_slots_of_one_size_are_never_scattered() -> None:
    rng = random.Random(3)
    requests = [RequestLengths(rng.randrange(1, 20), rng.randrange(1, 30)) for _ in range(25)]
    run = run_through(Blocks(96, 4), 96, requests)
    assert run.num_enough_but_scattered() == 0
    assert run.shares().external == 0
    assert sum(run.shares()) == pytest.approx(1)


def test_runs_of_adjacent_blocks_are_counted() -> None:
    """Three blocks in two runs, and one block alone; the tables of a run are averaged."""
    pieces = [Piece(4, 4, 4, 0), Piece(8, 4, 4, 0), Piece(0, 4, 2, 0), Piece(12, 4, 1, 1)]
    assert runs_per_table(Run(16, (Moment(tuple(pieces), None),))) == (1.5, 2.0)
    assert num_runs([3, 2, 1]) == 3


def test_adjacent_allocation_keeps_the_counts_of_the_stack() -> None:
    allocator = AdjacentAllocator(9, choose_adjacent)
    first = allocator.allocate(4)
    allocator.release(first[1:3])
    assert allocator.allocate(3) == [5, 6, 7]
    assert allocator.allocate(1) == [2]
    assert allocator.num_free == 3
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_request_gets_all_its_tokens_once_and_in_order(block_size: int) -> None:
    rng = random.Random(block_size)
    requests = [RequestLengths(rng.randrange(1, 20), rng.randrange(1, 30)) for _ in range(25)]
    run = run_through(Blocks(96, block_size), 96, requests)
    reached = [wish.prompt for wish in requests]
    for moment in run.moments:
        slots = [
            slot for each in moment.pieces for slot in range(each.first, each.first + each.size)
        ]
        assert len(set(slots)) == len(slots)
        for request_id, tokens in tokens_of(moment).items():
            assert tokens == reached[request_id] + 1
            reached[request_id] = tokens
    assert reached == [wish.total for wish in requests]


def test_requests_too_large_for_the_memory_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="Request 0 asks for 13 slots, but there are only 8;"):
        run_through(Blocks(8, 2), 8, [RequestLengths(2, 2)], asks=[13])


TWO = Run(
    10,
    (
        Moment((Piece(0, 4, 2, 0), Piece(6, 2, 2, 1)), refused=3),
        Moment((Piece(0, 4, 3, 0),), refused=8),
        Moment((Piece(0, 4, 4, 0),), refused=None),
    ),
)


def test_shares_are_of_the_steps_in_which_a_request_waits() -> None:
    assert TWO.shares() == pytest.approx((7 / 20, 3 / 20, 4 / 20, 6 / 20))
    assert TWO.together() == 1.5
    assert TWO.num_enough_but_scattered() == 1
    alone = Run(10, TWO.moments[2:])
    assert alone.shares() == pytest.approx((0.4, 0.0, 0.0, 0.6))


def test_pixels_are_dark_where_there_are_tokens_pale_where_owned_white_where_free() -> None:
    pixels = pixels_of(TWO)
    full = [round(255 * part) for part in to_rgb(CYCLE[0])]
    assert pixels.shape == (10, 3, 3)
    assert pixels[:2, 0].tolist() == [full] * 2
    assert (pixels[2:4, 0] > full).all()
    assert np.array_equal(pixels[2, 0], pixels[3, 0])
    assert (pixels[4:6, 0] == 255).all()
    assert (pixels[6:, 1] == 255).all()
    assert pixels[:4, 2].tolist() == [full] * 4


def test_a_step_is_described_in_words_and_after_the_last_nothing_changes() -> None:
    title = strip_map(TWO, 1).axes[0].get_title(loc="left")
    assert title == (
        "step 1: 30% of the slots hold tokens, 10% are owned and empty, 60% are free; "
        "the next request asks for 8 slots"
    )
    assert strip_map(TWO, 99).axes[0].get_title(loc="left").startswith("step 2: 40%")


def test_bars_are_the_shares_and_the_lengths() -> None:
    (axes,) = shares_bars({"a": TWO}).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.35, 0.15, 0.2, 0.3])
    (axes,) = answer_bars([3, 4], [9, 2], reserved=20).axes
    assert [bar.get_height() for bar in axes.patches] == [24, 23, 6, 12, 4, 3]


def test_the_questions_differ() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 24
