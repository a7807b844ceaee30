"""Paged decode on a GPU: how many programs fill a chip, which code they are, what they move.

A streaming multiprocessor holds some programs at a time; the others wait for the next wave. A
program loads one tile after another, and waits for each; all together they read no faster than
memory gives. Machine code is made for GPUs that are not here. Bytes are counted program by program,
and tensor by tensor. Sources of the idea: Flash-Decoding, Dao et al. 2023; Little 1961.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigen_course.ch33_paged_attention.kernels import (
    Parts,
    decode_kernel,
    join_kernel,
    launch_decode,
    launch_join,
    no_parts,
)
from minigen_course.lab.cost_model import MACHINES
from minigen_course.lab.triton_interpreter import Access, bytes_moved, triton_part

TILE = 64  # tokens that a program loads at once
TILE_SECONDS = 1e-6  # assumed: for a tile to come, and to be multiplied
LAUNCH_SECONDS = 3e-6  # assumed: to start the second pass
THREADS = 128  # of a program: four warps
MOST_SPLITS = 64


@dataclass(frozen=True)
class Chip:
    """A GPU: its processors, what one of them has for its programs, and bytes a second."""

    name: str
    code: str  # what machine code for it is called
    processors: int
    shared: int  # bytes of on-chip memory of a processor
    bandwidth: float
    registers: int = 65_536  # of a processor
    threads: int = 2048  # that a processor can hold; 1,536 on cards for graphics

    def resident(self, registers: int, shared: int, threads: int = THREADS) -> int:
        """Programs that fit onto one processor, each of so many registers a thread and bytes.

        Registers are dealt out by eight, and 1 KiB of each program's memory is the system's. At
        least 1.

        >>> CHIPS["H100 SXM"].resident(registers=128, shared=40_000)
        4
        """
        dealt = -(-registers // 8) * 8
        by_registers = self.registers // (dealt * threads)
        return max(min(by_registers, self.shared // (shared + 1024), self.threads // threads), 1)


# Source: NVIDIA's architecture white papers and CUDA's table of compute capabilities.
CHIPS: dict[str, Chip] = {
    each.name: each
    for each in (
        Chip("H100 SXM", "sm_90", 132, 228 * 1024, MACHINES["H100 SXM"].bandwidth),
        Chip("H200", "sm_90", 132, 228 * 1024, MACHINES["H200"].bandwidth),
        Chip("A100 SXM 80 GB", "sm_80", 108, 164 * 1024, MACHINES["A100 SXM 80 GB"].bandwidth),
        Chip("RTX 4090", "sm_89", 128, 100 * 1024, MACHINES["RTX 4090"].bandwidth, threads=1536),
        Chip("L4", "sm_89", 58, 100 * 1024, MACHINES["L4"].bandwidth, threads=1536),
    )
}


@dataclass(frozen=True)
class Decoding:
    """One layer's attention in a decode step: `batch` sequences of `context` tokens, 16 bits."""

    batch: int
    context: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Keys and values, which must be read in any case."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    def part_bytes(self, splits: int) -> int:
        """What splits leave in float32: written by the first pass, read by the second."""
        rows = self.batch * self.kv_heads * self.group
        return 0 if splits == 1 else 2 * 4 * rows * splits * (self.head_dim + 2)

    def num_programs(self, splits: int) -> int:
        """One for each sequence, KV head and split."""
        return self.batch * self.kv_heads * splits

    def tiles(self, splits: int) -> int:
        """Tiles that a program loads, one after another."""
        tiles = -(-self.context // TILE)
        return -(-tiles // splits)


@dataclass(frozen=True)
class Wave:
    """Programs that run at the same time, from `begin` to `end` in seconds."""

    num_programs: int
    begin: float
    end: float


def waves(work: Decoding, chip: Chip, splits: int, resident: int) -> list[Wave]:
    """The first pass: as many programs at a time as fit, in order."""
    left, now, found = work.num_programs(splits), 0.0, []
    bytes_each = work.kv_bytes / left
    while left:
        running = min(left, chip.processors * resident)
        alone = work.tiles(splits) * TILE_SECONDS
        took = max(alone, running * bytes_each / chip.bandwidth)
        found.append(Wave(running, now, now + took))
        left, now = left - running, now + took
    return found


def seconds(work: Decoding, chip: Chip, splits: int, resident: int) -> float:
    """Both passes; the second is there only where the context is split."""
    first = waves(work, chip, splits, resident)[-1].end
    if splits == 1:
        return first
    return first + LAUNCH_SECONDS + work.part_bytes(splits) / chip.bandwidth


def split_choices(work: Decoding) -> list[int]:
    """Powers of two, of which each leaves every split a tile or more."""
    choices = (1 << exponent for exponent in range(MOST_SPLITS.bit_length()))
    return [splits for splits in choices if splits <= max(work.tiles(1), 1)]


def best_splits(work: Decoding, chip: Chip, resident: int) -> int:
    """The number of splits that the model finds fastest, the least of equals."""
    return min(split_choices(work), key=lambda splits: seconds(work, chip, splits, resident))


SEQUENCES, BLOCKS, BLOCK_SIZE, KV_HEADS, Q_HEADS = 16, 64, 16, 8, 32
LOAD_OR_PRODUCT = r"(cp\.async\.c[ag]|ld\.global|mma\.sync|wgmma\.mma)"
INSTRUCTION = re.compile(rf"^\s*(?:@!?%p\d+ )?{LOAD_OR_PRODUCT}", re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """A kernel for one chip: registers of a thread, of which spilled, bytes of on-chip memory.

    `instructions` counts those of its PTX that load from the GPU's memory ("cp.async" beside other
    work, "ld.global" to be waited for), and that multiply matrices ("mma.sync", "wgmma.mma").
    """

    kernel: str
    chip: str
    head_dim: int
    registers: int
    spilled: int
    shared: int
    instructions: dict[str, int]


def decode_code(chips: Sequence[str], head_dims: Sequence[int]) -> list[Code]:
    """Both passes of paged decode in bfloat16, compiled for each chip ("sm_80") and head_dim.

    Raises `OptionError` where Triton is not installed.
    """
    compiler = triton_part("minigen_course.ch31_triton.gpu_kernels")
    found = []
    for chip in chips:
        for head_dim in head_dims:
            for made in compiler.machine_code(chip, _launch(head_dim)):
                counts = instructions_of(made.texts.get("ptx", ""))
                sizes = (made.registers, made.spilled, made.shared)
                found.append(Code(made.kernel, chip, head_dim, *sizes, counts))
    return found


def instructions_of(ptx: str) -> dict[str, int]:
    """How often each kind of load, and of product of matrices, stands in a PTX text.

    >>> instructions_of("  ld.global.v4.b32 { %r1 }, [ %rd1 ];")
    {'ld.global': 1}
    """
    found = INSTRUCTION.findall(ptx)
    return dict(Counter("cp.async" if each.startswith("cp") else each for each in found))


def _launch(head_dim: int) -> Callable[[], Any]:
    """Paged decode of heads of this width, four to a KV head, split."""
    halves = [_empty(BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim) for _ in range(2)]
    tables = _empty(SEQUENCES, BLOCKS, dtype=torch.int64)
    lengths = _empty(SEQUENCES, dtype=torch.int64)
    q = _empty(SEQUENCES, Q_HEADS, head_dim)
    decode = triton_part("minigen.kernels.triton.decode_attention").paged_decode_triton
    return lambda: decode(q, *halves, tables, lengths, splits=16)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that has a shape and a type, and nothing else."""
    return torch.empty(*shape, dtype=dtype, device="meta")


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
    programs = triton_part("minigen_course.lab.programs")
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
