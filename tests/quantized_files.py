"""Writes tiny quantised checkpoints by the definitions of their layouts, not by minigen's reader.

Codes become one long Python integer per row or column, whose bits are the file's words. The numbers
that a reader should find are computed in float64 from codes, scales and zero points.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 300
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."


def modules(ffn: int = FFN) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix of the layer."""
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{LAYER}self_attn.q_proj": (q_width, HIDDEN),
        f"{LAYER}self_attn.k_proj": (kv_width, HIDDEN),
        f"{LAYER}self_attn.v_proj": (kv_width, HIDDEN),
        f"{LAYER}self_attn.o_proj": (HIDDEN, q_width),
        f"{LAYER}mlp.gate_proj": (ffn, HIDDEN),
        f"{LAYER}mlp.up_proj": (ffn, HIDDEN),
        f"{LAYER}mlp.down_proj": (HIDDEN, ffn),
    }


Written = tuple[dict[str, Tensor], np.ndarray]  # a module's tensors, and its numbers
Writer = Callable[[np.random.Generator, int, int], Written]


@dataclass(frozen=True)
class Scheme:
    """A `quantization_config`, and a writer of one module's tensors."""

    settings: dict[str, Any]
    write: Writer


def words_of(codes: list[int], bits: int) -> list[int]:
    """Return signed 32-bit words with the codes one after the other, the lowest bits first."""
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    num_words = -(-len(codes) * bits // 32)
    words = [(number >> (32 * place)) & 0xFFFFFFFF for place in range(num_words)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed_rows(codes: np.ndarray, bits: int) -> Tensor:
    """Pack each row of codes into words."""
    return torch.tensor([words_of(row, bits) for row in codes.tolist()], dtype=torch.int32)


@dataclass(frozen=True)
class Drawn:
    """Random codes, zero points and scales of a matrix, and the numbers that they mean."""

    codes: np.ndarray  # [rows, columns]
    zeros: np.ndarray  # [rows, groups]
    scales: Tensor  # [rows, groups]
    numbers: np.ndarray  # [rows, columns]


def drawn(
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group_of: np.ndarray,
    zero: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Drawn:
    """Draw a matrix; `zero` is the zero point of all groups, or None for random ones."""
    rows, groups = shape[0], int(group_of.max()) + 1
    codes = rng.integers(0, 2**bits, shape)
    zeros = rng.integers(0, 2**bits, (rows, groups))
    if zero is not None:
        zeros = np.full((rows, groups), zero)
    scales = torch.from_numpy(rng.uniform(0.002, 0.02, (rows, groups))).to(dtype)
    numbers = (codes - zeros[:, group_of]) * scales.double().numpy()[:, group_of]
    return Drawn(codes, zeros, scales, numbers.astype(np.float32))


def neighbours(columns: int, size: int) -> np.ndarray:
    """Return the group of each column, in groups of `size`; -1 is the whole row."""
    return np.arange(columns) // (columns if size == -1 else size)


def gptq(bits: int, size: int, version: int, symmetric: bool, desc_act: bool = False) -> Scheme:
    """Return GPTQ in version 1 or 2."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        group_of = neighbours(columns, size)
        if desc_act:
            group_of = rng.permutation(group_of)
        found = drawn(rng, (rows, columns), bits, group_of, 2 ** (bits - 1) if symmetric else None)
        zeros = packed_rows(found.zeros.T, bits)
        if version == 1 and bits == 3:
            zeros = packed_rows((found.zeros.T - 1) % 8, bits)
        elif version == 1:  # whole words, so that a zero point of 0 borrows from the next one
            zeros = zeros - int("1".rjust(bits, "0") * (32 // bits), 2)
        parts = {
            "qweight": packed_rows(found.codes, bits).t(),  # inputs along a column of words
            "qzeros": zeros,
            "scales": found.scales.t(),
            "g_idx": torch.from_numpy(group_of).int(),
        }
        return parts, found.numbers

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "damp_percent": 0.01,
        "true_sequential": True,
    }
    return Scheme(settings, write)


def awq(size: int, zero_point: bool = True) -> Scheme:
    """Return AWQ's gemm version: nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of eight."""

    def packed(codes: np.ndarray) -> Tensor:
        order = [8 * word + place for word in range(codes.shape[1] // 8) for place in ORDER]
        return packed_rows(codes[:, order], 4)

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        group_of = neighbours(columns, size)
        found = drawn(rng, (rows, columns), 4, group_of, None if zero_point else 8)
        parts = {
            "qweight": packed(found.codes.T),
            "scales": found.scales.t().contiguous(),
            **({"qzeros": packed(found.zeros.T)} if zero_point else {}),
        }
        return parts, found.numbers

    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return Scheme({**settings, "zero_point": zero_point}, write)


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def compressed(form: str, weights: dict[str, Any], write: Writer) -> Scheme:
    """Return compressed-tensors with one group for all linear layers but the output head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }
    return Scheme(settings, write)


def integers(bits: int, size: int | None, symmetric: bool) -> dict[str, Any]:
    """Return the settings of integer weights; -1 is a row, None the whole matrix."""
    strategy = {None: "tensor", -1: "channel"}.get(size, "group")
    own = {"group_size": size} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **own}


def packed(bits: int, size: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Scheme:
    """Return compressed-tensors' pack-quantized."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        group_of, middle = neighbours(columns, size), 2 ** (bits - 1)
        zero = middle if symmetric else None
        found = drawn(rng, (rows, columns), bits, group_of, zero, dtype)
        parts = {
            "weight_packed": packed_rows(found.codes, bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            parts["weight_zero_point"] = packed_rows(found.zeros.T, bits).t().contiguous()
        return parts, found.numbers

    return compressed("pack-quantized", integers(bits, size, symmetric), write)


def signed_bytes(bits: int, size: int | None, symmetric: bool, form: str) -> Scheme:
    """Return compressed-tensors' int-quantized or naive-quantized."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        middle = 2 ** (bits - 1)
        group_of = neighbours(columns, -1 if size is None else size)
        zero = middle if symmetric else None
        found = drawn(rng, (rows, columns), bits, group_of, zero, torch.float32)
        scales, zeros, numbers = found.scales, found.zeros, found.numbers
        if size is None:
            scales, zeros = scales[:1, 0], zeros[:1, 0]
            wide = (found.codes - zeros[0]) * scales.double().numpy()[0]
            numbers = wide.astype(np.float32)
        parts = {
            "weight": torch.from_numpy(found.codes - middle).to(torch.int8),
            "weight_scale": scales.contiguous(),
            "input_scale": torch.ones(1),
        }
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zeros - middle).to(torch.int8)
        return parts, numbers

    return compressed(form, integers(bits, size, symmetric), write)


def float8_values() -> np.ndarray:
    """Return the numbers of all 256 codes of E4M3 (without infinities), by its definition."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        values.append(-size if code >> 7 else size)
    return np.array(values)


FINITE_CODES = np.array([code for code in range(256) if code & 127 != 127], dtype=np.uint8)
FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT4_VALUES = np.concatenate([FLOAT4_VALUES, -FLOAT4_VALUES])


def float8_blocks(
    rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return E4M3 codes, a scale per block, and the numbers."""
    codes = rng.choice(FINITE_CODES, shape)
    counts = [-(-size // width) for size, width in zip(shape, block, strict=True)]
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, counts)).to(dtype)
    places = [np.arange(size) // width for size, width in zip(shape, block, strict=True)]
    wide = scales.double().numpy()[np.ix_(*places)]
    numbers = (float8_values()[codes] * wide).astype(np.float32)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scales, numbers


def float8(block: tuple[int, int] | None, scheme: str = "fp8") -> Scheme:
    """Return FP8 by block, or with one scale (`block` is None), of two quantisation methods."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        shape, dtype = (rows, columns), torch.float32 if scheme == "fp8" else torch.bfloat16
        codes, scales, numbers = float8_blocks(rng, shape, block or shape, dtype)
        scales = scales if block is not None else scales.reshape(1)
        name = "weight_scale_inv" if scheme == "fp8" else "weight_scale"
        return {"weight": codes, name: scales}, numbers

    if scheme == "fp8":
        size = None if block is None else list(block)
        settings = {"quant_method": "fp8", "weight_block_size": size, "fmt": "e4m3"}
        return Scheme({**settings, "activation_scheme": "dynamic"}, write)
    strategy = {"strategy": "tensor"}
    if block is not None:
        strategy = {"strategy": "block", "block_structure": list(block)}  # type: ignore[dict-item]
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **strategy}
    return compressed("float-quantized", weights, write)


def float8_rows() -> Scheme:
    """Return compressed-tensors' float-quantized with a scale per row."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        codes, scales, numbers = float8_blocks(rng, (rows, columns), (1, columns), torch.bfloat16)
        return {"weight": codes, "weight_scale": scales}, numbers

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return compressed("float-quantized", weights, write)


def _pairs(codes: np.ndarray, first_high: bool = False) -> Tensor:
    low, high = codes[:, 0::2], codes[:, 1::2]
    if first_high:
        low, high = high, low
    return torch.from_numpy((low | high << 4).astype(np.uint8))


def nvfp4() -> Scheme:
    """Return compressed-tensors' NVFP4: groups of 16, E4M3 scales over one number per matrix."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        codes = rng.integers(0, 16, (rows, columns))
        scale_codes = rng.integers(40, 120, (rows, columns // 16)).astype(np.uint8)
        divisor = np.float32(rng.uniform(500, 3000))
        scales = float8_values()[scale_codes].astype(np.float32) / divisor
        numbers = FLOAT4_VALUES[codes].astype(np.float32) * np.repeat(scales, 16, axis=1)
        parts = {
            "weight_packed": _pairs(codes),
            "weight_scale": torch.from_numpy(scale_codes).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([float(divisor)]),
            "input_global_scale": torch.ones(1),
        }
        return parts, numbers

    own = {"strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", **own}, write)


def mxfp4(transformers: bool) -> Scheme:
    """Return MXFP4 in the layout of transformers or of compressed-tensors."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        codes = rng.integers(0, 16, (rows, columns))
        exponents = rng.integers(110, 125, (rows, columns // 32))
        scales = np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
        numbers = (FLOAT4_VALUES[codes] * scales).astype(np.float32)
        stored = torch.from_numpy(exponents.astype(np.uint8))
        if transformers:
            blocks = _pairs(codes).reshape(rows, columns // 32, 16)
            return {"weight_blocks": blocks, "weight_scales": stored}, numbers
        return {"weight_packed": _pairs(codes), "weight_scale": stored}, numbers

    if transformers:
        return Scheme({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, write)
    own = {"strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
    return compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", **own}, write)


def mxfp8() -> Scheme:
    """Return compressed-tensors' MXFP8: E4M3 numbers, and a power of two per 32 columns."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        codes = rng.choice(FINITE_CODES, (rows, columns))
        exponents = rng.integers(110, 125, (rows, columns // 32))
        scales = np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
        parts = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
        }
        return parts, (float8_values()[codes] * scales).astype(np.float32)

    own = {"strategy": "group", "group_size": 32, "symmetric": True}
    return compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", **own}, write)


# The levels as Dettmers et al. 2023 print them, in float32.
NF4_LEVELS = np.array(
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1.0".split(),
    dtype=np.float32,
)


def nf4(double: bool, size: int = 32) -> Scheme:
    """Return bitsandbytes' NF4, its scales in float32 or quantised again in blocks of 256."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        codes, count = rng.integers(0, 16, (rows, columns)), rows * columns // size
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "shape": [rows, columns]}
        state["dtype"] = "bfloat16"
        parts = {
            "weight": _pairs(codes, first_high=True).reshape(-1, 1),
            "weight.quant_map": torch.from_numpy(NF4_LEVELS.copy()),
        }
        absmax = rng.uniform(0.01, 0.1, count).astype(np.float32)
        parts["weight.absmax"] = torch.from_numpy(absmax)
        if double:
            levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            places = rng.integers(0, 256, count).astype(np.uint8)
            scales = rng.uniform(0.01, 0.02, -(-count // 256)).astype(np.float32)
            offset = 0.0625
            absmax = levels[places] * scales[np.arange(count) // 256] + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {
                "weight.absmax": torch.from_numpy(places),
                "weight.nested_absmax": torch.from_numpy(scales),
                "weight.nested_quant_map": torch.from_numpy(levels),
            }
        raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = raw
        flat = NF4_LEVELS[codes.reshape(-1, size)] * absmax[:, None]
        return parts, flat.reshape(rows, columns)

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    own = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return Scheme({**settings, **own, "bnb_4bit_compute_dtype": "bfloat16"}, write)


SCHEMES: dict[str, Scheme] = {
    "gptq 4 v1": gptq(4, 32, 1, symmetric=True),
    "gptq 4 v2": gptq(4, 32, 2, symmetric=True),
    "gptq 4 v1 asymmetric": gptq(4, 32, 1, symmetric=False),
    "gptq 4 v2 asymmetric": gptq(4, 16, 2, symmetric=False),
    "gptq 4 desc_act": gptq(4, 32, 1, symmetric=True, desc_act=True),
    "gptq 4 whole rows": gptq(4, -1, 1, symmetric=True),
    "gptq 8": gptq(8, 32, 1, symmetric=True),
    "gptq 8 asymmetric": gptq(8, 32, 1, symmetric=False),
    "gptq 3": gptq(3, 32, 2, symmetric=False),
    "gptq 3 v1": gptq(3, 32, 1, symmetric=False),
    "gptq 2": gptq(2, 32, 1, symmetric=False),
    "awq": awq(32),
    "awq without zero points": awq(16, zero_point=False),
    "packed 4": packed(4, 32, symmetric=True),
    "packed 4 asymmetric": packed(4, 32, symmetric=False),
    "packed 4 whole rows": packed(4, -1, symmetric=False),
    "packed 8": packed(8, 32, symmetric=True),
    "packed 3": packed(3, 32, symmetric=False),
    "packed 5": packed(5, 32, symmetric=True, dtype=torch.float32),
    "int rows": signed_bytes(8, -1, True, "int-quantized"),
    "int rows asymmetric": signed_bytes(8, -1, False, "int-quantized"),
    "int whole matrix": signed_bytes(8, None, True, "naive-quantized"),
    "int groups of 4 bits": signed_bytes(4, 32, False, "naive-quantized"),
    "fp8 blocks": float8((16, 16)),
    "fp8 ragged blocks": float8((40, 28)),
    "fp8 whole matrix": float8(None),
    "float8 blocks": float8((24, 32), "compressed-tensors"),
    "float8 whole matrix": float8(None, "compressed-tensors"),
    "float8 rows": float8_rows(),
    "nvfp4": nvfp4(),
    "mxfp4": mxfp4(transformers=True),
    "mxfp4 packed": mxfp4(transformers=False),
    "mxfp8": mxfp8(),
    "nf4": nf4(double=False),
    "nf4 double": nf4(double=True, size=16),
}


def tensors_of(
    scheme: Scheme, seed: int = 0, ffn: int = FFN
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Return a checkpoint's tensors, and the numbers of its quantised matrices."""
    rng = np.random.default_rng(seed)
    tensors, numbers = plain_tensors(rng), {}
    for module, (rows, columns) in modules(ffn).items():
        parts, numbers[f"{module}.weight"] = scheme.write(rng, rows, columns)
        tensors |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    return tensors, numbers


def plain_tensors(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the tensors that no scheme quantises: embedding, head and norms."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    }
    return {
        name: torch.from_numpy(rng.normal(0, 0.3, shape)).bfloat16()
        for name, shape in shapes.items()
    }


def save(directory: Path, tensors: dict[str, Tensor], settings: Any, **changes: Any) -> Path:
    """Save a checkpoint directory with these settings; None leaves them out."""
    directory.mkdir(exist_ok=True)
    config = {**CONFIG, **changes}
    if settings is not None:
        config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory
