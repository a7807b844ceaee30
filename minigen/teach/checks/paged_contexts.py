"""Contexts in scattered blocks for chapter 33, and what is expected of kernels over them."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from minigen.teach.accesses import Access
from minigen.teach.messages import Wrong, expect
from minigen.teach.paged_launch import Parts

NOBODYS = 1e3  # in slots that no sequence owns, so that it would show wherever it leaked
NO_BLOCK = 10**6  # in entries behind a table's end: whoever goes there leaves the pool


class Contexts(NamedTuple):
    """A layer's halves of a pool, block tables and lengths; the same, sequence by sequence."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor
    own: list[tuple[Tensor, Tensor]]


def contexts(
    lengths: list[int], block_size: int, kv_heads: int = 1, head_dim: int = 16, spare: int = 0
) -> Contexts:
    """Sequences whose blocks lie in no order; a slot is followed by `spare` numbers of no head."""
    generator = torch.Generator().manual_seed(33)
    counts = [-(-length // block_size) for length in lengths]
    shape = (sum(counts) + 2, block_size, kv_heads * head_dim + spare)
    keys, values = (
        torch.full(shape, NOBODYS)[..., : kv_heads * head_dim].unflatten(-1, (kv_heads, head_dim))
        for _ in range(2)
    )
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables, own = torch.full((len(lengths), max(counts) + 1), NO_BLOCK), []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        new = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        own.append((new[0], new[1]))
        for position in range(length):
            block, slot = blocks[position // block_size], position % block_size
            keys[block, slot], values[block, slot] = new[:, position]
    return Contexts(keys, values, tables, torch.tensor(lengths), own)


def expect_loaded_once(accesses: list[Access], name: str, num_wanted: int) -> None:
    """So many numbers of a tensor are loaded, by whichever program, and each by one only."""
    loads = Counter(
        offset
        for access in accesses
        if access.tensor == name and not access.is_store
        for offset in access.offsets
    )
    total = sum(loads.values())
    expect(
        total == len(loads),
        f"the programs load {total} numbers of {name}, but only {len(loads)} different ones: each "
        "should be loaded once, by one program.",
    )
    expect(
        total == num_wanted,
        f"the programs load {total} numbers of {name}; they should load the {num_wanted} that "
        "the sequences own (a mask leaves out the rest).",
    )


def expect_written(parts: Parts, what: str) -> None:
    """Every row and split has a maximum and a sum."""
    for name, tensor in (("maxima", parts.maxima), ("sums", parts.sums)):
        missing = tensor.isnan().nonzero()
        if len(missing):
            row, split = missing[0].tolist()
            raise Wrong(
                f"{what}: {name} of row {row}, split {split} were not written, or are NaN; every "
                "program should store them, also where it has seen no token."
            )


def joined(parts: Parts) -> Tensor:
    """The attention that parts stand for, in double precision."""
    mixed, maxima, sums = (each.double() for each in parts)
    weights = (maxima - maxima.amax(dim=1, keepdim=True)).exp2()
    return (mixed * weights.unsqueeze(-1)).sum(1) / (sums * weights).sum(1, keepdim=True)
