"""Checks of chapter 32's kernel, in Triton's interpreter; every load and store of it is looked at.

A program that reaches outside of its tensors is stopped before it does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from minigen.teach.accesses import Access
from minigen.teach.checks.flash_cases import case_of, reference
from minigen.teach.checks.watching import expect_numbers, watched
from minigen.teach.flash_launch import start_flash
from minigen.teach.messages import expect, expect_close, expect_equal

HEADS = ("token", "head", "number")
WIDTH = 16  # of the heads: the least that tl.dot takes


def _run(
    part: Any, case: tuple[Tensor, ...], block_m: int, block_n: int
) -> tuple[Tensor, list[Access]]:
    """What the kernel wrote where nothing but nan had been, and all that it loaded and stored."""
    before, mixed = [each.clone() for each in case], torch.full_like(case[0], math.nan)
    q, k, v = case
    accesses = watched(
        lambda: start_flash(part, q, k, v, mixed, block_m, block_n), q=q, k=k, v=v, mixed=mixed
    )
    for name, now, then in zip("qkv", case, before, strict=True):
        expect(torch.equal(now, then), f"stored into {name}; it must only store the result.")
    return mixed, accesses


def _expect_attention(
    part: Any, num_new: int, context: int, block_m: int = 16, block_n: int = 16
) -> list[Access]:
    case = case_of(num_new, context, WIDTH)
    mixed, accesses = _run(part, case, block_m, block_n)
    what = f"{num_new} new tokens of {context}, {block_m} queries by {block_n} keys"
    expect_numbers(mixed, what, HEADS)
    expect_close(mixed, reference(*case), what, HEADS)
    return accesses


def one_tile_holds_all(part: Any) -> None:
    """16 tokens, one tile for each of four heads over two KV heads:"""
    _expect_attention(part, 16, 16)


def a_tile_need_not_be_full(part: Any) -> None:
    """5 tokens in a tile of 16 by 16, whose other rows must not be touched:"""
    _expect_attention(part, 5, 5)


def tiles_of_keys_are_joined(part: Any) -> None:
    """16 tokens behind 23 others, so three tiles of keys:"""
    _expect_attention(part, 16, 39)


def every_program_has_its_queries(part: Any) -> None:
    """40 tokens, three tiles of queries, the last of them half empty:"""
    _expect_attention(part, 40, 40)


def tiles_need_not_be_square(part: Any) -> None:
    """35 tokens behind 6 others, 16 queries by 32 keys and 32 by 16:"""
    _expect_attention(part, 35, 41, 16, 32)
    _expect_attention(part, 35, 41, 32, 16)


def large_scores_do_not_overflow(part: Any) -> None:
    """scores of some thousands, of which exp is infinite:"""
    q, k, v = case_of(20, 20, WIDTH)
    mixed, _ = _run(part, (100 * q, 100 * k, v), 16, 16)
    message = "nan or infinity: the largest score so far should be subtracted before exp."
    expect(bool(mixed.isfinite().all()), message)
    expect_close(mixed, reference(100 * q, 100 * k, v), "the result", HEADS, tolerance=1e-2)


def keys_are_loaded_up_to_the_diagonal(part: Any) -> None:
    """48 tokens, and which keys and values each program loads:"""
    accesses = _expect_attention(part, 48, 48)
    for name in "kv":
        for program in range(3):
            rows = _rows_loaded(accesses, name, program)
            expect(
                max(rows) < 16 * (program + 1),
                f"program ({program}, 0) loads row {max(rows)} of {name}, which none of its "
                f"queries sees; row {16 * program + 15} should be the last.",
            )
            expect_equal(len(rows), 16 * (program + 1), f"rows of {name} that it loads")


def _rows_loaded(accesses: list[Access], name: str, program: int) -> list[int]:
    """Positions of the rows that head 0's program loads of k or v, again if it loads them again."""
    width = 2 * WIDTH  # two KV heads
    own = [each for each in accesses if each.tensor == name and each.program == (program, 0, 0)]
    numbers = [at for each in own if not each.is_store for at in each.offsets]
    return [at // width for at in numbers if at % width == 0]


def queries_come_once_and_only_results_go(part: Any) -> None:
    """40 tokens, and how many numbers all programs load of q, and store:"""
    accesses = _expect_attention(part, 40, 40)
    loads = [each for each in accesses if each.tensor == "q" and not each.is_store]
    stores = [each for each in accesses if each.is_store]
    for done, found in (("loaded of q", loads), ("stored", stores)):
        count = sum(len(each.offsets) for each in found)
        expect_equal(count, 40 * 4 * WIDTH, f"numbers {done}")


def sixteen_bits_come_and_go(part: Any) -> None:
    """queries, keys and values in float16:"""
    q, k, v = (each.half() for each in case_of(20, 20, WIDTH))
    mixed, _ = _run(part, (q, k, v), 16, 16)
    expect_close(mixed, reference(q, k, v), "the result", HEADS, tolerance=1e-2)


KERNEL_CHECKS = (
    one_tile_holds_all,
    a_tile_need_not_be_full,
    tiles_of_keys_are_joined,
    every_program_has_its_queries,
    tiles_need_not_be_square,
    large_scores_do_not_overflow,
    keys_are_loaded_up_to_the_diagonal,
    queries_come_once_and_only_results_go,
    sixteen_bits_come_and_go,
)
