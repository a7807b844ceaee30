"""Makes the piece of one matrix: its method's result in the form of the output's file format."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import WeightsError
from minigen.export.compressed_writer import (
    dequantize_packed,
    float8_piece,
    int8_piece,
    nf4_piece,
    packed_piece,
)
from minigen.export.gguf_blocks import blocks_of_matrix, dequantize_rows, quantize_rows
from minigen.export.partial import Piece
from minigen.export.plan import Plan
from minigen.quantization.float_codes import round_to_fp8, round_to_nf4
from minigen.quantization.grid import QuantizedMatrix, round_to_nearest
from minigen.quantization.smoothquant import round_rows_to_int8


def plain_piece(
    tensor: StoredTensor, plan: Plan, importance: Float[Tensor, " columns"] | None = None
) -> Piece:
    """Quantize a stored matrix that needs no other matrix, nor inputs besides `importance`."""
    with naming(tensor.name):
        return piece_of(tensor.name, tensor.dequantize(), plan, importance)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put a tensor's name before the message of a `WeightsError`."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{name}: {error}") from None


def finite(name: str, numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return numbers. Raises `WeightsError` that names them, if one is not finite."""
    if not numbers.isfinite().all():
        raise WeightsError(
            f"{name} has a number that is not finite; only finite weights can be quantized."
        )
    return numbers


def piece_of(
    name: str,
    weight: Float[Tensor, "rows columns"],
    plan: Plan,
    importance: Float[Tensor, " columns"] | None = None,
) -> Piece:
    """Quantize a matrix by rounding, into what the plan says of its name."""
    if plan.method == "smoothquant":
        return int8_piece(*round_rows_to_int8(weight))
    if plan.method == "float8":
        return float8_piece(round_to_fp8(weight))
    if plan.method == "nf4":
        return nf4_piece(round_to_nf4(weight), plan.scale_dtype)
    if name not in plan.grids:
        kind = plan.kinds[name]
        return Piece(kind, {"blocks": quantize_rows(weight, kind, importance)})
    # A GGUF block stores its minimum, so it need not be on the grid.
    matrix = round_to_nearest(
        weight, plan.grids[name], scale_dtype=plan.scale_dtype, whole_zeros=not plan.to_gguf
    )
    return piece_of_matrix(matrix, plan)


def piece_of_matrix(matrix: QuantizedMatrix, plan: Plan) -> Piece:
    """Return a quantized matrix in the form of the output: a kind's blocks, or packed words."""
    if plan.to_gguf:
        kind, blocks = blocks_of_matrix(matrix)
        return Piece(kind, {"blocks": blocks})
    return packed_piece(matrix, plan.scale_dtype)


def dequantize(piece: Piece) -> Float[Tensor, "rows columns"]:
    """Return the weights that a piece stands for, in float32."""
    if "blocks" in piece.tensors:
        return dequantize_rows(piece.tensors["blocks"], piece.form)
    return dequantize_packed(piece)


def float_dtype(tensor: StoredTensor) -> torch.dtype:
    """Return a tensor's stored dtype if that is floating-point, otherwise float16."""
    kept = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return kept.get(tensor.kind, torch.float16)


def floating(tensor: StoredTensor) -> Float[Tensor, "..."]:
    """Return a tensor in the dtype of `float_dtype`."""
    return tensor.dequantize(float_dtype(tensor))
