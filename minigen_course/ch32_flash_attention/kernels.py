"""FlashAttention for one sequence, as plain functions that `triton.jit` turns into kernels.

They are chapter 32's exercises, without a mask and with one. On a GPU the engine runs the full
version, `minigen.kernels.triton.prefill_attention`, with block tables, several sequences, and
windows.
Source: FlashAttention-2, Dao 2023.
"""

from types import SimpleNamespace

try:
    import triton.language as tl
except ImportError:  # Triton is not available here: the function can be read, not run
    tl = SimpleNamespace(constexpr=int)


def unmasked_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: attention of rows i * `BLOCK` to (i + 1) * `BLOCK` of q over all keys; one head.

    q, k, v and mixed (the result) are [num_rows, HEAD_DIM], contiguous and float32. num_rows is a
    multiple of `BLOCK`, and every query sees every key. Scores are multiplied by `scale`. A program
    loads its queries once, and `BLOCK` keys and values at a time, each of them once. HEAD_DIM and
    `BLOCK` are powers of two, at least 16.
    """
    rows, dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(0, num_rows, BLOCK):
        tile = (start + tl.arange(0, BLOCK))[:, None] * HEAD_DIM + dims[None, :]
        keys, values = tl.load(k_ptr + tile), tl.load(v_ptr + tile)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink = tl.exp(maximum - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = higher
    tl.store(mixed_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None])


def flash_kernel(
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
    """Program (i, h): causal attention of `BLOCK_M` queries of head h, from row i * `BLOCK_M` on.

    q and mixed (the result) are [num_new, Q_HEADS, HEAD_DIM], k and v [context, KV_HEADS,
    HEAD_DIM]. All are contiguous and have one dtype of 16 or 32 bits; the maximum, the sum and the
    weighted values are float32. The queries are the last `num_new` of the `context` positions.
    Query head h uses KV head h // (Q_HEADS // KV_HEADS). Scores are multiplied by `scale`. A
    program loads its queries once, and `BLOCK_N` keys and values at a time, none after the position
    of its last query. HEAD_DIM and both block sizes are powers of two, at least 16.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    rows, dims = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q_offsets = (rows * Q_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    wanted = (rows < num_new)[:, None]
    q = tl.load(q_ptr + q_offsets, mask=wanted, other=0.0)
    positions = context - num_new + rows
    end = tl.minimum(context - num_new + (tile + 1) * BLOCK_M, context)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        kv_rows = columns * KV_HEADS + head // (Q_HEADS // KV_HEADS)
        kv_offsets = kv_rows[:, None] * HEAD_DIM + dims[None, :]
        there = (columns < end)[:, None]
        keys = tl.load(k_ptr + kv_offsets, mask=there, other=0.0)
        values = tl.load(v_ptr + kv_offsets, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink = tl.exp(maximum - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
        maximum = higher
    tl.store(mixed_ptr + q_offsets, (mixed / total[:, None]).to(q.dtype), mask=wanted)
