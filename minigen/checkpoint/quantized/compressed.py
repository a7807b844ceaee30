"""compressed-tensors: one file format for many schemes, chosen by groups of target modules.

Source: the `compressed-tensors` library, `quantization/quant_config.py` for the settings,
`utils/match.py` for the targets, and `compressors/` for the tensors.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.config_json import Values
from minigen.checkpoint.quantized.floats import Fp4Matrix, Fp8Matrix
from minigen.checkpoint.quantized.integers import Int8Matrix, PackedMatrix
from minigen.checkpoint.quantized.matrix import Groups, Parts, StoredMatrix, num_words
from minigen.checkpoint.quantized.methods import (
    FP8,
    HALVES,
    POWERS,
    block_of,
    fp8_matrix,
    groups_of,
    need_whole_groups,
    ordered,
    refuse_other,
    refuse_unknown,
)
from minigen.errors import ConfigError, UnsupportedError, WeightsError

_DENSE = ("dense", "fakequant")
_MX_GROUP, _NV_GROUP = 32, 16
_SCALED = "weight weight_scale"
_PARTS = {  # of a module, by format; a zero point of floats may be there if it is zero
    "pack-quantized": "weight_packed weight_scale weight_shape weight_zero_point weight_g_idx",
    "int-quantized": f"{_SCALED} weight_zero_point",
    "float-quantized": f"{_SCALED} weight_zero_point",
    "naive-quantized": f"{_SCALED} weight_zero_point",
    "nvfp4-pack-quantized": "weight_packed weight_scale weight_global_scale weight_zero_point",
    "mxfp4-pack-quantized": "weight_packed weight_scale weight_zero_point",
    "mxfp8-quantized": f"{_SCALED} weight_zero_point",
}
_ALL_PARTS = frozenset(" ".join(_PARTS.values()).split())
_CONFIG_KEYS = (
    "quant_method format config_groups ignore kv_cache_scheme quantization_status version "
    "global_compression_ratio sparsity_config transform_config moe_sparsity_config run_compressed "
    "dequantize use_optimized_inference"
)
_GROUP_KEYS = "targets weights input_activations output_activations format"
_WEIGHT_KEYS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype "
    "zp_dtype observer observer_kwargs is_mx"
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_MOST_CHOICES, _MOST_CHARACTERS = 5, 200  # of a pattern from a file
_MOST_PATTERNS = 200  # of one list, each tried on every module


@dataclass(frozen=True)
class Weights:
    """How the weights of one group of modules are stored; `size` is None for a whole row."""

    format: str
    bits: int
    is_float: bool
    strategy: str
    size: int | None
    block: tuple[int, int] | None

    @classmethod
    def read(cls, values: Values, form: str) -> "Weights":
        """Read the settings of a group's weights. Raises `ConfigError` or `UnsupportedError`."""
        refuse_unknown(values, _WEIGHT_KEYS)
        refuse_other(values, "dynamic", False)
        refuse_other(values, "type", "int", "float")
        refuse_other(values, "strategy", *_STRATEGIES)
        size = values.get("group_size")
        size = None if size in (None, -1) else values.count("group_size")
        block = block_of(values, "block_structure")
        strategy = values.get("strategy")
        if strategy is None:
            by_row = "channel" if values.get("group_size") == -1 else "tensor"
            strategy = "group" if size is not None else by_row
        strategy = strategy.lower()
        if ("group" in strategy) != (size is not None) or (strategy == "block") != bool(block):
            raise ConfigError(
                f"{values.where}: the strategy {strategy!r} contradicts group_size "
                f"{values.get('group_size')} and block_structure {block}."
            )
        is_float = str(values.get("type", "int")).lower() == "float"
        return cls(form, values.count("num_bits", 8, most=8), is_float, strategy, size, block)


@dataclass(frozen=True)
class CompressedTensors:
    """The groups of modules with their settings, and the modules that are not quantised."""

    groups: tuple[tuple[tuple[str, ...], Weights], ...]
    ignored: tuple[str, ...]
    where: str

    @classmethod
    def read(cls, values: Values) -> "CompressedTensors":
        """Read the settings. Raises `ConfigError` or `UnsupportedError`."""
        refuse_unknown(values, _CONFIG_KEYS)
        sparsity = values.get("sparsity_config")
        if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in _DENSE):
            raise UnsupportedError(f"{values.where}: minigen does not read a sparsity_config.")
        if values.get("transform_config"):
            raise UnsupportedError(
                f"{values.where}: transform_config rotates activations, which minigen does not do."
            )
        groups = values.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"{values.where}: config_groups must name at least one group.")
        read = (
            _group(group, f"{values.where}.config_groups.{_shown(name)}", values.get("format"))
            for name, group in groups.items()
        )
        ignored = _patterns(values.get("ignore", []), f"{values.where}: ignore")
        return cls(tuple(each for each in read if each is not None), ignored, values.where)

    def uses(self, name: str) -> bool:
        """Return whether a part is read with the matrix."""
        return name in _ALL_PARTS

    def matrix(self, parts: Parts, shape: tuple[int, int]) -> StoredMatrix | None:
        """Return a module's matrix, or None if the module is not quantised.

        Raises `WeightsError` if a module is stored quantised, but the settings do not say how.
        """
        plain = (torch.float32, torch.float16, torch.bfloat16)
        if "weight_packed" not in parts.raw and (
            "weight" not in parts.raw or parts.raw["weight"].tensor.dtype in plain
        ):
            return None
        weights = None if self._matches(parts.module, self.ignored) else self._weights(parts.module)
        if weights is None:
            raise WeightsError(
                f"{parts.where} is stored quantised, but quantization_config ignores it or has no "
                "target that names it."
            )
        strays = set(parts.raw) & _ALL_PARTS - set(_PARTS[weights.format].split())
        if strays:
            raise WeightsError(
                f"{parts.where} has {', '.join(sorted(strays))}, which {weights.format} lacks."
            )
        return _MATRICES[weights.format](parts, shape, weights)

    def _weights(self, module: str) -> Weights | None:
        """Return the settings of a module: those that name it first, then patterns, then types."""
        for kind in (_is_name, _is_pattern, _is_type):
            for targets, weights in self.groups:
                if self._matches(module, tuple(each for each in targets if kind(each))):
                    return weights
        return None

    def _matches(self, module: str, targets: tuple[str, ...]) -> bool:
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        return any(
            re.match(target.removeprefix("re:"), module) is not None
            if _is_pattern(target)
            else target in (module, kind)
            for target in targets
        )


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_type(target: str) -> bool:
    return target in ("Linear", "Embedding")


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_type(target)


def _group(group: Any, where: str, common_format: Any) -> tuple[tuple[str, ...], Weights] | None:
    """Return a group's targets and settings; None if its weights are not quantised."""
    if not isinstance(group, Mapping):
        raise UnsupportedError(
            f"{where} must be an object, not {reprlib.repr(group)}; minigen does not know the "
            "names of preset schemes."
        )
    values = Values(group, where, {})
    refuse_unknown(values, _GROUP_KEYS)
    targets = _patterns(values.get("targets", []), f"{where}: targets")
    weights, form = values.get("weights"), values.get("format", common_format)
    if weights is None or form in _DENSE:
        return None
    if form not in tuple(_PARTS):  # a tuple, because a wrong value may be unhashable
        raise UnsupportedError(
            f"{where}: format is {reprlib.repr(form)}; minigen reads {', '.join(_PARTS)}."
        )
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where}: weights must be an object, not {reprlib.repr(weights)}.")
    return targets, Weights.read(Values(weights, f"{where}.weights", {}), form)


def _shown(name: str) -> str:
    """Return a name of a file's own choice as messages show it."""
    return name if name.isprintable() and len(name) < 40 else reprlib.repr(name)


def _patterns(targets: Any, where: str) -> tuple[str, ...]:
    """Return targets whose patterns are safe to match: few choices, none of them repeated."""
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ConfigError(f"{where} must be a list of names, not {reprlib.repr(targets)}.")
    patterns = list(filter(_is_pattern, targets))
    if len(patterns) > _MOST_PATTERNS:
        raise UnsupportedError(
            f"{where} has {len(patterns)} patterns; minigen reads at most {_MOST_PATTERNS}."
        )
    for target in patterns:
        slow = _num_choices(target.removeprefix("re:")) > _MOST_CHOICES
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError):
            slow = True
        if slow or len(target) > _MOST_CHARACTERS:
            raise UnsupportedError(
                f"{where} has the pattern {reprlib.repr(target)}, which is not valid or could take "
                "too long to match."
            )
    return tuple(targets)


def _num_choices(pattern: str) -> float:
    """Return at how many places a pattern lets the matcher choose, which multiply its tries.

    They are repetitions, optional parts, and groups if there are alternatives. A repeated group
    counts as endless, because its choices multiply with each turn.

    >>> [_num_choices(each) for each in (r".*mlp\\.(gate|up)_proj$", ".*?[*+]", "(a+)+")]
    [2, 1, inf]
    """
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)  # escapes and sets: one character
    bare = re.sub(r"(?<=[*+?}])[?+]", "", bare.replace("(?", "("))  # lazy, possessive
    if re.search(r"\)[*+?{]", bare):
        return math.inf
    groups = bare.count("(") if "|" in bare else 0
    return groups + len(re.findall(r"[*+?{]", bare))


def _scales(parts: Parts, shape: tuple[int, int], weights: Weights) -> tuple[Groups, Tensor]:
    """Return an integer matrix's groups and its scales, [rows, groups]."""
    rows, columns = shape
    groups = groups_of(columns, weights.size, parts.where)
    if weights.strategy == "tensor":
        found = parts.raw["weight_scale"].tensor if "weight_scale" in parts.raw else None
        one = () if found is not None and found.dim() == 0 else (1,)
        scale = parts.need("weight_scale", one, *HALVES, why="one scale per matrix")
        return groups, scale.reshape(1, 1).expand(rows, 1)
    why = f"groups of {groups.size} in {rows} x {columns} weights"
    return groups, parts.need("weight_scale", (rows, groups.count), *HALVES, why=why)


def _refuse_zero_points(parts: Parts) -> None:
    """Raise `UnsupportedError` for floats with a zero point that is not zero."""
    zeros = parts.raw.get("weight_zero_point")
    if zeros is None or zeros.tensor.is_meta:
        return
    if zeros.tensor.is_complex() or zeros.tensor.float().any():
        raise UnsupportedError(
            f"{parts.where} has floats with zero points, which minigen does not read."
        )


def _need_integers(parts: Parts, weights: Weights) -> None:
    if weights.is_float or weights.strategy == "block":
        kind = "float" if weights.is_float else "int"
        raise UnsupportedError(
            f"{parts.where} is {weights.format} with weights of type {kind} and the strategy "
            f"{weights.strategy}, which minigen does not read."
        )


def _packed(parts: Parts, shape: tuple[int, int], weights: Weights) -> PackedMatrix:
    rows, columns = shape
    _need_integers(parts, weights)
    declared = parts.need("weight_shape", (2,), torch.int64, torch.int32)
    if not declared.is_meta and declared.tolist() != [rows, columns]:
        raise WeightsError(
            f"{parts.where}.weight_shape is {declared.tolist()}, but the model needs "
            f"{[rows, columns]}."
        )
    groups, scales = _scales(parts, shape, weights)
    why = f"{weights.bits} bits and {rows} x {columns} weights"
    words = (rows, num_words(columns, weights.bits))
    zeros_shape = (num_words(rows, weights.bits), groups.count)
    g_idx = parts.find("weight_g_idx", (columns,), torch.int32)
    return PackedMatrix(
        parts.where,
        weights.bits,
        columns,
        ordered(groups, g_idx, parts.where),
        parts.need("weight_packed", words, torch.int32, why=why),
        parts.find("weight_zero_point", zeros_shape, torch.int32, why=why),
        scales,
    )


def _bytes(parts: Parts, shape: tuple[int, int], weights: Weights) -> Int8Matrix:
    _need_integers(parts, weights)
    groups, scales = _scales(parts, shape, weights)
    stored = (
        scales.shape if weights.strategy != "tensor" else parts.raw["weight_scale"].tensor.shape
    )
    zeros = parts.find("weight_zero_point", tuple(stored), torch.int8)
    if zeros is not None and weights.strategy == "tensor":
        zeros = zeros.reshape(1, 1).expand(len(scales), 1)
    codes = parts.need("weight", shape, torch.int8)
    return Int8Matrix(parts.where, weights.bits, groups, codes, zeros, scales)


def _float8(parts: Parts, shape: tuple[int, int], weights: Weights) -> Fp8Matrix:
    if not weights.is_float or weights.bits != 8:
        raise UnsupportedError(
            f"{parts.where} is {weights.format} with {weights.bits} bits; minigen reads it with "
            "floats of 8 bits."
        )
    _refuse_zero_points(parts)
    dtypes = POWERS if weights.format == "mxfp8-quantized" else HALVES
    blocks = {
        "tensor": None,
        "channel": (1, shape[1]),
        "group": (1, weights.size or shape[1]),
        "tensor_group": (1, weights.size or shape[1]),
        "block": weights.block,
    }
    return fp8_matrix(parts, shape, blocks[weights.strategy], "weight_scale", dtypes)


def _naive(parts: Parts, shape: tuple[int, int], weights: Weights) -> StoredMatrix:
    return (_float8 if weights.is_float else _bytes)(parts, shape, weights)


def _nvfp4(parts: Parts, shape: tuple[int, int], weights: Weights) -> Fp4Matrix:
    divisor = parts.need("weight_global_scale", (1,), torch.float32)
    return _float4(parts, shape, _NV_GROUP, "NVFP4", FP8[:1], divisor.reshape(()))


def _mxfp4(parts: Parts, shape: tuple[int, int], weights: Weights) -> Fp4Matrix:
    return _float4(parts, shape, _MX_GROUP, "MXFP4", POWERS, None)


def _float4(
    parts: Parts,
    shape: tuple[int, int],
    size: int,
    name: str,
    scale_dtypes: tuple[torch.dtype, ...],
    divisor: Tensor | None,
) -> Fp4Matrix:
    rows, columns = shape
    _refuse_zero_points(parts)
    need_whole_groups(parts, columns, size)
    why = f"{name} of {rows} x {columns} weights"
    packed = parts.need("weight_packed", (rows, columns // 2), torch.uint8, why=why)
    scales = parts.need("weight_scale", (rows, columns // size), *scale_dtypes, why=why)
    return Fp4Matrix(parts.where, name, packed, scales, size, divisor)


_MATRICES: dict[str, Callable[[Parts, tuple[int, int], Weights], StoredMatrix]] = {
    "pack-quantized": _packed,
    "int-quantized": _bytes,
    "float-quantized": _float8,
    "naive-quantized": _naive,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _float8,
}
