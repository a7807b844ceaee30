"""Checks of chapter 11: the order of stored rows, and the meaning of stored bytes."""

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minigen_course.grading.exercise import expect, expect_close, expect_equal

UnpermutedRows = Callable[[int, int], Tensor]
Unpack = Callable[[Tensor], Tensor]


def _order(part: UnpermutedRows, num_rows: int, heads: int) -> list[int]:
    found = part(num_rows, heads)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), [num_rows], f"the shape of the order of {num_rows} rows")
    expect_equal(str(found.dtype), "torch.int64", "the order's dtype (it indexes rows)")
    order: list[int] = found.tolist()
    expect_equal(sorted(order), list(range(num_rows)), "the order, sorted (every row once)")
    return order


def _stored(rows: Sequence[str], heads: int) -> list[str]:
    """Return rows as llama.cpp's converter stores them: each head's two halves interleaved."""
    size = len(rows) // heads
    stored = []
    for start in range(0, len(rows), size):
        head = rows[start : start + size]
        first, second = head[: size // 2], head[size // 2 :]
        stored += [row for pair in zip(first, second, strict=True) for row in pair]
    return stored


def one_heads_evens_come_before_its_odds(part: UnpermutedRows) -> None:
    """one head of eight rows:"""
    expect_equal(_order(part, 8, 1), [0, 2, 4, 6, 1, 3, 5, 7], "the order")


def rows_stay_in_their_head(part: UnpermutedRows) -> None:
    """two heads of four rows, and three of six:"""
    expect_equal(_order(part, 8, 2), [0, 2, 1, 3, 4, 6, 5, 7], "the order for two heads")
    right = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11, 12, 14, 16, 13, 15, 17]
    expect_equal(_order(part, 18, 3), right, "the order for three heads")


def it_undoes_what_the_converter_did(part: UnpermutedRows) -> None:
    """rows that llama.cpp's converter has stored:"""
    for heads, size in ((9, 64), (3, 64), (1, 2), (4, 10)):
        rows = [f"head {head} row {row}" for head in range(heads) for row in range(size)]
        stored = _stored(rows, heads)
        back = [stored[place] for place in _order(part, len(rows), heads)]
        expect_equal(back, rows, f"{heads} heads of {size} rows after storing and reordering")


def _block(scale: float, minimum: float, steps: Sequence[int]) -> list[int]:
    """Return the bytes of a block, by the format's definition."""
    packed = [low | high << 4 for low, high in zip(steps[:16], steps[16:], strict=True)]
    return [*struct.pack("<ee", scale, minimum), *packed]


def _unpacked(part: Unpack, blocks: list[list[list[int]]]) -> Tensor:
    given = torch.tensor(blocks, dtype=torch.uint8)
    before = given.clone()
    found = part(given)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect(torch.equal(given, before), "changed its input; return a new tensor.")
    return found


AXES = ("row", "block", "number")
UP = list(range(16))


def steps_are_halves_of_bytes(part: Unpack) -> None:
    """scale 1 and minimum 0, so that the numbers are the steps themselves:"""
    steps = UP + UP[::-1]
    right = torch.tensor([[steps]], dtype=torch.float32)
    expect_close(_unpacked(part, [[_block(1, 0, steps)]]), right, "the numbers", AXES)


def scale_multiplies_and_minimum_is_added(part: Unpack) -> None:
    """scale 0.5 and minimum -3:"""
    steps = UP + [7] * 16
    right = torch.tensor([[[0.5 * step - 3 for step in steps]]])
    expect_close(_unpacked(part, [[_block(0.5, -3, steps)]]), right, "the numbers", AXES)


def each_block_has_its_own_scale_and_minimum(part: Unpack) -> None:
    """two rows of three different blocks:"""
    scales = [[0.25, 1.0, -2.0], [0.125, 4.0, 0.0625]]
    minima = [[-1.0, 0.5, 0.0], [10.0, -0.125, 2.0]]
    generator = torch.Generator().manual_seed(11)
    steps = torch.randint(0, 16, (2, 3, 32), generator=generator)
    blocks = [
        [_block(scales[r][b], minima[r][b], steps[r, b].tolist()) for b in range(3)]
        for r in range(2)
    ]
    scale, minimum = torch.tensor(scales).unsqueeze(-1), torch.tensor(minima).unsqueeze(-1)
    expect_close(_unpacked(part, blocks), steps * scale + minimum, "the numbers", AXES)


def numbers_are_float32_and_exact(part: Unpack) -> None:
    """a scale of 0.0999756 (a float16) and steps of 15:"""
    found = _unpacked(part, [[_block(0.1, 0.7, [15] * 32)]])
    expect_equal(str(found.dtype), "torch.float32", "the dtype of the numbers")
    scale, minimum = struct.unpack("<ee", struct.pack("<ee", 0.1, 0.7))
    right = torch.full((1, 1, 32), 15 * scale + minimum)
    expect_close(found, right, "the numbers", AXES, tolerance=1e-6)


CHECKS = {
    "unpermuted_rows": (
        one_heads_evens_come_before_its_odds,
        rows_stay_in_their_head,
        it_undoes_what_the_converter_did,
    ),
    "unpack_q4_1": (
        steps_are_halves_of_bytes,
        scale_multiplies_and_minimum_is_added,
        each_block_has_its_own_scale_and_minimum,
        numbers_are_float32_and_exact,
    ),
}
