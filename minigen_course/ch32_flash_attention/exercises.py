"""Chapter 32's exercises: merge two parts of a softmax, attention as a loop over tiles, a kernel.

The kernel runs in Triton's interpreter with every load and store watched; a program that reaches
outside of its tensors is stopped before it does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch32_flash_attention.flash import Partial, flash_attention, merge
from minigen_course.ch32_flash_attention.kernels import flash_kernel
from minigen_course.ch32_flash_attention.lesson import start_flash
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_close, expect_equal
from minigen_course.lab.memory_watch import count_memory, expect_numbers, watched
from minigen_course.lab.triton_interpreter import Access


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case_of(num_new: int, context: int, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads over two KV heads, all random."""
    k, v = _random(context, 2, head_dim, seed=5), _random(context, 2, head_dim, seed=6)
    return _random(num_new, 4, head_dim, seed=4), k, v


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One query and one head at a time, over all its keys, in float64."""
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
FIELDS = {"maximum": ("query",), "total": ("query",), "mixed": ("query", "number")}


def _partial(maximum: list[float], total: list[float], mixed: list[list[float]]) -> Partial:
    return Partial(torch.tensor(maximum), torch.tensor(total), torch.tensor(mixed))


def _merged(part: Merge, one: Partial, other: Partial) -> Partial:
    before = [getattr(each, name).clone() for each in (one, other) for name in FIELDS]
    found: Any = part(one, other)
    missing = [name for name in FIELDS if not isinstance(getattr(found, name, None), Tensor)]
    expect(not missing, "returned no Partial; return Partial(maximum, total, mixed), of tensors.")
    now = [getattr(each, name) for each in (one, other) for name in FIELDS]
    same = all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    expect(same, "changed what it was given; return a new Partial.")
    merged: Partial = found
    return merged


def _expect_partial(found: Partial, right: Partial, tolerance: float = 1e-5) -> None:
    for name, axes in FIELDS.items():
        expect_close(getattr(found, name), getattr(right, name), name, axes, tolerance)


def equal_maxima_only_add_up(part: Merge) -> None:
    """one query, both of whose parts have the maximum 3:"""
    one, other = _partial([3.0], [2.0], [[4.0, 0.0]]), _partial([3.0], [1.5], [[1.0, 2.0]])
    _expect_partial(_merged(part, one, other), _partial([3.0], [3.5], [[5.0, 2.0]]))


def the_part_of_the_lower_maximum_shrinks(part: Merge) -> None:
    """maxima of ln 4 and 0, so that the second part counts a quarter; and the other way round:"""
    one, other = _partial([math.log(4)], [2.0], [[4.0]]), _partial([0.0], [1.0], [[8.0]])
    right = _partial([math.log(4)], [2.25], [[6.0]])
    _expect_partial(_merged(part, one, other), right)
    _expect_partial(_merged(part, other, one), right)


def every_query_has_its_own_maximum(part: Merge) -> None:
    """two queries, of which each has its larger score in another part:"""
    one = _partial([0.0, math.log(4)], [1.0, 3.0], [[1.0, 2.0], [3.0, 4.0]])
    other = _partial([math.log(2), 0.0], [2.0, 4.0], [[2.0, 2.0], [2.0, 6.0]])
    right = _partial([math.log(2), math.log(4)], [2.5, 4.0], [[2.5, 3.0], [3.5, 5.5]])
    _expect_partial(_merged(part, one, other), right)


def large_scores_do_not_overflow(part: Merge) -> None:
    """maxima of 1,000 and 999, and of -1,000 and -999, of which exp is infinite or 0:"""
    shrunk = math.exp(-1)
    for high, low in ((1000.0, 999.0), (-999.0, -1000.0)):
        one, other = _partial([high], [1.0], [[3.0]]), _partial([low], [1.0], [[1.0]])
        right = _partial([high], [1 + shrunk], [[3 + shrunk]])
        for given in ((one, other), (other, one)):
            found = _merged(part, *given)
            message = "has nan or infinity: only differences of maxima should be raised by exp."
            expect(bool(found.mixed.isfinite().all() and found.total.isfinite().all()), message)
            _expect_partial(found, right)


def who_saw_nothing_adds_nothing(part: Merge) -> None:
    """a part whose keys were all hidden, so that its maximum is -infinity, and two such parts:"""
    nothing, some = _partial([-math.inf], [0.0], [[0.0]]), _partial([5.0], [2.0], [[4.0]])
    _expect_partial(_merged(part, nothing, some), some)
    _expect_partial(_merged(part, some, nothing), some)
    _expect_partial(_merged(part, nothing, nothing), nothing)


def parts_give_softmax_over_all_keys(part: Merge) -> None:
    """13 keys in parts of 1, 3 and 5, three query heads of five queries:"""
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
        axes = ("query", "head", "number")
        expect_close(whole.mixed / whole.total.unsqueeze(-1), right, what, axes)


MERGE = Exercise(
    "merge",
    merge,
    (
        equal_maxima_only_add_up,
        the_part_of_the_lower_maximum_shrinks,
        every_query_has_its_own_maximum,
        large_scores_do_not_overflow,
        who_saw_nothing_adds_nothing,
        parts_give_softmax_over_all_keys,
    ),
    (
        "The new maximum is the larger of the two, query by query: torch.maximum.",
        "Each part was computed with its own maximum. To bring it to the new one, multiply its "
        "total and its mixed by exp(its maximum - the new maximum).",
        "Where both maxima are -inf their difference is nan: subtract 0 there instead, as in "
        "maximum.where(maximum.isfinite(), 0).",
    ),
    "Write `merge`: two parts of the keys, each with its maximum, its sum and its mixed values, "
    "become one, as if the keys had been in one part. A part that saw nothing adds nothing.",
    """from minigen import SamplingParams
from minigen_course.ch32_flash_attention.flash import flash_attention
from minigen_course import load_model
from minigen_course.grading.attending import attend_by

llm = load_model(weights="float32", attention_backend=attend_by(flash_attention))
with using(32, merge=mine):  # flash_attention calls it once for every tile
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)""",
    "Chapter 33 cuts a long context into parts that are computed at the same time, and merges "
    "them all at once. Write it for a list of parts, with one exp for each part.",
)


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


def _expect_programs(
    part: Any, num_new: int, context: int, block_m: int = 16, block_n: int = 16
) -> list[Access]:
    case = case_of(num_new, context, WIDTH)
    mixed, accesses = _run(part, case, block_m, block_n)
    what = f"{num_new} new tokens of {context}, {block_m} queries by {block_n} keys"
    expect_numbers(mixed, what, HEADS)
    expect_close(mixed, reference(*case), what, HEADS)
    return accesses


def one_program_holds_all(part: Any) -> None:
    """16 tokens, one tile for each of four heads over two KV heads:"""
    _expect_programs(part, 16, 16)


def a_tile_need_not_be_full(part: Any) -> None:
    """5 tokens in a tile of 16 by 16, whose other rows must not be touched:"""
    _expect_programs(part, 5, 5)


def programs_join_tiles_of_keys(part: Any) -> None:
    """16 tokens behind 23 others, so three tiles of keys:"""
    _expect_programs(part, 16, 39)


def every_program_has_its_queries(part: Any) -> None:
    """40 tokens, three tiles of queries, the last of them half empty:"""
    _expect_programs(part, 40, 40)


def tiles_need_not_be_square(part: Any) -> None:
    """35 tokens behind 6 others, 16 queries by 32 keys and 32 by 16:"""
    _expect_programs(part, 35, 41, 16, 32)
    _expect_programs(part, 35, 41, 32, 16)


def large_scores_do_not_overflow_in_a_program(part: Any) -> None:
    """scores of some thousands, of which exp is infinite:"""
    q, k, v = case_of(20, 20, WIDTH)
    mixed, _ = _run(part, (100 * q, 100 * k, v), 16, 16)
    message = "nan or infinity: the largest score so far should be subtracted before exp."
    expect(bool(mixed.isfinite().all()), message)
    expect_close(mixed, reference(100 * q, 100 * k, v), "the result", HEADS, tolerance=1e-2)


def keys_are_loaded_up_to_the_diagonal(part: Any) -> None:
    """48 tokens, and which keys and values each program loads:"""
    accesses = _expect_programs(part, 48, 48)
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
    accesses = _expect_programs(part, 40, 40)
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
    one_program_holds_all,
    a_tile_need_not_be_full,
    programs_join_tiles_of_keys,
    every_program_has_its_queries,
    tiles_need_not_be_square,
    large_scores_do_not_overflow_in_a_program,
    keys_are_loaded_up_to_the_diagonal,
    queries_come_once_and_only_results_go,
    sixteen_bits_come_and_go,
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
    "`merge` and `nothing_seen` from `minigen_course.ch32_flash_attention.flash`, and chapter "
    "14's `causal_mask` from `minigen.model.attention`.",
    """from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.grading.attending import attend_by

llm = load_model(weights="float32", attention_backend=attend_by(mine))
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
from minigen_course import load_model
from minigen_course.grading.attending import attend_by
from minigen_course.ch32_flash_attention.lesson import flash_by

llm = load_model(weights="float32", attention_backend=attend_by(flash_by(mine)))
print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)""",
    "Only the tiles on the diagonal need the mask. Make two loops of one, the first without it, "
    "and count the comparisons that are left.",
)

EXERCISES = (MERGE, FLASH, KERNEL)
