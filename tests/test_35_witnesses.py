"""Other libraries read the same numbers: gguf, ml_dtypes, transformers, compressed-tensors."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.quant_formats import FORMATS
from minigen.checkpoint.quantized.assemble import assemble
from minigen.checkpoint.quantized.floats import E2M1, powers_of_two
from minigen.checkpoint.safetensors import read_raw
from tests.quantized_files import (
    SCHEMES,
    Scheme,
    awq,
    gptq,
    modules,
    nf4,
    plain_tensors,
    save,
    tensors_of,
)

BLOCK_KINDS = [kind for kind, form in FORMATS.items() if form.block_size > 1]
CODES = np.arange(256, dtype=np.uint8)


def same_bits(found: Tensor, expected: Any) -> bool:
    """Return whether all numbers have the same bits; a number that is none has any."""
    theirs = torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float32)).reshape(found.shape)
    equal = found.view(torch.int32) == theirs.view(torch.int32)
    return bool((equal | (found.isnan() & theirs.isnan())).all())


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_random_bytes_of_every_gguf_kind_have_the_same_bits_as_in_the_gguf_library(
    kind: str,
) -> None:
    """Scales are random, too: among them are infinities, subnormal numbers, zeros and NaN."""
    form, quant_type = FORMATS[kind], GGMLQuantizationType[kind]
    assert (form.block_size, form.block_bytes) == GGML_QUANT_SIZES[quant_type]
    raw = np.random.default_rng(35).integers(0, 256, (256, 3, form.block_bytes), dtype=np.uint8)
    raw[:, 0] = CODES[:, None]  # blocks of one byte again and again: every code of a scale
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(256, -1), quant_type)
    assert same_bits(form.unpack(torch.from_numpy(raw)).flatten(-2), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_all_codes_of_fp8_are_the_numbers_of_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ours = torch.from_numpy(CODES.copy()).view(getattr(torch, name)).float()
    assert same_bits(ours, CODES.view(getattr(ml_dtypes, name)).astype(np.float32))


def test_all_codes_of_e8m0_and_e2m1_are_the_numbers_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert same_bits(powers_of_two(torch.from_numpy(CODES.copy())), theirs)
    assert same_bits(E2M1, CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_fp8_blocks_are_what_transformers_dequantises() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(finegrained, "Fp8Dequantize"):
        pytest.skip("this version of transformers dequantises elsewhere")
    found, tensors = read(SCHEMES["fp8 blocks"])
    dequantize = finegrained.Fp8Dequantize.__new__(finegrained.Fp8Dequantize)._dequantize_one
    for module in modules():
        weight, scales = (tensors[f"{module}.{part}"] for part in ("weight", "weight_scale_inv"))
        assert torch.equal(found[module], dequantize(weight, scales, torch.float32))


def test_mxfp4_blocks_are_what_transformers_dequantises() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    found, tensors = read(SCHEMES["mxfp4"])
    for module in modules():
        blocks, scales = (
            tensors[f"{module}.{part}"] for part in ("weight_blocks", "weight_scales")
        )
        theirs = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
        assert torch.equal(found[module], theirs[0].t())


def read(scheme: Scheme) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the dequantised matrices of a checkpoint, and its tensors."""
    tensors, _ = tensors_of(scheme)
    with TemporaryDirectory() as path:
        checkpoint = open_checkpoint(save(Path(path), tensors, scheme.settings))
        found = {name: checkpoint.tensors[f"{name}.weight"].dequantize() for name in modules()}
    return found, tensors


# What compressed-tensors' own compressors write: format, weights, dtype of the scales.
COMPRESSED: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "packed 4": ("pack-quantized", {"num_bits": 4, "group_size": 32}, torch.bfloat16),
    "packed 4 asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "group_size": 32, "symmetric": False},
        torch.bfloat16,
    ),
    "packed 3 asymmetric": (
        "pack-quantized",
        {"num_bits": 3, "group_size": 32, "symmetric": False},
        torch.float32,
    ),
    "packed 8 rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float16),
    "packed 4 rows asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        torch.float16,
    ),
    "int rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "int matrix": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}, torch.float32),
    "int rows asymmetric": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        torch.float32,
    ),
    "float rows": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        torch.bfloat16,
    ),
    "float matrix": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        torch.bfloat16,
    ),
    "float ragged blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 28]},
        torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        torch.float32,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
        torch.bfloat16,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form, weights, dtype = COMPRESSED[name]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), format=form
    )
    compressor = BaseCompressor.get_value_from_registry(form)
    rng = np.random.default_rng(3)
    tensors, theirs = plain_tensors(rng), {}
    for module, (rows, columns) in modules().items():
        state = observed(rng, rows, columns, scheme.weights, dtype)
        parts = compressor.compress(state, scheme)
        theirs[module] = compressor.decompress(parts, scheme)["weight"]
        tensors |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    checkpoint = open_checkpoint(save(tmp_path, tensors, settings))
    for module, expected in theirs.items():
        found = checkpoint.tensors[f"{module}.weight"]
        assert found.kind != "BF16"
        assert torch.equal(found.dequantize(expected.dtype), expected)


def observed(
    rng: np.random.Generator, rows: int, columns: int, weights: Any, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a random matrix with scales and zero points, as a calibration would leave them."""
    weight = torch.from_numpy(rng.normal(0, 0.1, (rows, columns))).to(dtype)
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(weights.block_structure or ()),
    }.get(weights.strategy, (1, weights.group_size))
    counts = tuple(-(-size // part) for size, part in zip((rows, columns), block, strict=True))
    most = {8: 127.0, 4: 7.0, 3: 3.0}[weights.num_bits]
    if weights.type == "float":
        most = 448.0 if weights.num_bits == 8 else 6.0
    scales = torch.from_numpy(rng.uniform(0.3, 0.5, counts)).to(dtype) / most
    if weights.strategy == "tensor":
        scales = scales.reshape(1)
    state = {"weight": weight, "weight_scale": scales}
    if weights.scale_dtype == torch.uint8:
        state["weight_scale"] = torch.exp2(scales.float().log2().floor()).to(dtype)
    if weights.strategy == "tensor_group":
        divisor = torch.tensor([2000.0])
        state["weight_scale"] = (scales * divisor).to(torch.float8_e4m3fn).to(dtype)
        state["weight_global_scale"] = divisor
    if not weights.symmetric:
        half = 2 ** (weights.num_bits - 1)
        zeros = rng.integers(-half, half, scales.shape)
        state["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    return state


def test_awq_words_are_what_compressed_tensors_converts() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    found, tensors = read(SCHEMES["awq"])
    converted = AutoAWQConverter(group_size=32).process(dict(tensors))
    for module, (rows, columns) in modules().items():
        names = ("weight_packed", "weight_scale", "weight_zero_point")
        packed, scales, zeros = (converted[f"{module}.{part}"] for part in names)
        codes = unpack_from_int32(packed, 4, (rows, columns)).float().unflatten(-1, (-1, 32))
        points = unpack_from_int32(zeros, 4, (rows, columns // 32), packed_dim=0).float()
        numbers = (codes - points.unsqueeze(-1)) * scales.float().unsqueeze(-1)
        assert torch.equal(found[module], numbers.flatten(-2))


def test_ragged_fp8_blocks_are_what_compressed_tensors_dequantises() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    found, tensors = read(SCHEMES["fp8 ragged blocks"])
    of_modules = {n: t for n, t in tensors.items() if n.rpartition(".")[0] in modules()}
    reader = FP8BlockDequantizer(weight_block_size=(40, 28), dtype=torch.float32)
    converted = reader.process(dict(of_modules))
    for module in modules():
        assert torch.equal(found[module], converted[f"{module}.weight"])


GOLDEN = Path(__file__).parent / "golden" / "quantized.safetensors"  # by make_quantized.py
TOOLS: dict[str, tuple[Scheme, torch.dtype]] = {
    **{f"autogptq {bits}": (gptq(bits, 32, 1, False), torch.float16) for bits in (2, 3, 4, 8)},
    "autogptq 4 desc_act": (gptq(4, 32, 1, False, desc_act=True), torch.float16),
    "autoawq": (awq(32), torch.float16),
    "bitsandbytes": (nf4(double=False), torch.bfloat16),
    "bitsandbytes double": (nf4(double=True), torch.bfloat16),
}


@pytest.mark.parametrize("name", TOOLS)
def test_what_other_tools_packed_is_what_they_read_back(name: str, tmp_path: Path) -> None:
    scheme, dtype = TOOLS[name]
    stored = {
        n.partition("/")[2]: t for n, t in load_file(GOLDEN).items() if n.startswith(f"{name}/")
    }
    expected = stored.pop("numbers")
    path = tmp_path / "model.safetensors"
    save_file({f"w.{part}": each for part, each in stored.items()}, path)
    shapes = {"w.weight": tuple(expected.shape)}
    found = assemble(read_raw(path), scheme.settings, shapes, "config.json")
    assert torch.equal(found["w.weight"].dequantize(dtype), expected)
