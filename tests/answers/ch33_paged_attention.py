"""Answers to the exercises of chapter 33."""

import inspect
from typing import Any

from minigen_course.ch33_paged_attention.kernels import (
    decode_kernel,
    gather_kernel,
    grouped_kernel,
    join_kernel,
    tiled_kernel,
)
from minigen_course.lab.triton_interpreter import tl
from tests.answers import Answers


def changed(part: Any, *changes: tuple[str, str]) -> Any:
    """Return a kernel with some of its source replaced."""
    source = inspect.getsource(part)
    for old, new in changes:
        assert old in source, f"{part.__name__} has no {old!r} any more"
        source = source.replace(old, new)
    names = dict(vars(inspect.getmodule(part)))
    exec(compile(source, "changed", "exec"), names)
    return names[part.__name__]


def variants(part: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: changed(part, *([change] if isinstance(change[0], str) else change))
        for name, change in changes.items()
    }


def gather_row_by_row(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Right, one position after another."""
    first = tl.program_id(0) * BLOCK_N
    columns = tl.arange(0, BLOCK_W)
    for position in range(first, tl.minimum(first + BLOCK_N, length)):
        block = tl.load(table_ptr + position // BLOCK_SIZE)
        row_ptr = half_ptr + block * block_stride + (position % BLOCK_SIZE) * slot_stride
        row = tl.load(row_ptr + columns, mask=columns < WIDTH)
        tl.store(gathered_ptr + position * WIDTH + columns, row, mask=columns < WIDTH)


def gather_by_numbers(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Right, a tile as one long row of elements."""
    numbers = tl.arange(0, BLOCK_N * BLOCK_W)
    position, column = tl.program_id(0) * BLOCK_N + numbers // BLOCK_W, numbers % BLOCK_W
    wanted = (position < length) & (column < WIDTH)
    entry, slot = position // BLOCK_SIZE, position % BLOCK_SIZE
    block = tl.load(table_ptr + entry, mask=wanted, other=0)
    from_ptr = half_ptr + block * block_stride + slot * slot_stride + column
    number = tl.load(from_ptr, mask=wanted, other=0.0)
    tl.store(gathered_ptr + position * WIDTH + column, number, mask=wanted)


WRONG_GATHERS: dict[str, Any] = {
    "as if contiguous": ("blocks * block_stride + positions % BLOCK_SIZE", "positions"),
    "offset forgotten": (" + positions % BLOCK_SIZE * slot_stride", ""),
    "position for offset": ("positions % BLOCK_SIZE * slot_stride", "positions * slot_stride"),
    "one slot too far": ("positions % BLOCK_SIZE *", "(positions % BLOCK_SIZE + 1) *"),
    "one block too far": ("positions // BLOCK_SIZE,", "positions // BLOCK_SIZE + 1,"),
    "an entry for each position": ("table_ptr + positions // BLOCK_SIZE", "table_ptr + positions"),
    "always blocks of 4": [
        ("positions // BLOCK_SIZE", "positions // 4"),
        ("positions % BLOCK_SIZE", "positions % 4"),
    ],
    "every program the first tile": ("tl.program_id(0) * BLOCK_N + ", ""),
    "tiles of one": ("tl.program_id(0) * BLOCK_N", "tl.program_id(0)"),
    "no mask for the end": (
        "inside[:, None] & (columns < WIDTH)[None, :]",
        "(positions >= 0)[:, None] & (columns < WIDTH)[None, :]",
    ),
    "no mask for the width": (" & (columns < WIDTH)[None, :]", " & (columns >= 0)[None, :]"),
    "the end is one too far": ("positions < length", "positions <= length"),
    "the last is left out": ("positions < length", "positions < length - 1"),
    "slots without a gap": ("* slot_stride", "* WIDTH"),
    "rows as wide as a power of two": (
        "positions[:, None] * WIDTH",
        "positions[:, None] * BLOCK_W",
    ),
    "stored where it was": (
        "gathered_ptr + positions[:, None] * WIDTH",
        "gathered_ptr + at[:, None]",
    ),
    "every row loaded twice": (
        "    tl.store(",
        "    rows = tl.load(half_ptr + at[:, None] + columns[None, :], mask=wanted)\n    tl.store(",
    ),
    "nothing stored": (
        "    tl.store(gathered_ptr + positions[:, None] * WIDTH + columns[None, :], "
        "rows, mask=wanted)",
        "    return",
    ),
}


def join_in_a_loop(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Right, one split after another, merged as in chapter 32."""
    row, dims = tl.program_id(0), tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    maximum = tl.load(maxima_ptr + row * SPLITS)
    total = tl.load(sums_ptr + row * SPLITS)
    mixed = tl.load(parts_ptr + row * SPLITS * HEAD_DIM + dims, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        place = row * SPLITS + split
        theirs = tl.load(maxima_ptr + place)
        higher = tl.maximum(maximum, theirs)
        old, new = tl.exp2(maximum - higher), tl.exp2(theirs - higher)
        part = tl.load(parts_ptr + place * HEAD_DIM + dims, mask=inside, other=0.0)
        mixed = mixed * old + part * new
        total = total * old + tl.load(sums_ptr + place) * new
        maximum = higher
    tl.store(mixed_ptr + row * HEAD_DIM + dims, mixed / total, mask=inside)


def join_by_shares(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Right, with each split's share first, and natural exponents."""
    row = tl.program_id(0)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    places, there = row * SPLITS + splits, splits < SPLITS
    maxima = tl.load(maxima_ptr + places, mask=there, other=-1e30)
    weights = tl.exp((maxima - tl.max(maxima, axis=0)) * 0.6931471805599453)
    sums = tl.load(sums_ptr + places, mask=there, other=0.0)
    shares = weights / tl.sum(weights * sums, axis=0)
    offsets = dims[:, None] + places[None, :] * HEAD_DIM
    wanted = (dims < HEAD_DIM)[:, None] & there[None, :]
    parts = tl.load(parts_ptr + offsets, mask=wanted, other=0.0)
    mixed = tl.sum(parts * shares[None, :], axis=1)
    tl.store(mixed_ptr + row * HEAD_DIM + dims, mixed, mask=dims < HEAD_DIM)


WRONG_JOINS: dict[str, Any] = {
    "no maximum subtracted": (" - tl.max(maxima, axis=0)", ""),
    "maxima forgotten": ("tl.exp2(maxima - tl.max(maxima, axis=0))", "tl.exp2(maxima * 0)"),
    "the sums are not shrunk": ("tl.sum(sums * shrink, axis=0)", "tl.sum(sums, axis=0)"),
    "the parts are not shrunk": ("parts * shrink[:, None]", "parts"),
    "not divided": (" / tl.sum(sums * shrink, axis=0)", ""),
    "the mean of the splits": ("tl.sum(sums * shrink, axis=0)", "(tl.sum(sums, axis=0) * SPLITS)"),
    "natural exponents": ("tl.exp2(", "tl.exp("),
    "shrunk the wrong way round": (
        "maxima - tl.max(maxima, axis=0)",
        "tl.max(maxima, axis=0) - maxima",
    ),
    "masked maxima are 0": ('other=float("-inf")', "other=0.0"),
    "masked maxima are large": ('other=float("-inf")', "other=1e4"),
    "no mask for the splits": ("there = splits < SPLITS", "there = splits >= 0"),
    "no mask for the dimensions": (
        "there[:, None] & (dims < HEAD_DIM)[None, :]",
        "there[:, None] & (dims >= 0)[None, :]",
    ),
    "the first row for all": ("row = tl.program_id(0)", "row = tl.program_id(0) * 0"),
    "the last split is left out": ("there = splits < SPLITS", "there = splits < SPLITS - 1"),
    "rows as wide as a power of two": ("row * SPLITS + splits)[:", "row * BLOCK_S + splits)[:"),
    "the largest split alone": (
        "tl.exp2(maxima - tl.max(maxima, axis=0))",
        "(maxima == tl.max(maxima, axis=0)).to(tl.float32)",
    ),
    "nothing stored": (
        "    tl.store(mixed_ptr + row * HEAD_DIM + dims, mixed, mask=dims < HEAD_DIM)",
        "    return",
    ),
}


def grouped_row_by_row(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Right, one query head after another over keys that are loaded once, without tl.dot."""
    dims, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    head, wide = tl.program_id(0), dims < HEAD_DIM
    from_token = tokens * KV_HEADS * HEAD_DIM + head * HEAD_DIM
    inside = (tokens < length)[:, None] & wide[None, :]
    keys = tl.load(keys_ptr + from_token[:, None] + dims[None, :], mask=inside, other=0.0)
    values = tl.load(values_ptr + from_token[:, None] + dims[None, :], mask=inside, other=0.0)
    for member in range(0, GROUP):
        row = (head * GROUP + member) * HEAD_DIM + dims
        query = tl.load(q_ptr + row, mask=wide, other=0.0) * (scale * 0.6931471805599453)
        scores = tl.sum(keys * query[None, :], axis=1)
        scores = tl.where(tokens < length, scores, -1e30)
        powers = tl.exp(scores - tl.max(scores, axis=0))
        mixed = tl.sum(values * (powers / tl.sum(powers, axis=0))[:, None], axis=0)
        tl.store(mixed_ptr + row, mixed, mask=wide)


WRONG_GROUPED: dict[str, Any] = {
    "no mask for the end": ("there = seen[:, None]", "there = (positions >= 0)[:, None]"),
    "no mask for the dimensions": (
        "seen[:, None] & (dims < HEAD_DIM)[None, :]",
        "seen[:, None] & (dims >= 0)[None, :]",
    ),
    "masked scores are 0": ('scores, float("-inf"))', "scores, 0.0)"),
    "no maximum": (" - tl.max(scores, axis=1)[:, None]", ""),
    "not divided": (" / tl.sum(weights, axis=1)[:, None]", ""),
    "one sum for all heads": (
        "tl.sum(weights, axis=1)[:, None]",
        "tl.sum(tl.sum(weights, axis=1), axis=0)",
    ),
    "scale forgotten": (' input_precision="ieee") * scale', ' input_precision="ieee")'),
    "natural exponents": ("tl.exp2(", "tl.exp("),
    "the first KV head for all": ("positions * KV_HEADS + kv_head", "positions * KV_HEADS"),
    "as if there were one KV head": ("positions * KV_HEADS + kv_head", "positions + kv_head"),
    "KV heads one after another": (
        "positions * KV_HEADS + kv_head",
        "kv_head * length + positions",
    ),
    "heads taken in turn": ("kv_head * GROUP + members", "members * KV_HEADS + kv_head"),
    "a padded group": ("kv_head * GROUP + members", "kv_head * BLOCK_G + members"),
    "the first of the group alone": ("(members < GROUP)[:, None]", "(members < 1)[:, None]"),
    "keys for values": ("tl.load(values_ptr", "tl.load(keys_ptr"),
    "the last token is left out": ("positions < length", "positions < length - 1"),
    "keys loaded for each head again": (
        "    scores = tl.dot(",
        "    for member in range(1, GROUP):\n"
        "        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)\n"
        "    scores = tl.dot(",
    ),
    "nothing stored": ("    tl.store(mixed_ptr + rows, mixed, mask=wanted)", "    return"),
}


def tiled_block_by_block(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    mixed_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Right, a block at a time, for any tile size, divided at every step."""
    head, row = tl.program_id(0), tl.program_id(1)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    slots, inside = tl.arange(0, BLOCK_SIZE), (dims < HEAD_DIM)[None, :]
    places = (row * KV_HEADS * GROUP + head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    own = (members < GROUP)[:, None] & inside
    q = tl.load(q_ptr + places, mask=own, other=0.0) * scale
    length = tl.load(lengths_ptr + row).to(tl.int32)
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total, mean = tl.zeros((BLOCK_G,), tl.float32), tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for index in range(0, tl.cdiv(length, BLOCK_SIZE)):
        block = tl.load(tables_ptr + row * table_stride + index)
        at = block * block_stride + slots * slot_stride + head * head_stride
        seen = index * BLOCK_SIZE + slots < length
        wanted = seen[:, None] & inside
        keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=wanted, other=0.0)
        values = tl.load(values_ptr + at[:, None] + dims[None, :], mask=wanted, other=0.0)
        scores = tl.sum(q[:, None, :] * keys[None, :, :], axis=2)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights, old = tl.exp2(scores - higher[:, None]), total * tl.exp2(maximum - higher)
        total, maximum = old + tl.sum(weights, axis=1), higher
        new = tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
        mean = (mean * old[:, None] + new) / total[:, None]
    tl.store(mixed_ptr + places, mean, mask=own)


TILED_BY_NUMBER = (
    ("range(0, length, BLOCK_N)", "range(0, tl.cdiv(length, BLOCK_N))"),
    ("positions = start + tl.arange", "positions = start * BLOCK_N + tl.arange"),
)
WRONG_TILED: dict[str, Any] = {
    "as if contiguous": ("blocks * block_stride + positions % BLOCK_SIZE", "positions"),
    "offset forgotten": (" + positions % BLOCK_SIZE * slot_stride", ""),
    "one slot too far": ("positions % BLOCK_SIZE *", "(positions % BLOCK_SIZE + 1) *"),
    "one table for all": ("sequence * table_stride + ", ""),
    "one head for all": (" + kv_head * head_stride", ""),
    "one length for all": ("lengths_ptr + sequence", "lengths_ptr"),
    "heads taken in turn": (
        "(sequence * KV_HEADS + kv_head) * GROUP + members",
        "sequence * KV_HEADS * GROUP + members * KV_HEADS + kv_head",
    ),
    "the first tile alone": ("range(0, length, BLOCK_N)", "range(0, BLOCK_N, BLOCK_N)"),
    "the last tile is left out": (
        "range(0, length, BLOCK_N)",
        "range(0, length // BLOCK_N * BLOCK_N, BLOCK_N)",
    ),
    "masked scores are 0": (
        'scores, float("-inf"))\n        higher',
        "scores, 0.0)\n        higher",
    ),
    "no maximum": ("higher = tl.maximum(maximum, tl.max(scores, axis=1))", "higher = maximum * 0"),
    "the tile's own maximum": (
        "tl.maximum(maximum, tl.max(scores, axis=1))",
        "tl.max(scores, axis=1)",
    ),
    "the sum is not shrunk": ("total * shrink +", "total +"),
    "the mix is not shrunk": ("mixed * shrink[:, None] +", "mixed +"),
    "the maximum is forgotten": ("        maximum = higher\n", ""),
    "the maximum begins at 0": ('float("-inf"), tl.float32)', "0.0, tl.float32)"),
    "not divided": ("mixed / total[:, None]", "mixed"),
    "scale forgotten": (' input_precision="ieee") * scale', ' input_precision="ieee")'),
    "natural exponents": ("tl.exp2(", "tl.exp("),
    "unused slots loaded": ("there = seen[:, None] &", "there = (blocks >= 0)[:, None] &"),
    "each tile loaded twice": (
        "        scores = tl.dot(",
        "        keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=there, other=0.0)\n"
        "        scores = tl.dot(",
    ),
}


def decode_block_by_block(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Right, a block at a time, for any tile size; splits take whole blocks."""
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    slots, inside = tl.arange(0, BLOCK_SIZE), (dims < HEAD_DIM)[None, :]
    heads = row * KV_HEADS * GROUP + head * GROUP + members
    own = (members < GROUP)[:, None] & inside
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=own, other=0.0) * scale
    length = tl.load(lengths_ptr + row).to(tl.int32)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    each = tl.cdiv(num_blocks, SPLITS)
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((BLOCK_G,), tl.float32), tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for index in range(split * each, tl.minimum((split + 1) * each, num_blocks)):
        block = tl.load(tables_ptr + row * table_stride + index)
        at = block * block_stride + slots * slot_stride + head * head_stride
        seen = index * BLOCK_SIZE + slots < length
        keys = tl.load(
            keys_ptr + at[:, None] + dims[None, :], mask=seen[:, None] & inside, other=0.0
        )
        scores = tl.sum(q[:, None, :] * keys[None, :, :], axis=2)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(maximum - higher)
        values = tl.load(
            values_ptr + at[:, None] + dims[None, :], mask=seen[:, None] & inside, other=0.0
        )
        total = total * shrink + tl.sum(weights, axis=1)
        new = tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
        mixed, maximum = mixed * shrink[:, None] + new, higher
    places = heads * SPLITS + split
    tl.store(parts_ptr + places[:, None] * HEAD_DIM + dims[None, :], mixed, mask=own)
    tl.store(maxima_ptr + places, maximum, mask=members < GROUP)
    tl.store(sums_ptr + places, total, mask=members < GROUP)


DECODE_OF_TOKENS = (
    ("tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)", "share = tl.cdiv(length, SPLITS)"),
    ("begin = split * tiles * BLOCK_N", "begin = split * share"),
    ("tl.minimum(begin + tiles * BLOCK_N, length)", "tl.minimum(begin + share, length)"),
)
DECODE_DEALT_OUT = (
    ("tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)", "begin = split * BLOCK_N"),
    ("    begin = split * tiles * BLOCK_N\n", ""),
    ("end = tl.minimum(begin + tiles * BLOCK_N, length)", "end = length"),
    ("range(begin, end, BLOCK_N)", "range(begin, end, BLOCK_N * SPLITS)"),
)
WRONG_DECODES: dict[str, Any] = {
    "as if contiguous": ("blocks * block_stride + positions % BLOCK_SIZE", "positions"),
    "offset forgotten": (" + positions % BLOCK_SIZE * slot_stride", ""),
    "one slot too far": ("positions % BLOCK_SIZE *", "(positions % BLOCK_SIZE + 1) *"),
    "one table for all": ("sequence * table_stride + ", ""),
    "one head for all": (" + kv_head * head_stride", ""),
    "heads taken in turn": (
        "(sequence * KV_HEADS + kv_head) * GROUP + members",
        "sequence * KV_HEADS * GROUP + members * KV_HEADS + kv_head",
    ),
    "a padded group": ("kv_head) * GROUP + members", "kv_head) * BLOCK_G + members"),
    "masked scores are 0": (
        'scores, float("-inf"))\n        higher',
        "scores, 0.0)\n        higher",
    ),
    "no maximum": ("higher = tl.maximum(maximum, tl.max(scores, axis=1))", "higher = maximum * 0"),
    "the tile's own maximum": (
        "tl.maximum(maximum, tl.max(scores, axis=1))",
        "tl.max(scores, axis=1)",
    ),
    "the sum is not shrunk": ("total * shrink +", "total +"),
    "the mix is not shrunk": ("mixed * shrink[:, None] +", "mixed +"),
    "the maximum is forgotten": ("        maximum = higher\n", ""),
    "scale forgotten": (' input_precision="ieee") * scale', ' input_precision="ieee")'),
    "natural exponents": ("tl.exp2(", "tl.exp("),
    "keys for values": ("tl.load(values_ptr", "tl.load(keys_ptr"),
    "unused slots loaded": ("there = seen[:, None] &", "there = (blocks >= 0)[:, None] &"),
    "the last token is left out": (
        "begin + tiles * BLOCK_N, length)",
        "begin + tiles * BLOCK_N, length - 1)",
    ),
    "the first tile is left out": (
        "range(begin, end, BLOCK_N)",
        "range(begin + BLOCK_N, end, BLOCK_N)",
    ),
    "every split has all": [
        ("begin = split * tiles * BLOCK_N", "begin = split * 0"),
        ("end = tl.minimum(begin + tiles * BLOCK_N, length)", "end = length"),
    ],
    "the maximum begins at 0": ('float("-inf"), tl.float32)', "0.0, tl.float32)"),
    "splits rounded down": (
        "tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)",
        "tl.cdiv(length, BLOCK_N) // SPLITS",
    ),
    "divided already": (
        "parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mixed,",
        "parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None],",
    ),
    "splits stored over each other": ("parts = rows * SPLITS + split", "parts = rows * SPLITS"),
    "the maxima are not stored": (
        "    tl.store(maxima_ptr + parts, maximum, mask=members < GROUP)\n",
        "",
    ),
    "each tile loaded twice": (
        "        scores = tl.dot(",
        "        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)\n"
        "        scores = tl.dot(",
    ),
}

ANSWERS = {
    "gather_kernel": Answers(
        right=(gather_row_by_row, gather_by_numbers),
        wrong=variants(gather_kernel, WRONG_GATHERS),
        equivalent={},
    ),
    "grouped_kernel": Answers(
        right=(
            grouped_row_by_row,
            changed(
                grouped_kernel,
                (
                    'tl.dot(q, tl.trans(keys), input_precision="ieee")',
                    "tl.sum(q[:, None, :] * keys[None, :, :], axis=2)",
                ),
            ),
        ),
        wrong=variants(grouped_kernel, WRONG_GROUPED),
        equivalent={
            "0.0 -> 1.0": "queries past the group are not stored; past head_dim keys are 0",
            "0.0 -> 1.0 #2": "masked keys score -inf; past head_dim queries are 0",
            "0.0 -> 1.0 #3": "masked values have weight 0; past head_dim nothing is stored",
        },
    ),
    "tiled_kernel": Answers(
        right=(tiled_block_by_block, changed(tiled_kernel, *TILED_BY_NUMBER)),
        wrong=variants(tiled_kernel, WRONG_TILED),
        equivalent={
            "0 -> 1 #6": "the block of a masked token: nothing of it is loaded",
            "0.0 -> 1.0": "queries past the group are not stored; past head_dim keys are 0",
            "0.0 -> 1.0 #2": "masked keys score -inf; past head_dim queries are 0",
            "0.0 -> 1.0 #3": "masked values have weight 0; past head_dim nothing is stored",
        },
    ),
    "join_kernel": Answers(
        right=(join_in_a_loop, join_by_shares),
        wrong=variants(join_kernel, WRONG_JOINS),
        equivalent={
            "0.0 -> 1.0": "the sum of a masked split is multiplied by 2^-inf",
            "0.0 -> 1.0 #2": "and so is its part; masked dimensions are not stored",
        },
    ),
    "decode_kernel": Answers(
        right=(
            decode_block_by_block,
            changed(decode_kernel, *DECODE_OF_TOKENS),
            changed(decode_kernel, *DECODE_DEALT_OUT),
        ),
        wrong=variants(decode_kernel, WRONG_DECODES),
        equivalent={
            "0 -> 1 #5": "the block of a masked token: nothing of it is loaded",
            "0.0 -> 1.0": "queries past the group are not stored; past head_dim keys are 0",
            "0.0 -> 1.0 #2": "masked keys score -inf; past head_dim queries are 0",
            "0.0 -> 1.0 #3": "masked values have weight 0; past head_dim nothing is stored",
        },
    ),
}
