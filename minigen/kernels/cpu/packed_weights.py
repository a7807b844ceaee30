"""Packed weights: the order in which CPU kernels read them, panels of sixteen rows, a lane per row.

A vector register holds the same columns of sixteen rows, so a dot product needs no sum across
lanes, and the sixteen scales of a group are a vector, too. Packing does not change the weights: a
GGUF's 4-bit numbers stay the same 4 bits, in another order.

Axes, with all layers in one array: [layers, panels, groups (of 32 columns), words of a group,
lanes].
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int16, Int32, Shaped, UInt8, UInt16
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.simd import NUM_LANES, zeros

PACKERS = 2  # layers that are packed at a time; more of them need more temporary memory
GROUP = 32  # columns per scale, as in GGUF's Q4_0, Q4_1 and Q8_0


Words = Int32[np.ndarray, "*layers words"]  # of one layer, or of all
Blocks = UInt8[np.ndarray, "rows groups block_bytes"]


class Codes4(NamedTuple):
    """4-bit codes: weight = code x scale + minimum; 5 bits per weight in total.

    The data of a group is contiguous, so that memory is read in one stream: four vectors of codes,
    then sixteen scales and sixteen minima as float16 bits. Word w of the codes holds columns
    4w..4w+3 in its low nibbles, and the columns 16 further on in its high nibbles.
    """

    words: Words  # [layers, panels x groups x 80]


class Codes8(NamedTuple):
    """8-bit codes: weight = (code - 128) x scale; 8.5 bits per weight.

    A group is eight vectors of codes and sixteen scales as float16 bits. Adding 128 makes signed
    codes unsigned, because the dot product instruction needs one unsigned operand.
    """

    words: Words  # [layers, panels x groups x 136]


class Pairs(NamedTuple):
    """bfloat16 weights, two neighbouring columns per 32-bit word."""

    words: Words


PackedWeights = Codes4 | Codes8 | Pairs


def by_panels(rows: np.ndarray) -> np.ndarray:
    """Pack [rows, groups, words] into panels, a flat array of [panels, groups, words, lanes]."""
    num_rows, groups, words = rows.shape
    panels = rows.reshape(num_rows // NUM_LANES, NUM_LANES, groups, words)
    return np.ascontiguousarray(panels.transpose(0, 2, 3, 1)).reshape(-1)


def _raw_blocks(weight: StoredTensor) -> Blocks:
    """Return the stored bytes, [rows, groups, bytes of a block], rows in the model's order."""
    data = weight.data if weight.row_order is None else weight.data[weight.row_order]
    raw = data.numpy()
    return raw.reshape(len(raw), -1, weight.format.block_bytes)


def _together(*parts: Shaped[np.ndarray, " _"]) -> Int32[np.ndarray, " words"]:
    """Join each group's codes, scales, ... into one flat array of words, group after group."""
    num_groups = parts[-1].size // NUM_LANES
    words = [each.view(np.int32).reshape(num_groups, -1) for each in parts]
    return np.concatenate(words, axis=1).reshape(-1)


def _float16_bits(blocks: Blocks, first: int) -> UInt16[np.ndarray, " rows*groups"]:
    bits = np.ascontiguousarray(blocks[..., first : first + 2]).view(np.uint16)
    return by_panels(bits)


def _words(numbers: Shaped[np.ndarray, "rows groups numbers"]) -> Int32[np.ndarray, " words"]:
    return by_panels(np.ascontiguousarray(numbers).view(np.int32))


def _codes4_of_q4_1(weight: StoredTensor) -> Codes4:
    blocks = _raw_blocks(weight)
    codes, scales = _words(blocks[..., 4:]), _float16_bits(blocks, 0)
    return Codes4(_together(codes, scales, _float16_bits(blocks, 2)))


def _codes4_of_q4_0(weight: StoredTensor) -> Codes4:
    blocks = _raw_blocks(weight)
    scales = _float16_bits(blocks, 0)
    minima = (scales.view(np.float16) * np.float16(-8)).view(np.uint16)
    return Codes4(_together(_words(blocks[..., 2:]), scales, minima))


def _codes4_by_rounding(weight: StoredTensor) -> Codes4:
    """Quantise with sixteen equal steps from each group's smallest number to its largest."""
    groups = _dequantized_groups(weight)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    minima = low.astype(np.float16)
    scales = ((high - minima) / 15).astype(np.float16)
    steps = np.maximum(scales.astype(np.float32), np.finfo(np.float16).tiny)[..., None]
    codes = np.rint((groups - minima.astype(np.float32)[..., None]) / steps)
    codes = np.nan_to_num(codes).clip(0, 15).astype(np.uint8)  # a NaN's scale is NaN, too
    packed = codes[..., :16] | codes[..., 16:] << 4
    parts = by_panels(scales[..., None]), by_panels(minima[..., None])
    return Codes4(_together(_words(packed), *parts))


def _codes8_of_q8_0(weight: StoredTensor) -> Codes8:
    blocks = _raw_blocks(weight)
    return Codes8(_together(_words(blocks[..., 2:] ^ 128), _float16_bits(blocks, 0)))


def _codes8_by_rounding(weight: StoredTensor) -> Codes8:
    """Quantise with 254 equal steps, from -max to max of each group's absolute values."""
    groups = _dequantized_groups(weight)
    scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    steps = np.maximum(scales.astype(np.float32), np.finfo(np.float16).tiny)[..., None]
    codes = np.nan_to_num(np.rint(groups / steps)).clip(-127, 127).astype(np.int8)
    words = _words(codes.view(np.uint8) ^ 128)
    return Codes8(_together(words, by_panels(scales[..., None])))


def _dequantized_groups(weight: StoredTensor) -> Float32[np.ndarray, f"rows groups {GROUP}"]:
    return weight.dequantize(torch.float32).numpy().reshape(weight.shape[0], -1, GROUP)


def _pairs(weight: StoredTensor) -> Pairs:
    bits: Int16[Tensor, "rows columns"] = weight.dequantize(torch.bfloat16).view(torch.int16)
    return Pairs(_words(bits.numpy().reshape(weight.shape[0], -1, GROUP)))


def pack_weight(weight: StoredTensor, form: str) -> PackedWeights:
    """Pack one stored matrix in the form "int4", "int8" or "bfloat16"."""
    exact: dict[tuple[str, str], Callable[[StoredTensor], PackedWeights]] = {
        ("int4", "Q4_1"): _codes4_of_q4_1,
        ("int4", "Q4_0"): _codes4_of_q4_0,
        ("int8", "Q8_0"): _codes8_of_q8_0,
    }
    by_rounding: dict[str, Callable[[StoredTensor], PackedWeights]] = {
        "int4": _codes4_by_rounding,
        "int8": _codes8_by_rounding,
        "bfloat16": _pairs,
    }
    packed = exact.get((form, weight.kind), by_rounding[form])(weight)
    weight.release_pages()
    return packed


def pack_layers(
    matrices: Sequence[Sequence[StoredTensor]], form: str, interleave: int | None = None
) -> PackedWeights:
    """Pack the matrices of all layers; the matrices of one layer are fused, one below the other.

    With `interleave`, panels alternate instead: `interleave` panels of the first matrix, as many of
    the second, and so on. A kernel that needs them together then reads memory in one stream.
    """
    num_rounds = 1 if interleave is None else matrices[0][0].shape[0] // (NUM_LANES * interleave)
    packed = [pack_weight(each, form) for each in matrices[0]]
    kind, num_words = type(packed[0]), sum(each.words.size for each in packed)
    stacked = zeros((len(matrices), num_rounds, num_words // num_rounds), np.int32)

    def pack_layer(layer: int) -> None:
        parts = packed if layer == 0 else [pack_weight(each, form) for each in matrices[layer]]
        words = [each.words.reshape(num_rounds, -1) for each in parts]
        np.concatenate(words, axis=1, out=stacked[layer])

    with ThreadPoolExecutor(PACKERS) as packers:
        list(packers.map(pack_layer, range(len(matrices))))
    return kind(stacked.reshape(len(matrices), -1))
