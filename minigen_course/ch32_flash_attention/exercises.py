"""Chapter 32's exercises: merge two partial softmaxes, loop over tiles, and write two kernels.

A kernel runs in Triton's interpreter, and every load and store is recorded; a program that
reaches outside its tensors is stopped before the access.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch32_flash_attention.flash import Partial
from minigen_course.ch32_flash_attention.lesson import start_flash, start_unmasked
from minigen_course.grading.exercise import expect, expect_close, expect_equal
from minigen_course.lab.memory_watch import count_memory
from minigen_course.lab.triton_interpreter import Access, expect_numbers, watched


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case_of(num_new: int, context: int, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with four query heads over two KV heads."""
    k, v = _random(context, 2, head_dim, seed=5), _random(context, 2, head_dim, seed=6)
    return _random(num_new, 4, head_dim, seed=4), k, v


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Compute attention one query and one head at a time, over all its keys, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(len(q)):
        position = len(k) - len(q) + token
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            keys = k[begin : position + 1, kv_head].double()
            weights = (keys @ q[token, head].double() / math.sqrt(q.shape[2])).softmax(0)
            out[token, head] = weights @ v[begin : position + 1, kv_head].double()
    return out


Merge = Callable[[Partial, Partial], Partial]
FIELDS = {"maximum": ("query",), "total": ("query",), "mixed": ("query", "dimension")}


def _partial(maximum: list[float], total: list[float], mixed: list[list[float]]) -> Partial:
    return Partial(torch.tensor(maximum), torch.tensor(total), torch.tensor(mixed))


def _merged(part: Merge, one: Partial, other: Partial) -> Partial:
    before = [getattr(each, name).clone() for each in (one, other) for name in FIELDS]
    found: Any = part(one, other)
    missing = [name for name in FIELDS if not isinstance(getattr(found, name, None), Tensor)]
    expect(
        not missing, "did not return a Partial of tensors; return Partial(maximum, total, mixed)."
    )
    now = [getattr(each, name) for each in (one, other) for name in FIELDS]
    same = all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    expect(same, "changed its arguments; return a new Partial.")
    merged: Partial = found
    return merged


def _expect_partial(found: Partial, right: Partial, tolerance: float = 1e-5) -> None:
    for name, axes in FIELDS.items():
        expect_close(getattr(found, name), getattr(right, name), name, axes, tolerance)


def parts_with_equal_maxima_are_added(part: Merge) -> None:
    """one query; both parts have the maximum 3:"""
    one, other = _partial([3.0], [2.0], [[4.0, 0.0]]), _partial([3.0], [1.5], [[1.0, 2.0]])
    _expect_partial(_merged(part, one, other), _partial([3.0], [3.5], [[5.0, 2.0]]))


def the_part_with_the_smaller_maximum_shrinks(part: Merge) -> None:
    """maxima ln 4 and 0, so the second part counts a quarter; and in the other order:"""
    one, other = _partial([math.log(4)], [2.0], [[4.0]]), _partial([0.0], [1.0], [[8.0]])
    right = _partial([math.log(4)], [2.25], [[6.0]])
    _expect_partial(_merged(part, one, other), right)
    _expect_partial(_merged(part, other, one), right)


def every_query_has_its_own_maximum(part: Merge) -> None:
    """two queries; the first has its largest score in one part, the second in the other:"""
    one = _partial([0.0, math.log(4)], [1.0, 3.0], [[1.0, 2.0], [3.0, 4.0]])
    other = _partial([math.log(2), 0.0], [2.0, 4.0], [[2.0, 2.0], [2.0, 6.0]])
    right = _partial([math.log(2), math.log(4)], [2.5, 4.0], [[2.5, 3.0], [3.5, 5.5]])
    _expect_partial(_merged(part, one, other), right)


def large_scores_do_not_overflow(part: Merge) -> None:
    """maxima 1,000 and 999, and -1,000 and -999, whose exp overflows to infinity or becomes 0:"""
    shrunk = math.exp(-1)
    for high, low in ((1000.0, 999.0), (-999.0, -1000.0)):
        one, other = _partial([high], [1.0], [[3.0]]), _partial([low], [1.0], [[1.0]])
        right = _partial([high], [1 + shrunk], [[3 + shrunk]])
        for given in ((one, other), (other, one)):
            found = _merged(part, *given)
            message = "has nan or infinity; exp should be taken only of differences of maxima."
            expect(bool(found.mixed.isfinite().all() and found.total.isfinite().all()), message)
            _expect_partial(found, right)


def a_part_without_keys_adds_nothing(part: Merge) -> None:
    """a part whose keys were all masked, so its maximum is -infinity; and two such parts:"""
    nothing, some = _partial([-math.inf], [0.0], [[0.0]]), _partial([5.0], [2.0], [[4.0]])
    _expect_partial(_merged(part, nothing, some), some)
    _expect_partial(_merged(part, some, nothing), some)
    _expect_partial(_merged(part, nothing, nothing), nothing)


def parts_give_softmax_over_all_keys(part: Merge) -> None:
    """13 keys in parts of 1, 3 and 5; five queries with three heads:"""
    generator = torch.Generator().manual_seed(32)
    scores = 6 * torch.randn(5, 3, 13, generator=generator)
    values = torch.randn(13, 4, generator=generator)
    for size in (1, 3, 5):
        whole = Partial(torch.full((5, 3), -math.inf), torch.zeros(5, 3), torch.zeros(5, 3, 4))
        for own, rows in zip(scores.split(size, dim=-1), values.split(size), strict=True):
            maximum = own.amax(-1)
            weights = (own - maximum.unsqueeze(-1)).exp()
            whole = _merged(part, whole, Partial(maximum, weights.sum(-1), weights @ rows))
        expect_equal(list(whole.total.shape), [5, 3], "the shape of total")
        right, what = scores.softmax(-1) @ values, f"mixed / total of keys in parts of {size}"
        axes = ("query", "head", "dimension")
        expect_close(whole.mixed / whole.total.unsqueeze(-1), right, what, axes)


HEADS = ("token", "head", "dimension")
WIDTH = 16  # head_dim: the smallest that tl.dot accepts


def _unmasked(
    part: Any, num_rows: int, block: int, width: int = WIDTH, size: float = 1
) -> list[Access]:
    """Check attention of one head, in which every query sees every key; return the accesses."""
    q, k, v = (_random(num_rows, width, seed=seed) for seed in (7, 8, 9))
    q, k = size * q, size * k
    given, mixed = [each.clone() for each in (q, k, v)], torch.full_like(q, math.nan)
    accesses = watched(
        lambda: start_unmasked(part, q, k, v, mixed, block), q=q, k=k, v=v, mixed=mixed
    )
    for name, now, before in zip("qkv", (q, k, v), given, strict=True):
        expect(torch.equal(now, before), f"stored into {name}; it must store only the result.")
    what = f"{num_rows} rows of {width} numbers in tiles of {block}"
    message = "has nan or infinity; the largest score so far should be subtracted before exp."
    expect(size == 1 or bool(mixed.isfinite().all()), message)
    expect_numbers(mixed, what, ("row", "dimension"))
    right = (q.double() @ k.double().T / math.sqrt(width)).softmax(-1) @ v.double()
    expect_close(mixed, right, what, ("row", "dimension"), 1e-4 if size == 1 else 1e-2)
    return accesses


def one_tile_is_softmax(part: Any) -> None:
    """16 rows, so one program and one tile of keys:"""
    _unmasked(part, 16, 16)


def a_program_goes_over_all_keys(part: Any) -> None:
    """48 rows, so three programs, each with three tiles of keys:"""
    _unmasked(part, 48, 16)


def tiles_and_heads_have_other_sizes(part: Any) -> None:
    """64 rows in tiles of 32, and heads of 32 numbers:"""
    _unmasked(part, 64, 32)
    _unmasked(part, 32, 16, width=32)


def large_scores_do_not_overflow_without_a_mask(part: Any) -> None:
    """scores of several thousand, whose exp is infinite:"""
    _unmasked(part, 32, 16, size=50)


def each_program_loads_all_keys_once(part: Any) -> None:
    """64 rows in tiles of 16; the number of elements that each program loads and stores:"""
    accesses = _unmasked(part, 64, 16)
    for program in range(4):
        own = [each for each in accesses if each.program == (program, 0, 0)]
        for name, rows in (("q", 16), ("k", 64), ("v", 64), ("mixed", 16)):
            count = sum(len(each.offsets) for each in own if each.tensor == name)
            done = "stores" if name == "mixed" else f"loads from {name}"
            expect_equal(count, rows * WIDTH, f"the elements that program {program} {done}")


UNMASKED_CHECKS = (
    one_tile_is_softmax,
    a_program_goes_over_all_keys,
    tiles_and_heads_have_other_sizes,
    large_scores_do_not_overflow_without_a_mask,
    each_program_loads_all_keys_once,
)


def _run(
    part: Any, case: tuple[Tensor, ...], block_m: int, block_n: int
) -> tuple[Tensor, list[Access]]:
    """Return the kernel's result, which was all nan before, and its loads and stores."""
    before, mixed = [each.clone() for each in case], torch.full_like(case[0], math.nan)
    q, k, v = case
    accesses = watched(
        lambda: start_flash(part, q, k, v, mixed, block_m, block_n), q=q, k=k, v=v, mixed=mixed
    )
    for name, now, then in zip("qkv", case, before, strict=True):
        expect(torch.equal(now, then), f"stored into {name}; it must store only the result.")
    return mixed, accesses


def _expect_programs(
    part: Any, num_new: int, context: int, block_m: int = 16, block_n: int = 16
) -> list[Access]:
    case = case_of(num_new, context, WIDTH)
    mixed, accesses = _run(part, case, block_m, block_n)
    what = f"{num_new} new tokens of {context}, {block_m} queries by {block_n} keys"
    expect_numbers(mixed, what, HEADS)
    expect_close(mixed, reference(*case), what, HEADS)
    return accesses


def one_program_per_head_is_enough(part: Any) -> None:
    """16 tokens, so one tile for each of four heads over two KV heads:"""
    _expect_programs(part, 16, 16)


def a_tile_need_not_be_full(part: Any) -> None:
    """5 tokens in a tile of 16 by 16; its other rows must not be touched:"""
    _expect_programs(part, 5, 5)


def programs_merge_tiles_of_keys(part: Any) -> None:
    """16 new tokens after 23 others, so three tiles of keys:"""
    _expect_programs(part, 16, 39)


def every_program_has_its_queries(part: Any) -> None:
    """40 tokens, so three tiles of queries, the last one half empty:"""
    _expect_programs(part, 40, 40)


def tiles_need_not_be_square(part: Any) -> None:
    """35 new tokens after 6 others, tiles of 16 queries by 32 keys and of 32 by 16:"""
    _expect_programs(part, 35, 41, 16, 32)
    _expect_programs(part, 35, 41, 32, 16)


def large_scores_do_not_overflow_in_a_program(part: Any) -> None:
    """scores of several thousand, whose exp is infinite:"""
    q, k, v = case_of(20, 20, WIDTH)
    mixed, _ = _run(part, (100 * q, 100 * k, v), 16, 16)
    message = "has nan or infinity; the largest score so far should be subtracted before exp."
    expect(bool(mixed.isfinite().all()), message)
    expect_close(mixed, reference(100 * q, 100 * k, v), "the result", HEADS, tolerance=1e-2)


def keys_are_loaded_up_to_the_diagonal(part: Any) -> None:
    """48 tokens; the keys and values that each program loads:"""
    accesses = _expect_programs(part, 48, 48)
    for name in "kv":
        for program in range(3):
            rows = _rows_loaded(accesses, name, program)
            expect(
                max(rows) < 16 * (program + 1),
                f"program ({program}, 0) loads row {max(rows)} of {name}, which none of its "
                f"queries sees; row {16 * program + 15} should be the last.",
            )
            what = f"the number of rows of {name} that program ({program}, 0) loads"
            expect_equal(len(rows), 16 * (program + 1), what)


def _rows_loaded(accesses: list[Access], name: str, program: int) -> list[int]:
    """Return the rows of k or v that a program of head 0 loads, a row once for each load."""
    width = 2 * WIDTH  # two KV heads
    own = [each for each in accesses if each.tensor == name and each.program == (program, 0, 0)]
    numbers = [at for each in own if not each.is_store for at in each.offsets]
    return [at // width for at in numbers if at % width == 0]


def queries_are_loaded_once_and_results_stored_once(part: Any) -> None:
    """40 tokens; the number of elements that all programs load from q, and store:"""
    accesses = _expect_programs(part, 40, 40)
    loads = [each for each in accesses if each.tensor == "q" and not each.is_store]
    stores = [each for each in accesses if each.is_store]
    for done, found in (("loaded from q", loads), ("stored", stores)):
        count = sum(len(each.offsets) for each in found)
        expect_equal(count, 40 * 4 * WIDTH, f"the number of elements {done}")


def tensors_may_have_sixteen_bits(part: Any) -> None:
    """queries, keys and values in float16:"""
    q, k, v = (each.half() for each in case_of(20, 20, WIDTH))
    mixed, _ = _run(part, (q, k, v), 16, 16)
    expect_close(mixed, reference(q, k, v), "the result", HEADS, tolerance=1e-2)


KERNEL_CHECKS = (
    one_program_per_head_is_enough,
    a_tile_need_not_be_full,
    programs_merge_tiles_of_keys,
    every_program_has_its_queries,
    tiles_need_not_be_square,
    large_scores_do_not_overflow_in_a_program,
    keys_are_loaded_up_to_the_diagonal,
    queries_are_loaded_once_and_results_stored_once,
    tensors_may_have_sixteen_bits,
)


Attention = Callable[..., Tensor]


def _attended(
    part: Attention, case: tuple[Tensor, Tensor, Tensor], window: int | None, tile: int
) -> Tensor:
    before = [each.clone() for each in case]
    found = part(*case, window, tile)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    for name, now, then in zip("qkv", case, before, strict=True):
        same = torch.equal(now.nan_to_num(), then.nan_to_num())
        expect(same, f"changed its argument {name}; return a new tensor.")
    return found


def _expect_attention(
    part: Attention, num_new: int, context: int, tile: int, window: int | None = None
) -> None:
    case = case_of(num_new, context)
    what = f"{num_new} new tokens of {context} in tiles of {tile}"
    what += f" with a window of {window}" if window is not None else ""
    found = _attended(part, case, window, tile)
    expect_close(found, reference(*case, window), what, HEADS)


def one_tile_is_enough(part: Attention) -> None:
    """five tokens in one tile:"""
    _expect_attention(part, 5, 5, 8)


def tiles_of_keys_are_merged(part: Attention) -> None:
    """tokens in several tiles, the last one smaller:"""
    for tokens, tile in ((8, 4), (12, 4), (11, 4), (5, 1), (17, 16)):
        _expect_attention(part, tokens, tokens, tile)


def queries_are_the_last_positions(part: Attention) -> None:
    """new tokens after others, several and one:"""
    for num_new, context, tile in ((4, 8, 4), (5, 12, 4), (6, 7, 4), (1, 9, 4), (3, 20, 8)):
        _expect_attention(part, num_new, context, tile)


def windows_limit_the_keys(part: Attention) -> None:
    """windows of 1 to 9 positions, so that whole tiles are outside the window:"""
    for window in (1, 3, 4, 5, 9):
        _expect_attention(part, 12, 12, 4, window)
        _expect_attention(part, 7, 18, 4, window)


def large_scores_do_not_overflow_in_a_loop(part: Attention) -> None:
    """scores of several thousand, in all tiles:"""
    q, k, v = case_of(12, 12)
    found = _attended(part, (100 * q, 100 * k, v), None, 4)
    message = "has nan or infinity; the largest score so far should be subtracted before exp."
    expect(bool(found.isfinite().all()), message)
    expect_close(found, reference(100 * q, 100 * k, v), "the result", HEADS, tolerance=1e-2)


def sixteen_bits_stay_sixteen_bits(part: Attention) -> None:
    """queries, keys and values in bfloat16:"""
    q, k, v = (each.bfloat16() for each in case_of(9, 9))
    found = _attended(part, (q, k, v), None, 4)
    expect_equal(str(found.dtype), "torch.bfloat16", "the dtype of the result")
    expect_close(found, reference(q, k, v), "the result", HEADS, tolerance=5e-2)


def later_tiles_are_not_read(part: Attention) -> None:
    """nan in tiles of keys that no query of a tile sees, after it or before its window:"""
    q, k, v = case_of(12, 12)
    found = _attended(part, (q, _nan(k, 4, 12), _nan(v, 4, 12)), None, 4)
    message = (
        "token {} is nan, from keys after its tile: those tiles should not be computed at all."
    )
    _expect_finite(found[:4], 0, message)
    found = _attended(part, (q, _nan(k, 0, 4), _nan(v, 0, 4)), 3, 4)
    message = "token {} is nan, from keys before its window: those tiles should be skipped."
    _expect_finite(found[8:], 8, message)


def _nan(each: Tensor, begin: int, end: int) -> Tensor:
    spoilt = each.clone()
    spoilt[begin:end] = math.nan
    return spoilt


def _expect_finite(found: Tensor, first: int, message: str) -> None:
    bad = (~found.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
    expect(not bad, message.format(first + bad[0]) if bad else "")


def no_matrix_of_scores_is_made(part: Attention) -> None:
    """512 tokens in tiles of 64; the largest tensor that is allocated on the way:"""
    case = case_of(512, 512, head_dim=16)
    result = case[0].numel() * 4
    largest = count_memory(lambda: _attended(part, case, None, 64)).largest
    expect(
        largest <= 1.5 * result,
        f"allocated a tensor of {largest:,} bytes for 512 tokens; none should be much larger than "
        f"the result ({result:,} bytes), so no tensor should have tokens x tokens elements.",
    )


CHECKS = {
    "merge": (
        parts_with_equal_maxima_are_added,
        the_part_with_the_smaller_maximum_shrinks,
        every_query_has_its_own_maximum,
        large_scores_do_not_overflow,
        a_part_without_keys_adds_nothing,
        parts_give_softmax_over_all_keys,
    ),
    "flash_attention": (
        one_tile_is_enough,
        tiles_of_keys_are_merged,
        queries_are_the_last_positions,
        windows_limit_the_keys,
        large_scores_do_not_overflow_in_a_loop,
        sixteen_bits_stay_sixteen_bits,
        later_tiles_are_not_read,
        no_matrix_of_scores_is_made,
    ),
    "unmasked_kernel": UNMASKED_CHECKS,
    "flash_kernel": KERNEL_CHECKS,
}
