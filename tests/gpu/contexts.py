"""Sequences of keys and values in scattered blocks, on the device that runs the kernels."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's arithmetic in bfloat16 is wrong, so it uses float32; a GPU uses its serving
# dtype.
DTYPES = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
# Head widths with their dtypes: all combinations where that takes no time.
HEADS = (
    list(product((64, 80, 96, 128), DTYPES))
    if DEVICE == "cuda"
    else list(zip((64, 80, 96, 128), 2 * DTYPES, strict=True))
)
LEAKED = 1e3  # the value of unowned slots, so that a leak shows
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Assert equality within the rounding of the dtype."""
    near = TOLERANCES[expected.dtype]
    torch.testing.assert_close(ours, expected, atol=near, rtol=near)


class Contexts(NamedTuple):
    """A layer's halves of a pool, block tables and lengths."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor


def make_contexts(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
) -> Contexts:
    """Return blocks in random order, one more than needed; slots without an owner hold `LEAKED`."""
    counts = [-(-length // block_size) for length in lengths]
    shape = (sum(counts) + 1, block_size, kv_heads, head_dim)
    keys, values = (torch.full(shape, LEAKED, dtype=dtype, device=DEVICE) for _ in range(2))
    free = (torch.randperm(sum(counts)) + 1).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64, device=DEVICE)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = torch.tensor([free.pop() for _ in range(count)], device=DEVICE)
        tables[row, :count] = own
        slots = own.repeat_interleave(block_size)[:length] * block_size
        slots += torch.arange(length, device=DEVICE) % block_size
        for half in (keys, values):
            half.flatten(0, 1)[slots] = randn(length, kv_heads, head_dim, dtype=dtype)
    return Contexts(keys, values, tables, torch.tensor(lengths, device=DEVICE))
