"""The settings of each `quant_method` but compressed-tensors, and the parts of its matrices.

Sources: AutoGPTQ and GPTQModel (`quantize_config`), AutoAWQ, transformers' fine-grained FP8 and
MXFP4, bitsandbytes' `QuantState`.
"""

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.config_json import Values
from minigen.checkpoint.quantized.floats import (
    Fp4Matrix,
    Fp8Matrix,
    Nested,
    Nf4Matrix,
    check_levels,
)
from minigen.checkpoint.quantized.integers import AwqMatrix, GptqMatrix, gptq_shapes
from minigen.checkpoint.quantized.matrix import Groups, Parts, word_unit
from minigen.errors import ConfigError, FileFormatError, UnsupportedError, WeightsError

HALVES = (torch.float16, torch.bfloat16, torch.float32)  # of scales
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POWERS = tuple(getattr(torch, name) for name in ("uint8", "float8_e8m0fnu") if hasattr(torch, name))
_MXFP4_GROUP = 32
# What these keys say is also in the files, or has no meaning for inference.
_COMMON = "quant_method modules_to_not_convert modules_to_convert backend dequantize meta"
_IGNORED = {
    "gptq": "true_sequential damp_percent damp_auto_increment static_groups model_name_or_path "
    "model_file_base_name tokenizer dataset model_seqlen block_name_to_quantize batch_size "
    "module_name_preceding_first_block pad_token_id use_cuda_fp16 max_input_length lm_head "
    "use_exllama disable_exllama exllama_config cache_block_outputs act_group_aware mse "
    "modules_in_block_to_quantize hessian_chunk_size is_marlin_format quantizer "
    "offload_to_disk gptaq",
    "awq": "do_fuse exllama_config fuse_max_seq_len modules_to_fuse sym desc_act pack_dtype "
    "true_sequential damp_percent lm_head",
    "fp8": "activation_scheme fmt ignored_layers kv_cache_scheme",
    "mxfp4": "",
    "bitsandbytes": "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_use_double_quant "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules "
    "llm_int8_threshold",
}


def refuse_unknown(values: Values, known: str) -> None:
    """Raise `UnsupportedError` for a setting that minigen does not know."""
    given = {key for key in values.raw if values.get(key) is not None}
    unknown = sorted(given - set(known.split()))
    if unknown:
        raise UnsupportedError(
            f"{values.where}: minigen does not know {', '.join(map(reprlib.repr, unknown[:8]))}, "
            "and will not guess whether the weights depend on it; if they do not, remove it."
        )


def refuse_other(values: Values, key: str, *supported: Any) -> None:
    """Raise `UnsupportedError` unless a setting is absent, or one of those that are supported."""
    value = values.get(key)
    found = value.lower() if isinstance(value, str) else value
    if value is not None and not any(
        found == each and type(found) is type(each) for each in supported
    ):
        choice = ", ".join(map(repr, supported)) or "configurations without it"
        raise UnsupportedError(
            f"{values.where}: {key} is {reprlib.repr(value)}; minigen supports {choice}."
        )


def group_size(values: Values, key: str = "group_size", default: int | None = None) -> int | None:
    """Return the columns that share a scale; None for a whole row, which files write as -1."""
    if values.get(key, default) == -1:
        return None
    return values.count(key, default)


def groups_of(columns: int, size: int | None, where: str) -> Groups:
    """Return the groups of a row. Raises `WeightsError` for a group that is wider than the row."""
    if size is not None and size > columns:
        raise WeightsError(
            f"{where} has rows of {columns} numbers, which are fewer than the group_size {size}."
        )
    return Groups(size or columns, math.ceil(columns / (size or columns)))


@dataclass(frozen=True)
class Gptq:
    """GPTQ in versions 1 and 2, with 2, 3, 4 or 8 bits, with `desc_act` or without."""

    bits: int
    size: int | None
    symmetric: bool
    desc_act: bool
    one_less: bool

    @classmethod
    def read(cls, values: Values) -> "Gptq":
        """Read the settings. Raises `ConfigError` or `UnsupportedError`."""
        own = "bits group_size sym desc_act checkpoint_format format pack_dtype dynamic method"
        refuse_unknown(values, f"{_COMMON} {own} {_IGNORED['gptq']}")
        refuse_other(values, "bits", 2, 3, 4, 8)
        for key in ("checkpoint_format", "format"):
            refuse_other(values, key, "gptq", "gptq_v2")
        refuse_other(values, "pack_dtype", "int32")
        refuse_other(values, "method", "gptq")
        if values.get("dynamic"):
            raise UnsupportedError(
                f"{values.where}: dynamic gives some modules settings of their own, which minigen "
                "does not support."
            )
        formats = {str(values.get(key)).lower() for key in ("checkpoint_format", "format")}
        if formats >= {"gptq", "gptq_v2"}:
            raise ConfigError(f"{values.where}: checkpoint_format and format differ.")
        return cls(
            values.count("bits"),
            group_size(values),
            values.flag("sym") if "sym" in values.raw else True,
            values.flag("desc_act"),
            "gptq_v2" not in formats,
        )

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name in ("qweight", "qzeros", "scales", "g_idx")

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> GptqMatrix | None:
        """Return a module's matrix, or None if the module is not quantised."""
        if "qweight" not in parts.raw:
            return None
        rows, columns = shape
        unit, why = word_unit(self.bits), f"{self.bits} bits and {rows} x {columns} weights"
        if rows % unit or columns % unit:
            raise WeightsError(
                f"{parts.where} of {rows} x {columns} cannot be GPTQ of {self.bits} bits, whose "
                f"words hold multiples of {unit} numbers."
            )
        groups = groups_of(columns, self.size, parts.where)
        shapes = gptq_shapes(rows, columns, self.bits, groups.count)
        stored = [
            parts.need("qweight", shapes["qweight"], torch.int32, why=why),
            parts.need("qzeros", shapes["qzeros"], torch.int32, why=why),
            parts.need("scales", shapes["scales"], *HALVES, why=why),
        ]
        groups = self._ordered(groups, parts, columns)
        how = (self.bits, self.symmetric, self.one_less, columns)
        return GptqMatrix(parts.where, *how, groups, *stored)

    def _ordered(self, groups: Groups, parts: Parts, columns: int) -> Groups:
        if self.desc_act and "g_idx" not in parts.raw:
            raise WeightsError(f"{parts.where} has no g_idx, which desc_act needs.")
        return ordered(groups, parts.find("g_idx", (columns,), torch.int32), parts.where)


def ordered(groups: Groups, g_idx: Tensor | None, where: str) -> Groups:
    """Return groups with a `g_idx` if it is not the order of the columns.

    Raises `FileFormatError` for a group that does not exist.
    """
    if g_idx is None or g_idx.is_meta:
        return groups
    places = g_idx.long()
    if not ((places >= 0) & (places < groups.count)).all():
        raise FileFormatError(
            f"{where}.g_idx names the group {int(places.max())} or {int(places.min())}, but the "
            f"groups are 0 to {groups.count - 1}."
        )
    if torch.equal(places, groups.of_columns(len(places))):
        return groups
    return Groups(groups.size, groups.count, places)


@dataclass(frozen=True)
class Awq:
    """AWQ's gemm version, 4 bits, with zero points or without."""

    size: int | None
    zero_point: bool

    @classmethod
    def read(cls, values: Values) -> "Awq":
        """Read the settings. Raises `ConfigError` or `UnsupportedError`."""
        own = (
            "bits w_bit group_size q_group_size zero_point version format checkpoint_format method"
        )
        refuse_unknown(values, f"{_COMMON} {own} {_IGNORED['awq']}")
        for key in ("bits", "w_bit"):
            refuse_other(values, key, 4)
        for key in ("version", "format", "checkpoint_format"):
            refuse_other(values, key, "gemm")
        refuse_other(values, "method", "awq")
        refuse_other(values, "desc_act", False)
        refuse_other(values, "pack_dtype", "int32")
        key = "q_group_size" if "q_group_size" in values.raw else "group_size"
        return cls(
            group_size(values, key, 128),
            values.flag("zero_point") if "zero_point" in values.raw else True,
        )

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name in ("qweight", "qzeros", "scales")

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> AwqMatrix | None:
        """Return a module's matrix, or None if the module is not quantised."""
        if "qweight" not in parts.raw:
            return None
        rows, columns = shape
        if rows % 8:
            raise WeightsError(
                f"{parts.where} of {rows} x {columns} cannot be AWQ, whose words hold 8 rows."
            )
        groups, why = groups_of(columns, self.size, parts.where), f"{rows} x {columns} weights"
        if not self.zero_point and "qzeros" in parts.raw:
            raise WeightsError(f"{parts.where} has qzeros although zero_point is false.")
        zeros_shape = (groups.count, rows // 8)
        return AwqMatrix(
            parts.where,
            groups,
            parts.need("qweight", (columns, rows // 8), torch.int32, why=why),
            parts.need("qzeros", zeros_shape, torch.int32, why=why) if self.zero_point else None,
            parts.need("scales", (groups.count, rows), *HALVES, why=why),
        )


@dataclass(frozen=True)
class Fp8:
    """FP8 with a scale per block, or per matrix; activations stay as they are."""

    block: tuple[int, int] | None

    @classmethod
    def read(cls, values: Values) -> "Fp8":
        """Read the settings. Raises `ConfigError` or `UnsupportedError`."""
        own = "weight_block_size scale_fmt expert_dtype"
        refuse_unknown(values, f"{_COMMON} {own} {_IGNORED['fp8']}")
        refuse_other(values, "scale_fmt", "float", "ue8m0")
        return cls(block_of(values, "weight_block_size"))

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name in ("weight", "weight_scale_inv", "weight_scale")

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> Fp8Matrix | None:
        """Return a module's matrix, or None if the module is not quantised."""
        if "weight" not in parts.raw or parts.raw["weight"].tensor.dtype not in FP8:
            return None
        name = "weight_scale" if "weight_scale" in parts.raw else "weight_scale_inv"
        return fp8_matrix(parts, shape, self.block, name, (*HALVES, *POWERS[1:]))


def block_of(values: Values, key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if there is none."""
    found = values.get(key)
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(each) is int and 1 <= each < 2**31 for each in found)
    ):
        raise ConfigError(
            f"{values.where}: {key} must be two positive whole numbers, not {reprlib.repr(found)}."
        )
    return found[0], found[1]


def fp8_matrix(
    parts: Parts,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    scale_name: str,
    scale_dtypes: tuple[torch.dtype, ...],
) -> Fp8Matrix:
    """Return an FP8 matrix with a scale per block, or one scale if `block` is None."""
    codes = parts.need("weight", shape, *FP8)
    if block is None:
        whole = parts.raw[scale_name].tensor if scale_name in parts.raw else None
        found = (1,) if whole is None or whole.dim() == 1 else ()
        scale = parts.need(scale_name, found, *scale_dtypes, why="one scale per matrix")
        return Fp8Matrix(parts.where, "per matrix", codes, scale.reshape(1, 1), shape)
    blocks = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    why = f"blocks of {block[0]} x {block[1]} in {shape[0]} x {shape[1]} weights"
    scales = parts.need(scale_name, blocks, *scale_dtypes, why=why)
    per = "per row" if block == (1, shape[1]) else f"{block[0]}x{block[1]}"
    return Fp8Matrix(parts.where, per, codes, scales, block)


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 in the layout of transformers: blocks of 16 bytes, and a power of two for each.

    transformers itself has it for the experts of GPT-OSS alone, which minigen does not run. The
    names here are formed in the same way: those of a parameter, plus `_blocks` and `_scales`.
    """

    @classmethod
    def read(cls, values: Values) -> "Mxfp4":
        """Read the settings. Raises `UnsupportedError`."""
        refuse_unknown(values, _COMMON)
        return cls()

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name in ("weight_blocks", "weight_scales")

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> Fp4Matrix | None:
        """Return a module's matrix, or None if the module is not quantised."""
        if "weight_blocks" not in parts.raw:
            return None
        rows, columns = shape
        need_whole_groups(parts, columns, _MXFP4_GROUP)
        groups, why = columns // _MXFP4_GROUP, f"MXFP4 of {rows} x {columns} weights"
        blocks = parts.need("weight_blocks", (rows, groups, 16), torch.uint8, why=why)
        scales = parts.need("weight_scales", (rows, groups), *POWERS, why=why)
        packed = blocks.flatten(-2)
        return Fp4Matrix(parts.where, "MXFP4", packed, scales, _MXFP4_GROUP, None)


def need_whole_groups(parts: Parts, columns: int, size: int) -> None:
    """Raise `WeightsError` if a row does not consist of whole groups."""
    if columns % size:
        raise WeightsError(
            f"{parts.where} has rows of {columns} numbers, which are not whole groups of {size}."
        )


@dataclass(frozen=True)
class Bitsandbytes:
    """bitsandbytes' NF4, with its scales quantised again or not."""

    @classmethod
    def read(cls, values: Values) -> "Bitsandbytes":
        """Read the settings. Raises `UnsupportedError` for 8 bits, FP4 and packed storage."""
        own = "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage"
        refuse_unknown(values, f"{_COMMON} {own} {_IGNORED['bitsandbytes']}")
        refuse_other(values, "load_in_8bit", False)
        refuse_other(values, "bnb_4bit_quant_type", "nf4")
        refuse_other(values, "bnb_4bit_quant_storage", "uint8")
        return cls()

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name.partition(".")[0] == "weight"

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> Nf4Matrix | None:
        """Return a module's matrix, or None if the module is not quantised."""
        state_name = "weight.quant_state.bitsandbytes__nf4"
        if state_name not in parts.raw:
            others = [name for name in parts.raw if name.startswith("weight.quant_state.")]
            if others:
                kind = others[0].removeprefix("weight.quant_state.")
                raise UnsupportedError(f"{parts.where} is stored as {kind}; minigen reads NF4.")
            return None
        rows, columns = shape
        count, absmax = rows * columns, parts.raw.get("weight.absmax")
        num_groups = 1 if absmax is None else max(absmax.tensor.numel(), 1)
        values = _quant_state(parts, state_name, shape)
        size = values.count("blocksize", max(count // num_groups, 1))
        need_whole_groups(parts, columns, math.lcm(size, 2))
        why = f"NF4 of {rows} x {columns} weights"
        packed = parts.need("weight", (count // 2, 1), torch.uint8, why=why)
        levels = parts.need("weight.quant_map", (16,), torch.float32, why=why)
        if not levels.is_meta:
            check_levels(levels, parts.where)
        nested = None
        if "weight.nested_absmax" in parts.raw:
            nested = _nested(parts, values, count // size, columns // size)
        dtype = torch.float32 if nested is None else torch.uint8
        scales = parts.need("weight.absmax", (count // size,), dtype, why=why)
        return Nf4Matrix(
            parts.where,
            packed.reshape(rows, columns // 2),
            scales.reshape(rows, columns // size),
            size,
            nested,
        )


def _quant_state(parts: Parts, name: str, shape: tuple[int, int]) -> Values:
    """Return bitsandbytes' JSON in a tensor of bytes; without bytes, its usual values."""
    tensor, where = parts.raw[name].tensor, f"{parts.where}.{name}"
    if tensor.is_meta:
        return Values({}, where, {"nested_offset": 0.0})
    try:
        state = json.loads(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    except (ValueError, RecursionError, RuntimeError):
        raise FileFormatError(f"{where} is not JSON.") from None
    if not isinstance(state, dict) or state.get("quant_type") != "nf4":
        raise FileFormatError(f"{where} must be an object whose quant_type is nf4.")
    if state.get("shape") != list(shape):
        raise WeightsError(
            f"{where} has the shape {reprlib.repr(state.get('shape'))}, but the model needs "
            f"{list(shape)}."
        )
    return Values(state, where, {})


def _nested(parts: Parts, values: Values, num_groups: int, row_groups: int) -> Nested:
    block, offset = values.count("nested_blocksize", 256), values.get("nested_offset")
    is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
    if not is_number or not abs(offset) < 1e30:
        raise FileFormatError(
            f"{values.where}: nested_offset must be a number below 1e30, not "
            f"{reprlib.repr(offset)}."
        )
    num_blocks = math.ceil(num_groups / block)
    return Nested(
        parts.need("weight.nested_quant_map", (256,), torch.float32),
        parts.need("weight.nested_absmax", (num_blocks,), torch.float32),
        float(offset),
        block,
        row_groups,
    )
