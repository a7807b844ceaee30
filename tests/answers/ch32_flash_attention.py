"""Answers to the exercises of chapter 32."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minigen.model.attention import attention_naive, causal_mask
from minigen_course.ch32_flash_attention.flash import Partial, attend_tile, merge, nothing_seen
from minigen_course.ch32_flash_attention.kernels import flash_kernel, tl, unmasked_kernel
from tests.answers import Answers


def merge_by_stacking(one: Partial, other: Partial) -> Partial:
    """Right: both parts stacked on a new axis."""
    maxima, totals = (
        torch.stack([getattr(each, name) for each in (one, other)]) for name in ("maximum", "total")
    )
    maximum = maxima.amax(dim=0)
    factors = (maxima - maximum).nan_to_num(nan=0.0, neginf=-math.inf).exp()
    mixed = torch.stack([one.mixed, other.mixed])
    return Partial(maximum, (totals * factors).sum(0), (mixed * factors[..., None]).sum(0))


def merge_by_the_difference(one: Partial, other: Partial) -> Partial:
    """Right: only the part with the smaller maximum shrinks, by the difference."""
    is_larger = one.maximum >= other.maximum
    gap = (one.maximum - other.maximum).abs()
    shrink = torch.where(gap.isnan(), 1.0, (-gap).exp())
    first, second = torch.where(is_larger, 1.0, shrink), torch.where(is_larger, shrink, 1.0)
    return Partial(
        torch.where(is_larger, one.maximum, other.maximum),
        first * one.total + second * other.total,
        first[..., None] * one.mixed + second[..., None] * other.mixed,
    )


def wrong_merge(name: str) -> Callable[[Partial, Partial], Any]:
    def part(one: Partial, other: Partial) -> Any:
        maximum = torch.maximum(one.maximum, other.maximum)
        if name == "the smaller maximum":
            maximum = torch.minimum(one.maximum, other.maximum)
        if name == "one maximum for all queries":
            maximum = maximum.max().expand(maximum.shape)
        base = maximum.where(maximum.isfinite(), 0)
        if name == "nothing less nothing":
            base = maximum
        factors = [(each.maximum - base).exp() for each in (one, other)]
        if name == "nothing shrinks":
            factors = [torch.ones_like(base)] * 2
        if name == "upside down":
            factors = [(base - each.maximum).exp() for each in (one, other)]
        if name == "maxima are raised":
            factors = [each.maximum.exp() / base.exp() for each in (one, other)]
        if name == "only the first shrinks":
            factors[1] = torch.ones_like(base)
        if name == "exchanged":
            factors.reverse()
        if name == "powers of two":
            factors = [(each.maximum - base).exp2() for each in (one, other)]
        sums = [torch.ones_like(base)] * 2 if name == "sums do not shrink" else factors
        rows = [torch.ones_like(base)] * 2 if name == "values do not shrink" else factors
        total = one.total * sums[0] + other.total * sums[1]
        mixed = one.mixed * rows[0][..., None] + other.mixed * rows[1][..., None]
        if name == "divided already":
            mixed = mixed / total[..., None]
        if name == "changes its arguments":
            one.total.copy_(total)
        return (maximum, total, mixed) if name == "a tuple" else Partial(maximum, total, mixed)

    return part


WRONG_MERGES = [
    *("the smaller maximum", "one maximum for all queries", "nothing less nothing"),
    *("nothing shrinks", "upside down", "maxima are raised", "only the first shrinks"),
    *("exchanged", "powers of two", "sums do not shrink", "values do not shrink"),
    *("divided already", "changes its arguments", "a tuple"),
]


def flash_by_head(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, tile: int = 64
) -> Tensor:
    """Right: a head at a time, tiles of keys on multiples of their size, the sums written out."""
    out, before = torch.zeros_like(q), len(k) - len(q)
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        for begin in range(0, len(q), tile):
            rows = torch.arange(begin, min(begin + tile, len(q)))
            positions = (before + rows)[:, None]
            last = int(positions[-1])
            first = 0 if window is None else max(0, int(positions[0]) - window + 1)
            top = torch.full((len(rows), 1), -math.inf)
            total, mixed = torch.zeros(len(rows), 1), torch.zeros(len(rows), q.shape[2])
            for start in range(first // tile * tile, last + 1, tile):
                places = torch.arange(start, min(start + tile, len(k)))
                keys, values = k[places, kv_head].float(), v[places, kv_head].float()
                scores = q[rows, head].float() @ keys.T / math.sqrt(q.shape[2])
                seen = places <= positions
                if window is not None:
                    seen &= places > positions - window
                scores = scores.where(seen, -math.inf)
                higher = torch.maximum(top, scores.max(1, keepdim=True).values)
                base = higher.clamp(min=-1e30)
                shrink, weights = (top - base).exp(), (scores - base).exp()
                total = total * shrink + weights.sum(1, keepdim=True)
                mixed, top = mixed * shrink + weights @ values, higher
            out[rows, head] = (mixed / total).to(q.dtype)
    return out


def flash_backwards(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, tile: int = 64
) -> Tensor:
    """Right: tiles of keys from the diagonal to the left."""
    mixed = []
    for begin in range(0, len(q), tile):
        own = q[begin : begin + tile]
        stop = len(k) - len(q) + begin + len(own)
        least = 0 if window is None else max(0, stop - len(own) - window + 1)
        found = nothing_seen(own)
        end = stop
        while end > least:
            start = max(end - tile, least)
            seen = causal_mask(len(own), stop - start, window)[:, : end - start]
            found = merge(attend_tile(own, k[start:end], v[start:end], seen), found)
            end = start
        mixed.append((found.mixed / found.total[..., None]).to(q.dtype))
    return torch.cat(mixed)


def wrong_flash(name: str) -> Callable[..., Tensor]:
    def part(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, tile: int = 64) -> Tensor:
        join = partial(wrong_merge("nothing shrinks")) if name == "nothing shrinks" else merge
        out, before = torch.empty_like(q), len(k) - len(q)
        if name == "queries are the first positions":
            before = 0
        if name == "float32 stays":
            out = out.float()
        if name == "no window":
            window = None
        for begin in range(0, len(q), tile):
            own = q[begin : begin + tile]
            position = before + begin
            end = len(k) if name == "all keys" else position + len(own)
            if name == "the last key left out" and end > 1:
                end -= 1
            forgotten = window is None or name == "forgotten tiles computed"
            first = 0 if forgotten else max(position + 1 - window, 0)
            if name == "the window of the last query" and window is not None:
                first = max(position + len(own) - window, 0)
            so_far = nothing_seen(own)
            for start in range(first, end, tile):
                stop = min(start + tile, end)
                if name == "whole tiles only" and stop - start < tile and start > first:
                    continue
                size = position + len(own) - start
                seen = causal_mask(len(own), max(size, 1), window)[:, : stop - start]
                if seen.shape[1] < stop - start:
                    seen = functional.pad(seen, (0, stop - start - seen.shape[1]))
                if name == "no mask":
                    seen = torch.ones_like(seen)
                found = attend_tile(own, k[start:stop], v[start:stop], seen)
                so_far = found if name == "the last tile alone" else join(so_far, found)
            out[begin : begin + tile] = (
                so_far.mixed if name == "not divided" else so_far.mixed / so_far.total.unsqueeze(-1)
            )
            if name == "the first tile alone":
                return out
        return out

    return part


def whole_matrix(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, tile: int = 64
) -> Tensor:
    """Right values, but all scores at once."""
    return attention_naive(q, k, v, window)


def rows_of_the_matrix(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, tile: int = 64
) -> Tensor:
    """Tiles of queries, but all keys of each in one tile."""
    mixed = []
    for begin in range(0, len(q), tile):
        end = len(k) - len(q) + min(begin + tile, len(q))
        first = 0 if window is None else max(0, end - min(tile, len(q) - begin) - window + 1)
        rows = q[begin : begin + tile]
        mixed.append(attention_naive(rows, k[first:end], v[first:end], window))
    return torch.cat(mixed)


WRONG_FLASHES = [
    *("nothing shrinks", "queries are the first positions", "float32 stays", "no window"),
    *("all keys", "the last key left out", "forgotten tiles computed", "no mask"),
    *("the window of the last query", "whole tiles only", "the last tile alone"),
    *("not divided", "the first tile alone"),
]


def kernel_of_powers_of_two(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_new,
    context,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Right: scaled queries, exp2, and a large negative score for masked keys."""
    head, lanes = tl.program_id(1), tl.arange(0, HEAD_DIM)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    places = row[:, None] * (Q_HEADS * HEAD_DIM) + head * HEAD_DIM + lanes[None, :]
    is_query = row[:, None] < num_new
    own = tl.load(q_ptr + places, mask=is_query, other=0).to(tl.float32) * (scale * 1.44269504)
    position = row + context - num_new
    last = tl.minimum(tl.max(position, axis=0), context - 1)
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    weight_sum = tl.full((BLOCK_M,), 0.0, tl.float32)
    answer = tl.full((BLOCK_M, HEAD_DIM), 0.0, tl.float32)
    for number in range(0, last // BLOCK_N + 1):
        key = number * BLOCK_N + tl.arange(0, BLOCK_N)
        at = (key * KV_HEADS + head * KV_HEADS // Q_HEADS)[:, None] * HEAD_DIM + lanes[None, :]
        is_key = key[:, None] < context
        k = tl.load(k_ptr + at, mask=is_key, other=0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=is_key, other=0).to(tl.float32)
        score = tl.dot(own, tl.trans(k), input_precision="ieee")
        score = tl.where(key[None, :] > position[:, None], -1e30, score)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
        factor = tl.exp2(top - new_top)
        weight_sum = weight_sum * factor + tl.sum(weight, axis=1)
        answer = answer * factor[:, None] + tl.dot(weight, v, input_precision="ieee")
        top = new_top
    tl.store(mixed_ptr + places, answer / weight_sum[:, None], mask=is_query)


def kernel_of_two_loops(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_new,
    context,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Right: no mask before the diagonal, and a mask from there on."""
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    rows, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q_at = (rows * Q_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=(rows < num_new)[:, None], other=0.0)
    before = context - num_new
    diagonal = (before + first + 1) // BLOCK_N * BLOCK_N
    k_ptr += head // (Q_HEADS // KV_HEADS) * HEAD_DIM
    v_ptr += head // (Q_HEADS // KV_HEADS) * HEAD_DIM
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, diagonal, BLOCK_N):
        at = (start + tl.arange(0, BLOCK_N))[:, None] * KV_HEADS * HEAD_DIM + dims[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at)), input_precision="ieee") * scale
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        total = total * tl.exp(top - higher) + tl.sum(weights, axis=1)
        values = tl.load(v_ptr + at)
        mixed = mixed * tl.exp(top - higher)[:, None]
        mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    for start in range(diagonal, tl.minimum(before + first + BLOCK_M, context), BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        at = columns[:, None] * KV_HEADS * HEAD_DIM + dims[None, :]
        there = (columns < context)[:, None]
        keys = tl.load(k_ptr + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        seen = columns[None, :] <= (before + rows)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        total = total * tl.exp(top - higher) + tl.sum(weights, axis=1)
        values = tl.load(v_ptr + at, mask=there, other=0.0)
        mixed = mixed * tl.exp(top - higher)[:, None]
        mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    result = (mixed / total[:, None]).to(q.dtype)
    tl.store(mixed_ptr + q_at, result, mask=(rows < num_new)[:, None])


def changed(old: str, new: str, part: Any = flash_kernel) -> Any:
    """Return a kernel of the package with one piece of its source replaced."""
    source = inspect.getsource(part)
    assert old in source, old
    names: dict[str, Any] = {"tl": tl}
    exec(source.replace(old, new), names)
    return names[part.__name__]


def unmasked_by_powers_of_two(
    q_ptr, k_ptr, v_ptr, mixed_ptr, num_rows, scale, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Right: scaled queries, exp2, the last tile first, and sums that begin with the first tile."""
    lanes, dims = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)[None, :]
    at = (tl.program_id(0) * BLOCK + lanes)[:, None] * HEAD_DIM + dims
    own = tl.load(q_ptr + at) * (scale * 1.44269504)
    top = tl.full((BLOCK, 1), -1e30, tl.float32)
    total, answer = tl.zeros((BLOCK, 1), tl.float32), tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for number in range(0, num_rows // BLOCK):
        places = (num_rows - (number + 1) * BLOCK + lanes)[:, None] * HEAD_DIM + dims
        score = tl.dot(own, tl.trans(tl.load(k_ptr + places)), input_precision="ieee")
        higher = tl.maximum(top, tl.max(score, axis=1)[:, None])
        answer *= tl.exp2(top - higher)
        total *= tl.exp2(top - higher)
        weight = tl.exp2(score - higher)
        answer += tl.dot(weight, tl.load(v_ptr + places), input_precision="ieee")
        total += tl.sum(weight, axis=1)[:, None]
        top = higher
    tl.store(mixed_ptr + at, answer / total)


def unmasked_divided_each_time(
    q_ptr, k_ptr, v_ptr, mixed_ptr, num_rows, scale, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Right: the log of the sum is kept, and the answer is whole after each tile."""
    rows, dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])
    log_sum = tl.full((BLOCK,), float("-inf"), tl.float32)
    answer = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(0, num_rows, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        keys = tl.load(k_ptr + columns[None, :] * HEAD_DIM + dims[:, None])
        values = tl.load(v_ptr + columns[:, None] * HEAD_DIM + dims[None, :])
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        top = tl.maximum(log_sum, tl.max(scores, axis=1))
        weights = tl.exp(scores - top[:, None])
        both = tl.exp(log_sum - top) + tl.sum(weights, axis=1)
        answer = answer * (tl.exp(log_sum - top) / both)[:, None]
        answer += tl.dot(weights / both[:, None], values, input_precision="ieee")
        log_sum = top + tl.log(both)
    tl.store(mixed_ptr + rows[:, None] * HEAD_DIM + dims[None, :], answer)


WRONG_UNMASKED = {
    name: changed(old, new, unmasked_kernel)
    for name, (old, new) in {
        "nothing shrinks": ("tl.exp(maximum - higher)", "tl.exp(higher - higher)"),
        "upside down": ("tl.exp(maximum - higher)", "tl.exp(higher - maximum)"),
        "sums do not shrink": ("total * shrink + tl.sum", "total + tl.sum"),
        "values do not shrink": ("mixed * shrink[:, None] + tl.dot", "mixed + tl.dot"),
        "the maximum is forgotten": ("maximum = higher", "maximum = maximum"),
        "the tile's own maximum": (
            "tl.maximum(maximum, tl.max(scores, axis=1))",
            "tl.max(scores, axis=1)",
        ),
        "one maximum for all queries": ("tl.max(scores, axis=1)", "tl.max(tl.max(scores, axis=1))"),
        "no maximum": ("tl.exp(scores - higher[:, None])", "tl.exp(scores)"),
        "no scale": ('input_precision="ieee") * scale', 'input_precision="ieee")'),
        "keys mixed": ("tl.dot(weights, values,", "tl.dot(weights, keys,"),
        "not divided": ("mixed / total[:, None]", "mixed"),
        "divided by the last tile's sum": ("mixed / total[:, None]", "mixed / tl.sum(weights, 1)"),
        "the first tile alone": ("range(0, num_rows, BLOCK)", "range(0, BLOCK, BLOCK)"),
        "without the last tile": ("range(0, num_rows, BLOCK)", "range(0, num_rows - BLOCK, BLOCK)"),
        "causal": (
            "range(0, num_rows, BLOCK)",
            "range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK)",
        ),
        "every program the first tile": ("tl.program_id(0) * BLOCK + ", ""),
        "tiles one row apart": ("tl.program_id(0) * BLOCK", "tl.program_id(0)"),
        "the same tile again": ("(start + tl.arange(0, BLOCK))", "tl.arange(0, BLOCK)"),
        "queries loaded in the loop": (
            "        higher = tl.max",
            "        q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])\n"
            "        higher = tl.max",
        ),
        "stored after each tile": (
            "        maximum = higher",
            "        maximum = higher\n        tl.store(mixed_ptr + rows[:, None] * HEAD_DIM + "
            "dims[None, :], mixed / total[:, None])",
        ),
        "the result over q": ("tl.store(mixed_ptr", "tl.store(q_ptr"),
    }.items()
}


WRONG_KERNELS = {
    "queries loaded again for each tile": changed(
        "        columns = start",
        "        q = tl.load(q_ptr + q_offsets, mask=wanted, other=0.0)\n        columns = start",
    ),
    "no mask of rows": changed("q_offsets, mask=wanted, other=0.0", "q_offsets"),
    "stores rows that are not there": changed(".to(q.dtype), mask=wanted", ".to(q.dtype)"),
    "no mask of keys": changed("k_ptr + kv_offsets, mask=there, other=0.0", "k_ptr + kv_offsets"),
    "values of keys that are not there": changed(
        "v_ptr + kv_offsets, mask=there, other=0.0", "v_ptr + kv_offsets, mask=there"
    ),
    "not causal": changed("columns[None, :] <= positions[:, None]", "(columns < end)[None, :]"),
    "one key ahead": changed("<= positions[:, None]", "<= positions[:, None] + 1"),
    "not itself": changed("<= positions[:, None]", "< positions[:, None]"),
    "queries are the first positions": changed(
        "positions = context - num_new + rows", "positions = rows"
    ),
    "the first tile alone": changed("range(0, end, BLOCK_N)", "range(0, BLOCK_N, BLOCK_N)"),
    "all keys": changed(
        "end = tl.minimum(context - num_new + (tile + 1) * BLOCK_M, context)", "end = context"
    ),
    "steps of the queries' tile": changed("range(0, end, BLOCK_N)", "range(0, end, BLOCK_M)"),
    "nothing shrinks": changed(
        "shrink = tl.exp(maximum - higher)", "shrink = tl.exp(higher - higher)"
    ),
    "upside down": changed("tl.exp(maximum - higher)", "tl.exp(higher - maximum)"),
    "sums do not shrink": changed("total * shrink + tl.sum", "total + tl.sum"),
    "values do not shrink": changed("mixed = mixed * shrink[:, None]", "mixed = mixed"),
    "the maximum is forgotten": changed("maximum = higher", "maximum = maximum"),
    "the tile's own maximum": changed(
        "tl.maximum(maximum, tl.max(scores, axis=1))", "tl.max(scores, axis=1)"
    ),
    "no maximum": changed("weights = tl.exp(scores - higher[:, None])", "weights = tl.exp(scores)"),
    "heads in turn": changed("head // (Q_HEADS // KV_HEADS)", "head % KV_HEADS"),
    "as many KV heads as heads": changed("columns * KV_HEADS", "columns * Q_HEADS"),
    "one head for all": changed("rows * Q_HEADS + head", "rows * Q_HEADS"),
    "no scale": changed('input_precision="ieee") * scale', 'input_precision="ieee")'),
    "keys mixed": changed(
        "tl.dot(weights.to(values.dtype), values,", "tl.dot(weights.to(values.dtype), keys,"
    ),
    "not divided": changed("mixed / total[:, None]", "mixed"),
    "every program the first tile": changed(
        "rows, dims = tile * BLOCK_M", "rows, dims = 0 * BLOCK_M"
    ),
}


ANSWERS = {
    "merge": Answers(
        right=(merge_by_stacking, merge_by_the_difference, wrong_merge("nothing")),
        wrong={name: wrong_merge(name) for name in WRONG_MERGES},
        equivalent={"0 -> 1": "any finite number may be subtracted from -inf"},
    ),
    "flash_attention": Answers(
        right=(flash_by_head, flash_backwards, wrong_flash("nothing")),
        wrong={
            **{name: wrong_flash(name) for name in WRONG_FLASHES},
            "the whole matrix": whole_matrix,
            "rows of the matrix": rows_of_the_matrix,
        },
        equivalent={
            "64 -> 65": "the result does not depend on the tile size",
            "position + 1 -> position - 1": "two more keys, which are masked",
        },
    ),
    "unmasked_kernel": Answers(
        right=(unmasked_by_powers_of_two, unmasked_divided_each_time),
        wrong=WRONG_UNMASKED,
        equivalent={},
    ),
    "flash_kernel": Answers(
        right=(kernel_of_powers_of_two, kernel_of_two_loops),
        wrong=WRONG_KERNELS,
        equivalent={
            "0.0 -> 1.0": "rows past the end are not stored",
            "0.0 -> 1.0 #2": "scores of keys past the end are masked",
            "0.0 -> 1.0 #3": "their values have weight 0",
        },
    ),
}
