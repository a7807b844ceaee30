"""Softmax and a matrix product as Triton kernels, and the machine code of any launcher's kernels.

Softmax reads each row once. The matrix product works tile by tile, so each element is read once for
a whole tile of results.

The kernels can be compiled for GPUs that are not present; this needs Triton without its
interpreter. Register and stack sizes come from the `cuobjdump` that Triton ships (NVIDIA), or from
the metadata of the assembly (AMD). Sources: Triton's fused-softmax tutorial; Triton's
matrix-multiplication tutorial, with its order of tiles that keeps both operands in L2.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


@triton.jit
def softmax_kernel(x_ptr, weights_ptr, num_columns, BLOCK: tl.constexpr):
    """One program per row, which stays in registers: 2 bytes read and 2 written per element.

    Four separate operators (maximum, exponential, sum, quotient) would move 14 bytes per element.
    5 FLOPs per element.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    offsets = row * num_columns + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    raised = tl.exp(x - tl.max(x, axis=0))
    weights = raised / tl.sum(raised, axis=0)
    tl.store(weights_ptr + offsets, weights.to(weights_ptr.dtype.element_ty), mask=inside)


def softmax_triton(x: Tensor) -> Tensor:
    """Return softmax along the last axis of contiguous rows; a row must fit into one program."""
    weights, num_columns = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(num_columns)
    softmax_kernel[(x.numel() // num_columns,)](
        x, weights, num_columns, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return weights


def softmax_torch(x: Tensor) -> Tensor:
    """Plain torch version of `softmax_triton`, computed in float32 like it."""
    return x.float().softmax(dim=-1).to(x.dtype)


BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
TILES_A_GROUP = 8


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_A_GROUP: tl.constexpr,
):
    """One program per tile of c = a b^T; b is N x K, like the weight of a linear layer.

    2 M N K FLOPs; reads M K N / BLOCK_N + N K M / BLOCK_M elements, most of them from L2. One
    program per element would read 2 M N K.
    """
    program, num_m, num_n = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = program // (TILES_A_GROUP * num_n) * TILES_A_GROUP
    group = tl.minimum(num_m - first_m, TILES_A_GROUP)
    within = program % (TILES_A_GROUP * num_n)
    rows = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + rows.to(tl.int64)[:, None] * K
    b_rows = b_ptr + columns.to(tl.int64)[None, :] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + depth
        a_inside = (rows < M)[:, None] & (k < K)[None, :]
        b_inside = (k < K)[:, None] & (columns < N)[None, :]
        a = tl.load(a_rows + k[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_rows + k[:, None], mask=b_inside, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    c_inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=c_inside)


def matmul_triton(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T of contiguous a (M x K) and b (N x K), accumulated in float32."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)
    matmul_kernel[grid](
        a,
        b,
        c,
        m,
        n,
        k,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        TILES_A_GROUP=TILES_A_GROUP,
        num_warps=8,
        num_stages=3 if a.dtype.itemsize == 2 else 2,
    )
    return c


def matmul_torch(a: Tensor, b: Tensor) -> Tensor:
    """Plain torch version of `matmul_triton`."""
    return a @ b.T


# Bytes of shared (on-chip) memory that one program can use. Sources: CUDA C++ Programming Guide,
# table of compute capabilities; AMD's CDNA 3 instruction set (LDS).
SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_120": 101_376, "gfx942": 65_536}
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class MachineCode:
    """One kernel compiled for one chip: registers, shared memory, and the text of each stage.

    `registers` are per thread, `shared` are bytes per program. `spilled` counts what did not fit
    into a thread's registers: bytes (NVIDIA), or registers and bytes (AMD). `texts` has "ttir", and
    "ptx" or "amdgcn".
    """

    kernel: str
    chip: str
    registers: int
    spilled: int
    shared: int
    texts: dict[str, str]


def machine_code(chip: str, launch: Callable[[], object]) -> list[MachineCode]:
    """Compile the kernels that `launch` would start, for "sm_80", "sm_90", "sm_120" or "gfx942".

    Nothing runs: the tensors may be on any device, also "meta", and no result is written.
    """
    with _recorded() as launches:
        launch()
    return [_compile(chip, *each) for each in launches]


Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


@contextmanager
def _recorded() -> Generator[list[Launch], None, None]:
    """Record kernel launches instead of running them."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append((kernel, arguments, named))

    with patch.object(JITFunction, "run", run):
        yield launches


def _compile(
    chip: str, kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]
) -> MachineCode:
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    options.setdefault("enable_fp_fusion", True)  # else Triton 3.9 warns of its own default
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    constants = _constants(kernel, values)
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else _type_of(values[name])
        if name not in constants and _is_divisible(kernel, place, values[name]):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("hip", chip, 64) if chip.startswith("gfx") else _nvidia(chip)
    compiled = triton.compile(source, target=target, options=options)
    texts = {stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}
    measure = _of_amd if chip.startswith("gfx") else _of_nvidia
    registers, spilled = measure(compiled.asm)
    name = kernel.fn.__name__
    return MachineCode(name, chip, registers, spilled, compiled.metadata.shared, texts)


def _nvidia(chip: str) -> GPUTarget:
    return GPUTarget("cuda", int(chip.removeprefix("sm_")), 32)


def _constants(kernel: JITFunction, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Triton compiles in: the `constexpr` ones, and every integer 1."""
    declared = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    free = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    ones = {name for name in free if type(values[name]) is int and values[name] == 1}
    return {name: values[name] for name in declared | ones}


def _is_divisible(kernel: JITFunction, place: int, value: Any) -> bool:
    """Whether Triton specialises on divisibility by 16; true for tensors, which are aligned."""
    parameter = kernel.params[place]
    any_will_do = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    if any_will_do or isinstance(value, float):
        return False
    return isinstance(value, torch.Tensor) or value % 16 == 0


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _of_nvidia(stages: dict[str, Any]) -> tuple[int, int]:
    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(stages["cubin"])
        command = [str(tool), "--dump-resource-usage", str(binary)]
        usage = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def _of_amd(stages: dict[str, Any]) -> tuple[int, int]:
    fields = r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)"
    found = dict(re.findall(fields, stages["amdgcn"]))
    spilled = int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"])
    return int(found["vgpr_count"]), spilled
