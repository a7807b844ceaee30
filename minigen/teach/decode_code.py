"""Machine code of paged decode for GPUs that are not here: registers, memory, and how it loads."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigen.teach.needing import triton_part

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
    compiler = triton_part("minigen.kernels.gpu.machine_code")
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
    decode = triton_part("minigen.kernels.gpu.decode").paged_decode_triton
    return lambda: decode(q, *halves, tables, lengths, splits=16)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that has a shape and a type, and nothing else."""
    return torch.empty(*shape, dtype=dtype, device="meta")
