"""Every kernel as the engine launches it, at sizes of real models, on tensors without memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.engines import Shape
from minigen.kernels.triton.decode_attention import paged_decode_triton
from minigen.kernels.triton.elementwise import (
    rms_norm_triton,
    rotary_store_triton,
    silu_multiply_triton,
)
from minigen.kernels.triton.matvec import matvec_triton
from minigen.kernels.triton.prefill_attention import flash_prefill_triton
from minigen.kernels.triton.sampling import choose_triton
from minigen.model.layers import DenseLinear
from minigen.parallel.sharding import vocab_share
from minigen_course.ch31_triton.gpu_kernels import matmul_triton, softmax_triton

TOKENS, SEQUENCES, BLOCKS, BLOCK_SIZE = 512, 16, 64, 16


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor that has a shape and a dtype, but no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    """Return such a tensor of integers."""
    return empty(*shape, dtype=torch.int64)


def small_launches() -> dict[str, Callable[[], object]]:
    """Return the launches of the kernels that do not depend on heads."""
    hidden, ffn, vocab = 4096, 14336, 128256
    x, weight, wide = empty(TOKENS, hidden), empty(hidden), empty(TOKENS, 2 * ffn)
    up_down = [
        DenseLinear(empty(rows, columns), empty(rows), (rows,))
        for rows, columns in ((2 * ffn, hidden), (hidden, ffn))
    ]
    logits = empty(SEQUENCES, vocab, dtype=torch.float32)
    warmth = empty(SEQUENCES, dtype=torch.float32)
    return {
        "norm": lambda: rms_norm_triton(x, weight, 1e-5, empty(TOKENS, hidden)),
        "silu": lambda: silu_multiply_triton(wide),
        "one row": lambda: matvec_triton(x[:1], up_down[1], residual=x[:1]),
        "one gated row": lambda: matvec_triton(x[:1], up_down[0], (weight, 1e-5), gated=True),
        "softmax": lambda: softmax_triton(x),
        "matmul": lambda: matmul_triton(x, empty(ffn, hidden)),
        "choose": lambda: choose_triton(logits, warmth, ids(SEQUENCES)),
    }


def head_launches(
    head_dim: int, wide_tiles: bool, q_heads: int = 32, kv_heads: int = 8
) -> dict[str, Callable[[], object]]:
    """Return the launches of the attention kernels, for heads of this width."""
    qkv = empty(TOKENS, (q_heads + 2 * kv_heads) * head_dim)
    halves = [empty(BLOCKS, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    norms = (empty(head_dim), empty(head_dim))
    tables = tuple(empty(8192, head_dim // 2, dtype=torch.float32) for _ in range(2))
    q, one = empty(TOKENS, q_heads, head_dim), empty(SEQUENCES, q_heads, head_dim)
    contexts = (*halves, ids(SEQUENCES, BLOCKS), ids(SEQUENCES))
    prefill = (*contexts[:3], ids(SEQUENCES + 1), contexts[3])
    return {
        "rotary": lambda: rotary_store_triton(
            qkv, norms, 1e-6, tables, ids(TOKENS), ids(TOKENS), *halves
        ),
        "decode": lambda: paged_decode_triton(one, *contexts),
        "decode, split": lambda: paged_decode_triton(one, *contexts, splits=16),
        "prefill": lambda: flash_prefill_triton(q, *prefill, TOKENS, wide_tiles=wide_tiles),
        "prefill of few": lambda: flash_prefill_triton(q, *prefill, 33, None, wide_tiles),
        "prefill in a window": lambda: flash_prefill_triton(q, *prefill, TOKENS, 4096, wide_tiles),
    }


def share_launches(
    shape: Shape, num_ranks: int, wide_tiles: bool
) -> dict[str, Callable[[], object]]:
    """Return the launches of one rank's share of a model: fewer heads, and narrower slices."""
    q_heads, kv_heads = shape.q_heads // num_ranks, max(shape.kv_heads // num_ranks, 1)
    ffn, vocab = shape.ffn // num_ranks, vocab_share(shape.vocab, num_ranks)
    hidden, q_width, kv_width = shape.hidden, q_heads * shape.head_dim, kv_heads * shape.head_dim
    one, weight, wide = empty(1, hidden), empty(hidden), empty(TOKENS, 2 * ffn)
    qkv, out, gate_up, down, head = (
        DenseLinear(empty(rows, columns), None, (rows,))
        for rows, columns in (
            (q_width + 2 * kv_width, hidden),
            (hidden, q_width),
            (2 * ffn, hidden),
            (hidden, ffn),
            (vocab, hidden),
        )
    )
    products = {
        "silu": lambda: silu_multiply_triton(wide),
        "one row of qkv": lambda: matvec_triton(one, qkv, (weight, 1e-5)),
        "one row of out": lambda: matvec_triton(empty(1, q_width), out, residual=one),
        "one row of out, without the residual": lambda: matvec_triton(empty(1, q_width), out),
        "one gated row": lambda: matvec_triton(one, gate_up, (weight, 1e-5), gated=True),
        "one row of down": lambda: matvec_triton(empty(1, ffn), down, residual=one),
        "one row of down, without the residual": lambda: matvec_triton(empty(1, ffn), down),
        "one row of the head": lambda: matvec_triton(one, head),
    }
    return products | head_launches(shape.head_dim, wide_tiles, q_heads, kv_heads)
