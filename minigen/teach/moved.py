"""What paged decode moves, program by program, and in bytes, tensor by tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minigen.teach.accesses import Access, bytes_moved
from minigen.teach.needing import triton_part
from minigen.teach.paged_kernels import decode_kernel, join_kernel
from minigen.teach.paged_launch import Parts, launch_decode, launch_join, no_parts


class Recorded(NamedTuple):
    """Loads and stores of the first pass, what it left, and the attention after the second."""

    accesses: list[Access]
    parts: Parts
    mixed: Tensor


def record_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, splits: int = 1
) -> Recorded:
    """Paged decode by chapter 33's plain kernels, in the interpreter, written down.

    Tensors are as in `launch_decode`. Raises `OptionError` where Triton is not installed.
    """
    programs = triton_part("minigen.teach.programs")
    num_sequences, q_heads, head_dim = q.shape
    parts, mixed = no_parts(num_sequences * q_heads, splits, head_dim), torch.empty_like(q)
    accesses: list[Access] = programs.record_programs(
        lambda: launch_decode(decode_kernel, q, keys, values, tables, lengths, parts),
        q=q,
        keys=keys,
        values=values,
        tables=tables,
        lengths=lengths,
        **parts._asdict(),
    )
    launch_join(join_kernel, parts, mixed.flatten(0, 1))
    return Recorded(accesses, parts, mixed)


def moved_by_tensor(accesses: Sequence[Access]) -> dict[str, int]:
    """Bytes that are loaded and stored of each tensor, in the order in which they came.

    >>> moved_by_tensor([Access((0, 0, 0), False, "x", (1, 2), 4)])
    {'x': 8}
    """
    names = dict.fromkeys(access.tensor for access in accesses)
    return {
        name: bytes_moved([access for access in accesses if access.tensor == name])
        for name in names
    }


def kv_and_tables(accesses: Sequence[Access]) -> dict[str, int]:
    """Bytes of keys and values, and of block tables."""
    moved = moved_by_tensor(accesses)
    return {"keys and values": moved["keys"] + moved["values"], "block tables": moved["tables"]}
