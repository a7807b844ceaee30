"""Quantized matrices in the form of compressed-tensors, which vLLM and transformers open.

Each matrix has a few tensors instead of its weight, and `quantization_config` in `config.json` says
which scheme holds for which modules. Weights of 2 to 8 bits are packed densely into 32-bit words
("pack-quantized"). Where the activations are quantized too, weights have one byte each:
"int-quantized" and "float-quantized". This is also how the library itself chooses the format.

Source: `vllm-project/compressed-tensors`, its `quantization/quant_args.py` for the configuration
and its compressors for the tensors. In the library a code is signed and the packed word holds
code + 2^(bits - 1); that is the unsigned code of `minigen.quantization.grid`.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from minigen.errors import WeightsError
from minigen.export.partial import Piece
from minigen.quantization.float_codes import NF4_VALUES, Fp8Matrix, Nf4Matrix
from minigen.quantization.grid import Grid, QuantizedMatrix, pack_codes, unpack_codes

_VERSION = "0.9.0"  # of the form of `quantization_config` that is written here
_DYNAMIC = {"dynamic": True, "strategy": "token", "symmetric": True}
INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", **_DYNAMIC}  # one scale per token, when it runs
_BY_ROW = {"strategy": "channel", "group_size": None, "symmetric": True, "dynamic": False}
FLOAT8_ACTIVATIONS = {"num_bits": 8, "type": "float", **_DYNAMIC}
NF4 = "nf4"  # the form of a piece
_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float16",
    "bnb_4bit_quant_storage": "uint8",
}


def packed_piece(matrix: QuantizedMatrix, scale_dtype: torch.dtype) -> Piece:
    """Return a matrix whose codes are packed into 32-bit words, for weights alone.

    Zero points are packed along the rows. Raises `WeightsError` if they are no codes.
    """
    rows, columns = matrix.shape
    tensors = {
        "weight_packed": pack_codes(matrix.codes, matrix.grid.bits),
        "weight_scale": matrix.scales.to(scale_dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not matrix.grid.symmetric:
        zeros = matrix.zeros.round()
        if not torch.equal(zeros, matrix.zeros) or zeros.min() < 0:
            raise WeightsError("The zero points must be codes, whole numbers from 0.")
        packed = pack_codes(zeros.to(torch.uint8).T.contiguous(), matrix.grid.bits)
        tensors["weight_zero_point"] = packed.T.contiguous()
    return Piece(_form("pack-quantized", _weights_of(matrix.grid), None), tensors)


def int8_piece(codes: Int8[Tensor, "rows columns"], scales: Float[Tensor, "rows 1"]) -> Piece:
    """Return a matrix of int8 codes with one scale per row, to be multiplied with int8 activations.

    Scales stay in float32, as vLLM keeps them: one per row costs next to nothing.
    """
    weights = {**_BY_ROW, "num_bits": 8, "type": "int"}
    form = _form("int-quantized", weights, INT8_ACTIVATIONS)
    return Piece(form, {"weight": codes, "weight_scale": scales.float()})


def float8_piece(matrix: Fp8Matrix) -> Piece:
    """Return a matrix in float8 (e4m3fn) with one float32 scale per row, for float8 activations."""
    weights = {**_BY_ROW, "num_bits": 8, "type": "float"}
    form = _form("float-quantized", weights, FLOAT8_ACTIVATIONS)
    return Piece(form, {"weight": matrix.codes, "weight_scale": matrix.scales.float()})


def nf4_piece(matrix: Nf4Matrix, dtype: torch.dtype) -> Piece:
    """Return a matrix in bitsandbytes' form: two codes per byte, the first in the upper half.

    `dtype` is what the library dequantizes to. Source: bitsandbytes' `QuantState.as_dict`.
    """
    rows, columns = matrix.codes.shape
    pairs = matrix.codes.flatten().unflatten(0, (-1, 2))
    state = {
        "quant_type": "nf4",
        "blocksize": matrix.codes.numel() // matrix.absmax.numel(),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [rows, columns],
    }
    tensors = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1]).unsqueeze(-1),
        "weight.absmax": matrix.absmax.flatten(),
        "weight.quant_map": NF4_VALUES.clone(),
        _NF4_STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return Piece(NF4, tensors)


def dequantize_packed(piece: Piece) -> Float[Tensor, "rows columns"]:
    """Return the weights that a piece stands for, in float32."""
    tensors = piece.tensors
    if piece.form == NF4:
        shape = json.loads(bytes(tensors[_NF4_STATE].tolist()))["shape"]
        halves = tensors["weight"].view(shape[0], -1)
        codes = torch.stack([halves >> 4, halves & 15], dim=-1).flatten(-2)
        return Nf4Matrix(codes, tensors["weight.absmax"].view(shape[0], -1)).dequantize()
    scales = tensors["weight_scale"].float()
    if "weight" in tensors:
        return tensors["weight"].float() * scales
    rows, columns = tensors["weight_shape"].tolist()
    bits = json.loads(piece.form)["weights"]["num_bits"]
    codes = unpack_codes(tensors["weight_packed"], bits, columns).float()
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        packed = tensors["weight_zero_point"].T.contiguous()
        zeros = unpack_codes(packed, bits, rows).T.float()
    groups = codes.unflatten(-1, (scales.shape[-1], -1))
    return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2)


def quantization_config(forms: Mapping[str, str]) -> dict[str, Any]:
    """Return `quantization_config` from the forms of all matrices, by the names of their modules.

    If all have one form, it holds for all linear layers; otherwise each form lists its modules. The
    output head is never quantized.
    """
    if set(forms.values()) == {NF4}:
        return dict(_BITSANDBYTES)
    groups: dict[str, list[str]] = {}
    for module, form in forms.items():
        groups.setdefault(form, []).append(module)
    written = {
        f"group_{place}": {
            "targets": ["Linear"] if len(groups) == 1 else modules,
            "output_activations": None,
            **json.loads(form),
        }
        for place, (form, modules) in enumerate(groups.items())
    }
    formats = {group["format"] for group in written.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": written,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": _VERSION,
    }


def _form(name: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> str:
    described = {"format": name, "weights": weights, "input_activations": activations}
    return json.dumps(described, sort_keys=True)


def _weights_of(grid: Grid) -> dict[str, Any]:
    by_row = grid.group_size == -1
    return {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "strategy": "channel" if by_row else "group",
        "group_size": None if by_row else grid.group_size,
        "dynamic": False,
    }
