"""Weights in the order in which CPU kernels read them: panels of sixteen rows, a lane per row.

A vector register takes sixteen rows at the same columns, so that a product needs no sum across
lanes, and so that a group's sixteen scales are a vector, too. What a weight is does not change:
a GGUF's 4-bit numbers stay the same 4 bits, in another order.

Axes, of all layers at once: [layers, panels, groups (of 32 columns), words of a group, lanes].
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.simd import NUM_LANES, zeros

PACKERS = 2  # layers that are packed at a time: more want more memory while they are
GROUP = 32  # columns that share a scale, as in GGUF's Q4_0, Q4_1 and Q8_0


class Codes4(NamedTuple):
    """4-bit codes: a weight is code x scale + minimum. 5 bits a weight, all told.

    All that belongs to a group stands together, so that memory is read in one stream: four vectors
    of codes, sixteen scales and sixteen minima in float16 bits. A word of codes holds those of
    columns 4w..4w+3 in its low nibbles, of 16 columns on in its high ones.
    """

    words: np.ndarray  # [layers, panels x groups x 80]


class Codes8(NamedTuple):
    """8-bit codes: a weight is (code - 128) x scale. 8.5 bits a weight.

    A group is eight vectors of codes and sixteen scales in float16 bits. The 128 makes codes that
    are stored with a sign unsigned, as dot products want one side to be.
    """

    words: np.ndarray  # [layers, panels x groups x 136]


class Pairs(NamedTuple):
    """bfloat16 weights, those of two neighbouring columns in a word."""

    words: np.ndarray


Panels = Codes4 | Codes8 | Pairs


def by_panels(rows: np.ndarray) -> np.ndarray:
    """[rows, groups, words] -> flat [panels, groups, words, lanes]."""
    num_rows, groups, words = rows.shape
    panels = rows.reshape(num_rows // NUM_LANES, NUM_LANES, groups, words)
    return np.ascontiguousarray(panels.transpose(0, 2, 3, 1)).reshape(-1)


def _raw_blocks(weight: StoredTensor) -> np.ndarray:
    """The stored bytes, [rows, groups, bytes of a block], rows in the model's order."""
    data = weight.data if weight.row_order is None else weight.data[weight.row_order]
    raw = data.numpy()
    return raw.reshape(len(raw), -1, weight.format.block_bytes)


def _together(*parts: np.ndarray) -> np.ndarray:
    """Flat words of each group's codes, scales, ...: parts with as many groups times lanes."""
    num_groups = parts[-1].size // NUM_LANES
    words = [each.view(np.int32).reshape(num_groups, -1) for each in parts]
    return np.concatenate(words, axis=1).reshape(-1)


def _float16_bits(blocks: np.ndarray, first: int) -> np.ndarray:
    bits = np.ascontiguousarray(blocks[..., first : first + 2]).view(np.uint16)
    return by_panels(bits)


def _words(numbers: np.ndarray) -> np.ndarray:
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
    """Sixteen even steps from each group's smallest number to its largest."""
    groups = _dequantised_groups(weight)
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
    """254 even steps, from minus each group's largest number to plus."""
    groups = _dequantised_groups(weight)
    scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    steps = np.maximum(scales.astype(np.float32), np.finfo(np.float16).tiny)[..., None]
    codes = np.nan_to_num(np.rint(groups / steps)).clip(-127, 127).astype(np.int8)
    words = _words(codes.view(np.uint8) ^ 128)
    return Codes8(_together(words, by_panels(scales[..., None])))


def _dequantised_groups(weight: StoredTensor) -> np.ndarray:
    return weight.dequantize(torch.float32).numpy().reshape(weight.shape[0], -1, GROUP)


def _pairs(weight: StoredTensor) -> Pairs:
    bits: Tensor = weight.dequantize(torch.bfloat16).view(torch.int16)
    return Pairs(_words(bits.numpy().reshape(weight.shape[0], -1, GROUP)))


def pack_weight(weight: StoredTensor, form: str) -> Panels:
    """One stored matrix in the form "int4", "int8" or "bfloat16"."""
    exact: dict[tuple[str, str], Callable[[StoredTensor], Panels]] = {
        ("int4", "Q4_1"): _codes4_of_q4_1,
        ("int4", "Q4_0"): _codes4_of_q4_0,
        ("int8", "Q8_0"): _codes8_of_q8_0,
    }
    by_rounding: dict[str, Callable[[StoredTensor], Panels]] = {
        "int4": _codes4_by_rounding,
        "int8": _codes8_by_rounding,
        "bfloat16": _pairs,
    }
    packed = exact.get((form, weight.kind), by_rounding[form])(weight)
    weight.release_pages()
    return packed


def stack_panels(
    matrices: Sequence[Sequence[StoredTensor]], form: str, in_turn: int | None = None
) -> Panels:
    """The matrices of all layers; those of one layer are fused, one below the other.

    Or, with `in_turn`, so many panels of the first, as many of the second, and so on: whoever
    needs them together then reads memory in one stream.
    """
    num_turns = 1 if in_turn is None else matrices[0][0].shape[0] // (NUM_LANES * in_turn)
    packed = [pack_weight(each, form) for each in matrices[0]]
    kind, num_words = type(packed[0]), sum(each.words.size for each in packed)
    stacked = zeros((len(matrices), num_turns, num_words // num_turns), np.int32)

    def pack_layer(layer: int) -> None:
        parts = packed if layer == 0 else [pack_weight(each, form) for each in matrices[layer]]
        words = [each.words.reshape(num_turns, -1) for each in parts]
        np.concatenate(words, axis=1, out=stacked[layer])

    with ThreadPoolExecutor(PACKERS) as packers:
        list(packers.map(pack_layer, range(len(matrices))))
    return kind(stacked.reshape(len(matrices), -1))
