"""Paged decode on a GPU: how many programs fill a chip, their machine code, the bytes they move.

A streaming multiprocessor runs a limited number of programs at a time; the others wait for the next
wave. A program loads one tile after another, and waits for each; all programs together read no
faster than the memory bandwidth. The kernels are compiled for GPUs that are not present. Bytes are
counted per program, and per tensor. Sources: Flash-Decoding, Dao et al. 2023; Little 1961.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigen_course.ch31_triton.lesson import instructions, operation
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
TILE_SECONDS = 1e-6  # assumed: to load a tile and multiply it
LAUNCH_SECONDS = 3e-6  # assumed: to start the second pass
THREADS = 128  # per program: four warps
MOST_SPLITS = 64


@dataclass(frozen=True)
class Chip:
    """A GPU: its processors, the resources of each, and its bandwidth in bytes per second."""

    name: str
    code: str  # the name of its machine code
    processors: int
    shared: int  # bytes of shared memory per processor
    bandwidth: float
    registers: int = 65_536  # per processor
    threads: int = 2048  # per processor; 1,536 on graphics cards

    def resident(self, registers: int, shared: int, threads: int = THREADS) -> int:
        """Return how many programs fit onto one processor, at least 1.

        A program takes `registers` per thread, which are allocated in units of 8, and `shared`
        bytes of shared memory plus 1 KiB that the system reserves.

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
    """One layer's attention in a decode step: `batch` sequences of `context` tokens, in 16 bits."""

    batch: int
    context: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, which must be read in any case."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    def part_bytes(self, splits: int) -> int:
        """Bytes of the parts in float32, written by the first pass and read by the second."""
        rows = self.batch * self.kv_heads * self.group
        return 0 if splits == 1 else 2 * 4 * rows * splits * (self.head_dim + 2)

    def num_programs(self, splits: int) -> int:
        """Return the number of programs: one per sequence, KV head and split."""
        return self.batch * self.kv_heads * splits

    def tiles(self, splits: int) -> int:
        """Return the number of tiles that a program loads, one after another."""
        tiles = -(-self.context // TILE)
        return -(-tiles // splits)


@dataclass(frozen=True)
class Wave:
    """Programs that run at the same time, from `begin` to `end` in seconds."""

    num_programs: int
    begin: float
    end: float


@dataclass(frozen=True)
class Assumed:
    """What the model assumes, in seconds; no GPU has confirmed it.

    `tile` is what a program takes to load a tile and multiply it, `launch` what it takes to start
    the second pass.
    """

    tile: float = TILE_SECONDS
    launch: float = LAUNCH_SECONDS


ASSUMED = Assumed()


def waves(
    work: Decoding, chip: Chip, splits: int, resident: int, times: Assumed = ASSUMED
) -> list[Wave]:
    """Run the first pass: in each wave as many programs as fit, in order."""
    left, now, found = work.num_programs(splits), 0.0, []
    bytes_each = work.kv_bytes / left
    while left:
        running = min(left, chip.processors * resident)
        alone = work.tiles(splits) * times.tile
        took = max(alone, running * bytes_each / chip.bandwidth)
        found.append(Wave(running, now, now + took))
        left, now = left - running, now + took
    return found


def seconds(
    work: Decoding, chip: Chip, splits: int, resident: int, times: Assumed = ASSUMED
) -> float:
    """Seconds of both passes; there is a second one only if the context is split."""
    first = waves(work, chip, splits, resident, times)[-1].end
    if splits == 1:
        return first
    return first + times.launch + work.part_bytes(splits) / chip.bandwidth


def split_choices(work: Decoding) -> list[int]:
    """Return the powers of two that leave every split at least one tile."""
    choices = (1 << exponent for exponent in range(MOST_SPLITS.bit_length()))
    return [splits for splits in choices if splits <= max(work.tiles(1), 1)]


def best_splits(work: Decoding, chip: Chip, resident: int, times: Assumed = ASSUMED) -> int:
    """Return the number of splits that is fastest in this model; of equals, the smallest."""
    return min(split_choices(work), key=lambda splits: seconds(work, chip, splits, resident, times))


SEQUENCES, BLOCKS, BLOCK_SIZE, KV_HEADS, Q_HEADS = 16, 64, 16, 8, 32
LOAD_OR_PRODUCT = re.compile(r"(cp\.async)\.c[ag]|(ld\.global|mma\.sync|wgmma\.mma)")


@dataclass(frozen=True)
class Code:
    """A kernel compiled for one chip: registers per thread, spills, bytes of shared memory.

    `instructions` counts the PTX instructions that load from the GPU's memory ("cp.async" runs in
    parallel to other work, "ld.global" is waited for) and those that multiply matrices ("mma.sync",
    "wgmma.mma").
    """

    kernel: str
    chip: str
    head_dim: int
    registers: int
    spilled: int
    shared: int
    instructions: dict[str, int]


def decode_code(chips: Sequence[str], head_dims: Sequence[int]) -> list[Code]:
    """Compile both passes of paged decode in bfloat16 for each chip ("sm_80") and head_dim.

    Raises `OptionError` if Triton is not installed.
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
    """Count the loads and matrix products of each kind in a PTX text.

    >>> instructions_of("  ld.global.v4.b32 { %r1 }, [ %rd1 ];")
    {'ld.global': 1}
    """
    found = (LOAD_OR_PRODUCT.match(operation(each)) for each in instructions(ptx))
    return dict(Counter(each[1] or each[2] for each in found if each))


def _launch(head_dim: int) -> Callable[[], Any]:
    """Return a launch of split paged decode of this head_dim, four query heads per KV head."""
    halves = [_empty(BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim) for _ in range(2)]
    tables = _empty(SEQUENCES, BLOCKS, dtype=torch.int64)
    lengths = _empty(SEQUENCES, dtype=torch.int64)
    q = _empty(SEQUENCES, Q_HEADS, head_dim)
    decode = triton_part("minigen.kernels.triton.decode_attention").paged_decode_triton
    return lambda: decode(q, *halves, tables, lengths, splits=16)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Make a tensor with a shape and a dtype, but without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


class Recorded(NamedTuple):
    """Loads and stores of the first pass, its parts, and the attention after the second pass."""

    accesses: list[Access]
    parts: Parts
    mixed: Tensor


def record_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, splits: int = 1
) -> Recorded:
    """Run paged decode by chapter 33's plain kernels in the interpreter, and record it.

    Tensors are as in `launch_decode`. Raises `OptionError` if Triton is not installed.
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
    """Return the bytes loaded and stored per tensor, in order of first access.

    >>> moved_by_tensor([Access((0, 0, 0), False, "x", (1, 2), 4)])
    {'x': 8}
    """
    names = dict.fromkeys(access.tensor for access in accesses)
    return {
        name: bytes_moved([access for access in accesses if access.tensor == name])
        for name in names
    }


def kv_and_tables(accesses: Sequence[Access]) -> dict[str, int]:
    """Return the bytes moved of keys and values, and of block tables."""
    moved = moved_by_tensor(accesses)
    return {"keys and values": moved["keys"] + moved["values"], "block tables": moved["tables"]}
