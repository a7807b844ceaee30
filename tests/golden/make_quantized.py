"""Let other tools quantise small matrices: `python -m tests.golden.make_quantized`.

It writes the tensors that each tool stores, and the numbers that the same tool reads back, to
`quantized.safetensors`. The tools are auto-gptq 0.7.1, autoawq 0.2.9 and bitsandbytes 0.50.2; the
first two no longer run with a new transformers, so only the modules of their layers are loaded.
Install them with `pip install --no-deps --target FOLDER auto-gptq autoawq accelerate bitsandbytes`,
and name FOLDER in PYTHONPATH.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "quantized.safetensors"
ROWS, COLUMNS, GROUP = 32, 64, 32
NF4_SHAPE, NF4_BLOCK = (13, 1344), 64  # 273 groups: more than one block of 256


def module_of(package: str, name: str) -> Any:
    """Import a module without what the packages around it import."""
    parts = name.split(".")
    if package not in sys.modules:
        spec = find_spec(package)
        assert spec is not None, f"install {package} first"
        folders = list(spec.submodule_search_locations or ())
    else:
        folders = list(sys.modules[package].__path__)
    for depth in range(len(parts)):
        stub = ModuleType(".".join([package, *parts[:depth]]))
        stub.__path__ = [str(Path(folder, *parts[:depth])) for folder in folders]
        sys.modules[stub.__name__] = stub
    return importlib.import_module(f"{package}.{name}")


def matrix(bits: int, group_of: np.ndarray, seed: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a layer on a random grid, with its scales and zero points, [rows, groups]."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (ROWS, COLUMNS)))
    zeros = torch.from_numpy(rng.integers(1, 2**bits, (ROWS, COLUMNS // GROUP)))
    scales = torch.from_numpy(rng.uniform(0.002, 0.02, zeros.shape)).half()
    numbers = (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = numbers
    return layer, scales.float(), zeros.float()


def autogptq(bits: int, desc_act: bool) -> dict[str, Tensor]:
    """Return what AutoGPTQ packs, and what its own layer multiplies with."""
    name = "qlinear_cuda" if desc_act else "qlinear_cuda_old"
    quantized = module_of("auto_gptq", f"nn_modules.qlinear.{name}")
    group_of = np.arange(COLUMNS) // GROUP
    if desc_act:
        group_of = np.random.default_rng(9).permutation(group_of)
    layer, scales, zeros = matrix(bits, group_of, seed=bits)
    made = quantized.QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False)
    made.pack(layer, scales, zeros, torch.from_numpy(group_of).int())
    made.scales = made.scales.half()
    numbers = made(torch.eye(COLUMNS, dtype=torch.float16)).t()
    parts = {part: getattr(made, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    return {**parts, "numbers": numbers}


def autoawq() -> dict[str, Tensor]:
    """Return what AutoAWQ packs in its gemm version, and what it dequantises."""
    gemm = module_of("awq", "modules.linear.gemm")
    layer, scales, zeros = matrix(4, np.arange(COLUMNS) // GROUP, seed=11)
    made = gemm.WQLinear_GEMM.from_linear(
        layer, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    packing = importlib.import_module("awq.utils.packing_utils")
    parts = {part: getattr(made, part).cpu() for part in ("qweight", "qzeros", "scales")}
    numbers = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, GROUP)
    return {**parts, "numbers": numbers.t()}


def bitsandbytes(double: bool) -> dict[str, Tensor]:
    """Return what bitsandbytes stores as NF4, and what it dequantises."""
    functional = importlib.import_module("bitsandbytes.functional")
    numbers = np.random.default_rng(12).normal(0, 0.05, NF4_SHAPE)
    weight = torch.from_numpy(numbers).bfloat16()
    packed, state = functional.quantize_4bit(
        weight, blocksize=NF4_BLOCK, compress_statistics=double, quant_type="nf4"
    )
    parts = {f"weight.{part}": each for part, each in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts, "numbers": functional.dequantize_4bit(packed, state)}


if __name__ == "__main__":
    cases = {
        **{f"autogptq {bits}": autogptq(bits, desc_act=False) for bits in (2, 3, 4, 8)},
        "autogptq 4 desc_act": autogptq(4, desc_act=True),
        "autoawq": autoawq(),
        "bitsandbytes": bitsandbytes(double=False),
        "bitsandbytes double": bitsandbytes(double=True),
    }
    tensors = {
        f"{case}/{part}": each.detach().clone().contiguous()
        for case, parts in cases.items()
        for part, each in parts.items()
    }
    save_file(tensors, GOLDEN)
    print(f"{len(cases)} matrices, {GOLDEN.stat().st_size:,} bytes")
