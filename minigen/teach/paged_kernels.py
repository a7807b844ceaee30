"""Chapter 33's kernels in their plainest form, as its exercises ask for them.

They are functions without `@triton.jit`, which their launch puts on. The engine's own, with windows
and for every GPU, are in `minigen.kernels.gpu.decode`.
"""

from minigen.teach.triton_language import tl


def gather_kernel(
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
    """One program a tile of `BLOCK_N` positions: finds each one's slot, and copies its row.

    `half_ptr` points at a layer's keys, or at its values. A slot's row has `WIDTH` numbers
    (`BLOCK_W` is the power of two that holds them); the row of slot s in block b begins at
    `half_ptr` + b * `block_stride` + s * `slot_stride`. `table_ptr` lists the sequence's blocks;
    their first `length` slots count. Position p's row goes to row p of `gathered_ptr`, whose rows
    follow one another. Each number is loaded once, and no others than these rows'.
    """
    positions = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_W)
    inside = positions < length
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside)
    at = blocks * block_stride + positions % BLOCK_SIZE * slot_stride
    wanted = inside[:, None] & (columns < WIDTH)[None, :]
    rows = tl.load(half_ptr + at[:, None] + columns[None, :], mask=wanted)
    tl.store(gathered_ptr + positions[:, None] * WIDTH + columns[None, :], rows, mask=wanted)


def join_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a query head of a sequence, a row: joins what its splits have found.

    Split s of row r has seen scores (in powers of two) of which `maxima_ptr`[r, s] is the largest.
    `sums_ptr`[r, s] is the sum of its 2^(score - maximum), `parts_ptr`[r, s] (`HEAD_DIM` numbers)
    the sum of these times the values. A split of no tokens has the maximum -inf, and zeros. The
    row's attention over all splits goes to `mixed_ptr`[r]. `BLOCK_S` and `BLOCK_D` are the powers
    of two that hold `SPLITS` and `HEAD_DIM`; all tensors lie row after row. Each number is loaded
    once.
    """
    row = tl.program_id(0)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    there = splits < SPLITS
    maxima = tl.load(maxima_ptr + row * SPLITS + splits, mask=there, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPLITS + splits, mask=there, other=0.0)
    shrink = tl.exp2(maxima - tl.max(maxima, axis=0))
    offsets = (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    wanted = there[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + offsets, mask=wanted, other=0.0)
    mixed = tl.sum(parts * shrink[:, None], axis=0) / tl.sum(sums * shrink, axis=0)
    tl.store(mixed_ptr + row * HEAD_DIM + dims, mixed, mask=dims < HEAD_DIM)


def decode_kernel(
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
    """One program a KV head, sequence and split of its context (`tl.program_id` 0, 1 and 2).

    Sequence i's tokens are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; its rows are `table_stride` entries apart. The key and value (`HEAD_DIM`
    numbers) of block b, slot s, KV head h begin at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` is [sequences, q_heads, `HEAD_DIM`]; query head h looks through KV head
    h // `GROUP`, and these `GROUP` heads share what is loaded of it.

    A score is the product of query and key times `scale`, in which log2(e) is: so weights are
    powers of two. The `SPLITS` programs share the context's tiles of `BLOCK_N` tokens, each tile
    loaded by one of them, and leave what `join_kernel` joins: `parts_ptr` [sequences, q_heads,
    `SPLITS`, `HEAD_DIM`], `maxima_ptr` and `sums_ptr` [sequences, q_heads, `SPLITS`]; -inf and
    zeros where a program has no token. `BLOCK_G` and `BLOCK_D` are powers of two, 16 or more, that
    hold `GROUP` and `HEAD_DIM`.
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    rows = (sequence * KV_HEADS + kv_head) * GROUP + members
    wanted = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, length)

    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    mixed = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        seen = positions < end
        entries = sequence * table_stride + positions // BLOCK_SIZE
        blocks = tl.load(tables_ptr + entries, mask=seen, other=0)
        at = blocks * block_stride + positions % BLOCK_SIZE * slot_stride + kv_head * head_stride
        offsets = at[:, None] + dims[None, :]
        there = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
        values = tl.load(values_ptr + offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = higher

    parts = rows * SPLITS + split
    tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mixed, mask=wanted)
    tl.store(maxima_ptr + parts, maximum, mask=members < GROUP)
    tl.store(sums_ptr + parts, total, mask=members < GROUP)
