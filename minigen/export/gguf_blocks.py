"""Turns matrices into the bytes of GGUF's kinds: from floating-point rows, or from a grid's codes.

The `gguf` library quantizes Q4_0 to Q8_0, BF16, MXFP4 and the ternary kinds; its bytes are those of
ggml, so they are taken as they are. The K kinds and IQ4_NL are in `minigen.export.k_quants`. Rows
that are no whole number of blocks get another kind, the one that llama.cpp takes
(`tensor_type_fallback` of its `llama-quant.cpp`).
"""

from collections.abc import Callable

import gguf
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from minigen.checkpoint.quant_formats import FORMATS
from minigen.errors import OptionError, WeightsError
from minigen.export.k_quants import (
    quantize_iq4_nl,
    quantize_q2_k,
    quantize_q3_k,
    quantize_q4_k,
    quantize_q5_k,
    quantize_q6_k,
)
from minigen.quantization.grid import QuantizedMatrix

RowBytes = UInt8[Tensor, "rows row_bytes"]
Quantizer = Callable[[Tensor, Tensor | None], Tensor]

OWN: dict[str, tuple[int, Quantizer]] = {  # kind -> numbers in a block, and its quantizer
    "Q2_K": (256, quantize_q2_k),
    "Q3_K": (256, quantize_q3_k),
    "Q4_K": (256, quantize_q4_k),
    "Q5_K": (256, quantize_q5_k),
    "Q6_K": (256, quantize_q6_k),
    "IQ4_NL": (32, quantize_iq4_nl),
}
OF_LIBRARY = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("MXFP4", "TQ1_0", "TQ2_0"),
)
KINDS = (*OF_LIBRARY, *OWN)
FALLBACKS = {
    **{"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **{"IQ4_XS": "IQ4_NL", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"},
}
KIND_OF_GRID = {(4, True): "Q4_0", (4, False): "Q4_1", (5, True): "Q5_0", (5, False): "Q5_1"}
KIND_OF_GRID[8, True] = "Q8_0"
GROUP = 32  # of the kinds that hold a grid
_LARGEST = 65504.0  # of float16, the type of every block's scale
_CHUNK = 2**19  # numbers; bounds the memory of the tries of a quantizer


def block_size(kind: str) -> int:
    """Return how many numbers a block of the kind holds."""
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])


def fitting_kind(kind: str, columns: int) -> str:
    """Return the kind itself, or the one that llama.cpp takes if rows are no whole blocks of it.

    >>> fitting_kind("Q4_K", 576), fitting_kind("Q4_K", 1536), fitting_kind("Q4_0", 24)
    ('Q5_0', 'Q4_K', 'F16')
    """
    if columns % block_size(kind) == 0:
        return kind
    fallback = FALLBACKS.get(kind, "F16")
    return fallback if columns % block_size(fallback) == 0 else "F16"


def quantize_rows(
    weight: Float[Tensor, "rows columns"],
    kind: str,
    importance: Float[Tensor, " columns"] | None = None,
) -> RowBytes:
    """Return the rows in the bytes of a kind; `columns` must be whole blocks.

    `importance` weighs the squared error by column, in the kinds that search for scales (the K
    kinds and IQ4_NL). Raises `WeightsError` for weights that float16 scales cannot hold.
    """
    if kind not in KINDS:
        raise OptionError(f"minigen writes {', '.join(KINDS)}, but not {kind}.")
    if columns_left := weight.shape[-1] % block_size(kind):
        raise WeightsError(
            f"Rows of {weight.shape[-1]} weights leave {columns_left} after whole blocks of {kind}."
        )
    if not (finite := weight.isfinite()).all():
        raise WeightsError(
            f"A matrix of shape {tuple(weight.shape)} has the weight {weight[~finite][0]:g}, which "
            "is not finite."
        )
    most = weight.abs().amax()
    if kind not in ("F32", "BF16") and most > _LARGEST:
        raise WeightsError(
            f"A matrix of shape {tuple(weight.shape)} has the weight {most:g}, but {kind} holds "
            f"finite numbers up to {_LARGEST:g}."
        )
    rows = max(1, _CHUNK // weight.shape[-1])
    return torch.cat([_bytes_of(chunk, kind, importance) for chunk in weight.float().split(rows)])


def _bytes_of(
    rows: Float[Tensor, "rows columns"], kind: str, importance: Float[Tensor, " columns"] | None
) -> RowBytes:
    if kind in OWN:
        size, quantize = OWN[kind]
        weighed = None if importance is None else importance.float().expand(rows.shape)
        flat = None if weighed is None else weighed.reshape(-1, size)
        return quantize(rows.reshape(-1, size), flat).view(len(rows), -1)
    made = gguf.quants.quantize(rows.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(made).view(torch.uint8).view(len(rows), -1)


def dequantize_rows(data: RowBytes, kind: str) -> Float[Tensor, "rows columns"]:
    """Return the numbers of rows in the bytes of a kind, in float32."""
    if kind in FORMATS:
        form = FORMATS[kind]
        return form.unpack(data.unflatten(-1, (-1, form.block_bytes))).flatten(-2)
    return torch.from_numpy(
        gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    ).view(len(data), -1)


def kind_of_grid(bits: int, group_size: int, symmetric: bool) -> str:
    """Return the kind whose blocks are groups of this grid; `OptionError` if there is none."""
    kind = KIND_OF_GRID.get((bits, symmetric)) if group_size == GROUP else None
    if kind is None:
        raise OptionError(
            f"GGUF has no kind for {bits} bits in groups of {group_size} "
            f"({'symmetric' if symmetric else 'asymmetric'}): it has 4 and 5 bits of both sorts "
            f"and 8 symmetric bits, in groups of {GROUP}; write a directory instead."
        )
    return kind


def blocks_of_matrix(matrix: QuantizedMatrix) -> tuple[str, RowBytes]:
    """Return a quantized matrix as a kind and the bytes of its rows: the codes stay as they are.

    Scales become float16. An asymmetric block stores its minimum, -zero * scale, in float16.
    """
    grid = matrix.grid
    columns = matrix.codes.shape[-1]
    kind = kind_of_grid(grid.bits, grid.size_of_group(columns), grid.symmetric)
    codes = matrix.codes.unflatten(-1, (-1, GROUP))
    scales = matrix.scales.float().half().unsqueeze(-1)
    header = scales.view(torch.uint8)
    if not grid.symmetric:
        minima = (-matrix.zeros.float().unsqueeze(-1) * scales.float()).half()
        if not minima.isfinite().all():
            raise WeightsError(
                f"A group of a matrix of shape {matrix.shape} begins below -{_LARGEST:g}, which "
                f"the float16 minimum of {kind} cannot hold."
            )
        header = torch.cat([header, minima.view(torch.uint8)], dim=-1)
    if grid.bits == 8:
        return kind, torch.cat([header, codes ^ 128], dim=-1).flatten(-2)  # code - 128, as int8
    low = codes & 15
    nibbles = low[..., :16] | low[..., 16:] << 4
    parts = [header, _fifth_bits(codes), nibbles] if grid.bits == 5 else [header, nibbles]
    return kind, torch.cat(parts, dim=-1).flatten(-2)


def _fifth_bits(codes: UInt8[Tensor, "rows blocks 32"]) -> UInt8[Tensor, "rows blocks 4"]:
    places = torch.arange(8, dtype=torch.uint8)
    return ((codes >> 4).unflatten(-1, (4, 8)) << places).sum(dim=-1, dtype=torch.uint8)
