"""Checks of chapter 32: parts of a softmax joined, attention as a loop over tiles, and a kernel."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen.kernels.flash import flash_attention
from minigen.kernels.gpu.flash import flash_kernel
from minigen.teach.allocation import count_memory
from minigen.teach.checks.flash_cases import case_of, reference
from minigen.teach.checks.flash_merging import MERGE
from minigen.teach.checks.flash_programs import KERNEL_CHECKS
from minigen.teach.exercises import Exercise
from minigen.teach.messages import expect, expect_close, expect_equal

Attention = Callable[..., Tensor]

HEADS = ("token", "head", "number")


def _attended(
    part: Attention, case: tuple[Tensor, Tensor, Tensor], window: int | None, tile: int
) -> Tensor:
    before = [each.clone() for each in case]
    found = part(*case, window, tile)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    for name, now, then in zip("qkv", case, before, strict=True):
        same = torch.equal(now.nan_to_num(), then.nan_to_num())
        expect(same, f"changed {name}, which it was given; return a new tensor.")
    return found


def _expect_attention(
    part: Attention, num_new: int, context: int, tile: int, window: int | None = None
) -> None:
    case = case_of(num_new, context)
    what = f"{num_new} new tokens of {context} in tiles of {tile}"
    what += f" with a window of {window}" if window is not None else ""
    found = _attended(part, case, window, tile)
    expect_close(found, reference(*case, window), what, HEADS)


def one_tile_holds_all(part: Attention) -> None:
    """five tokens in one tile:"""
    _expect_attention(part, 5, 5, 8)


def tiles_of_keys_are_joined(part: Attention) -> None:
    """tokens in several tiles, the last of them smaller:"""
    for tokens, tile in ((8, 4), (12, 4), (11, 4), (5, 1), (17, 16)):
        _expect_attention(part, tokens, tokens, tile)


def queries_are_the_last_positions(part: Attention) -> None:
    """new tokens behind others, many and one:"""
    for num_new, context, tile in ((4, 8, 4), (5, 12, 4), (6, 7, 4), (1, 9, 4), (3, 20, 8)):
        _expect_attention(part, num_new, context, tile)


def windows_are_kept(part: Attention) -> None:
    """windows of 1 to 9 positions, so that whole tiles are out of sight:"""
    for window in (1, 3, 4, 5, 9):
        _expect_attention(part, 12, 12, 4, window)
        _expect_attention(part, 7, 18, 4, window)


def nobody_overflows(part: Attention) -> None:
    """scores of some thousands, the largest in the first tile and in the last:"""
    q, k, v = case_of(12, 12)
    found = _attended(part, (100 * q, 100 * k, v), None, 4)
    message = "has nan or infinity; the largest score so far should be subtracted before exp."
    expect(bool(found.isfinite().all()), message)
    expect_close(found, reference(100 * q, 100 * k, v), "the result", HEADS, tolerance=1e-2)


def sixteen_bits_stay_sixteen_bits(part: Attention) -> None:
    """queries, keys and values in bfloat16:"""
    q, k, v = (each.bfloat16() for each in case_of(9, 9))
    found = _attended(part, (q, k, v), None, 4)
    expect_equal(str(found.dtype), "torch.bfloat16", "the type of what you return")
    expect_close(found, reference(q, k, v), "the result", HEADS, tolerance=5e-2)


def later_tiles_are_not_read(part: Attention) -> None:
    """keys and values that are nan from the second tile on, which the first one's queries must not
    touch; and with a window, those that all have forgotten:"""
    q, k, v = case_of(12, 12)
    found = _attended(part, (q, _nan(k, 4, 12), _nan(v, 4, 12)), None, 4)
    message = "token {} is nan, by keys behind its tile: these tiles should not be computed at all."
    _expect_finite(found[:4], 0, message)
    found = _attended(part, (q, _nan(k, 0, 4), _nan(v, 0, 4)), 3, 4)
    message = "token {} is nan, by keys before its window: these tiles should be left out."
    _expect_finite(found[8:], 8, message)


def _nan(each: Tensor, begin: int, end: int) -> Tensor:
    spoilt = each.clone()
    spoilt[begin:end] = math.nan
    return spoilt


def _expect_finite(found: Tensor, first: int, message: str) -> None:
    bad = (~found.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
    expect(not bad, message.format(first + bad[0]) if bad else "")


def no_matrix_of_scores_is_made(part: Attention) -> None:
    """512 tokens in tiles of 64, and the bytes of what is made on the way:"""
    case = case_of(512, 512, head_dim=16)
    result = case[0].numel() * 4
    largest = count_memory(lambda: _attended(part, case, None, 64)).largest
    expect(
        largest <= 1.5 * result,
        f"made a tensor of {largest:,} bytes for 512 tokens; none should be much larger than the "
        f"result's {result:,}: no axis of tokens should meet another one.",
    )


FLASH = Exercise(
    "flash_attention",
    flash_attention,
    (
        one_tile_holds_all,
        tiles_of_keys_are_joined,
        queries_are_the_last_positions,
        windows_are_kept,
        nobody_overflows,
        sixteen_bits_stay_sixteen_bits,
        later_tiles_are_not_read,
        no_matrix_of_scores_is_made,
    ),
    (
        "Two loops: over tiles of queries, and within it over tiles of keys. Begin each tile of "
        "queries with nothing_seen(queries).",
        "weigh(queries, keys, values, seen) makes a Partial of one tile, merge joins it to what "
        "was before. The keys of a tile of queries end at its last query's own position + 1.",
        "seen = causal_mask(len(queries), end - start, window)[:, :len(keys)], where start is the "
        "tile's first key and end the end of all keys that the queries see.",
    ),
    "Write attention as a loop over tiles: `tile` queries at a time, and for these `tile` keys at "
    "a time, from the first key that one of them sees to the last query's own. Import `weigh`, "
    "`merge` and `nothing_seen` from `minigen.kernels.flash`, and chapter 14's `causal_mask` from "
    "`minigen.model.attention`.",
    """from minigen import SamplingParams
from minigen.teach import load_model
from minigen.teach.attending import attend_by

llm = load_model(weights="float32", attend=attend_by(mine))
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)""",
    "Exchange the two loops: keys outside, queries inside. What must then be kept for every query, "
    "and why do GPUs have queries outside?",
)

KERNEL = Exercise(
    "flash_kernel",
    flash_kernel,
    KERNEL_CHECKS,
    (
        "First one tile of keys: load q, keys and values with the masks of their rows, scores = "
        "tl.dot(q, tl.trans(keys), input_precision='ieee') * scale.",
        "Three things live through the loop: maximum and total (BLOCK_M numbers), and mixed "
        "(BLOCK_M x HEAD_DIM), all float32. They are shrunk by tl.exp(maximum - higher).",
        "Program tile's last query stands at context - num_new + (tile + 1) * BLOCK_M - 1, or at "
        "context - 1 if that is before. for start in range(0, end, BLOCK_N): is a loop.",
    ),
    "Write the loop over tiles of keys as a kernel: one program for `BLOCK_M` queries of one head, "
    "of which only the result is stored. The launch puts `@triton.jit` on.",
    """from minigen import SamplingParams
from minigen.teach import load_model
from minigen.teach.attending import attend_by
from minigen.teach.flash_launch import flash_by

llm = load_model(weights="float32", attend=attend_by(flash_by(mine)))
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)""",
    "Only the tiles on the diagonal need the mask. Make two loops of one, the first without it, "
    "and count the comparisons that are left.",
)

EXERCISES = (MERGE, FLASH, KERNEL)
