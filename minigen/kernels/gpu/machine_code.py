"""Machine code of a launcher's kernels for GPUs that are not here, and what each asks of its chip.

Needs Triton without its interpreter. Registers and stack are read with the `cuobjdump` that Triton
brings (NVIDIA), or in the assembly's own metadata (AMD).
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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# Bytes of on-chip memory that one program can have. Sources: CUDA C++ Programming Guide, table of
# compute capabilities; AMD's CDNA 3 instruction set (LDS).
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
    """One kernel for one chip: what a thread and a program take, and the text of each stage.

    `spilled` are the bytes or registers of a thread that found no register; `texts` has "ttir",
    and "ptx" or "amdgcn".
    """

    kernel: str
    chip: str
    registers: int
    spilled: int
    shared: int
    texts: dict[str, str]


def machine_code(chip: str, launch: Callable[[], object]) -> list[MachineCode]:
    """Compile what `launch` would start, for "sm_80", "sm_90", "sm_120" or "gfx942".

    Nothing runs: its tensors may be on any device, "meta" included, and results are unwritten.
    """
    with _recorded() as launches:
        launch()
    return [_compile(chip, *each) for each in launches]


Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


@contextmanager
def _recorded() -> Generator[list[Launch], None, None]:
    """Launches are written down instead of started."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append((kernel, arguments, named))

    with patch.object(JITFunction, "run", run):
        yield launches


def _compile(
    chip: str, kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]
) -> MachineCode:
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    options.setdefault("enable_fp_fusion", True)  # unsaid, Triton 3.9 warns of its own default
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
    """The arguments that are compiled in: those declared so, and every 1, as Triton does."""
    declared = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    free = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    ones = {name for name in free if type(values[name]) is int and values[name] == 1}
    return {name: values[name] for name in declared | ones}


def _is_divisible(kernel: JITFunction, place: int, value: Any) -> bool:
    """Whether Triton would compile for a multiple of 16: whole tensors are, as they are aligned."""
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
        told = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def _of_amd(stages: dict[str, Any]) -> tuple[int, int]:
    fields = r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)"
    found = dict(re.findall(fields, stages["amdgcn"]))
    spilled = int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"])
    return int(found["vgpr_count"]), spilled
