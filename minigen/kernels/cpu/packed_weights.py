"""Packed weights: the order in which CPU kernels read them, panels of sixteen rows, a lane per row.

A vector register holds the same columns of sixteen rows, so a dot product needs no sum across
lanes, and the sixteen scales of a group are a vector, too. Packing keeps codes: the 4-bit codes of
a GGUF, or of a GPTQ checkpoint, stay the same 4 bits, in another order (but for groups of nearly
equal numbers: `_with_wider_steps`). Scales become float16, as they are in a GGUF. A file with wider
groups has fewer scales; each is repeated for every 32 columns.

Axes, with all layers in one array: [layers, panels, groups (of 32 columns), words of a group,
lanes].
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float16, Float32, Int16, Int32, Shaped, UInt8, UInt16
from torch import Tensor

from minigen.checkpoint.safetensors import IntegerCodes, StoredTensor
from minigen.kernels.cpu.arrays.aligned import NUM_LANES, zeros

PACKERS = 2  # layers that are packed at a time; more of them need more temporary memory
SLICES = 64  # at most, of the rows of a large matrix, which are packed as if they were layers
GROUP = 32  # columns per scale, as in GGUF's Q4_0, Q4_1 and Q8_0
_SIGN_BITS = np.array([0x80808080], np.uint32).view(np.int32)  # of the four bytes of a word

PARTS_OF_STEP = 256  # the offsets of 4-bit codes are whole numbers of them
FARTHEST = 2**15 - 1  # what 16 bits hold: just below 128 steps
Words = Int32[np.ndarray, "*layers words"]  # of one layer, or of all
Blocks = UInt8[np.ndarray, "rows groups block_bytes"]
Steps = Float32[np.ndarray, " numbers"]  # one per group and lane, by panels


class Codes4(NamedTuple):
    """4-bit codes: weight = (code + offset / 256) x scale; 5 bits per weight in total.

    The data of a group is contiguous, so that memory is read in one stream: four vectors of codes,
    then sixteen scales as float16 bits and sixteen offsets as 16-bit whole numbers. Word w of the
    codes holds columns 4w..4w+3 in its low nibbles, and the columns 16 further on in its high
    nibbles.

    A file has a minimum instead, code x scale + minimum. As an offset it is a whole number, so that
    a group's dot product is one sum of whole numbers. It is at most 1/512 of a step from the
    minimum, and equal to it where that is a whole number of steps (Q4_0, GPTQ).
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


def _together(*parts: Shaped[np.ndarray, "..."]) -> Int32[np.ndarray, " words"]:
    """Join each group's codes, scales, ... into one flat array of words, group after group."""
    num_groups = parts[-1].size // NUM_LANES
    words = [each.view(np.int32).reshape(num_groups, -1) for each in parts]
    return np.concatenate(words, axis=1).reshape(-1)


def _scales(blocks: Blocks) -> UInt16[np.ndarray, " rows*groups"]:
    """Return the bits of the float16 that each block begins with."""
    return by_panels(blocks.view(np.uint16)[..., :1])


def _words(numbers: Shaped[np.ndarray, "rows groups numbers"]) -> Int32[np.ndarray, " words"]:
    return by_panels(np.ascontiguousarray(numbers).view(np.int32))


def _codes4(codes: Words, scales: Steps, minima: Steps) -> Codes4:
    """Pack codes, and their minima as offsets; all of them come by panels."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a scale of 0, or NaN
        offsets = np.where(minima == 0, np.float32(0), minima / scales * PARTS_OF_STEP)
        far = ~(np.abs(offsets) <= FARTHEST)
        if far.any():
            codes, scales = _with_wider_steps(codes, scales, minima, far)
            offsets = np.where(far, np.nan_to_num(minima / scales * PARTS_OF_STEP), offsets)
    return Codes4(_together(codes, scales.astype(np.float16), np.rint(offsets).astype(np.int16)))


def _with_wider_steps(
    codes: Words, scales: Steps, minima: Steps, far: Bool[np.ndarray, " numbers"]
) -> tuple[Words, Steps]:
    """Give the groups of `far` such steps that their minima are at most 127 steps from 0.

    The numbers of these groups differ by less than an eighth of their size, and remain precise to
    1/254 of it. Where a scale or a minimum is NaN or infinite, the scale becomes NaN.
    """
    wanted = np.abs(minima) / 127
    half = wanted.astype(np.float16)
    half = np.where(half < wanted, np.nextafter(half, np.float16(np.inf)), half)  # not below it
    wider = np.copysign(half.astype(np.float32), scales)
    wider = np.where(np.isfinite(minima + scales), wider, np.float32(np.nan))
    shrink = np.where(far, np.abs(np.nan_to_num(scales / wider)), np.float32(1))
    shrink = shrink.reshape(-1, 1, NUM_LANES, 1)  # the codes are [groups, words, lanes, bytes]
    both = codes.view(np.uint8).reshape(-1, 4, NUM_LANES, 4)
    low, high = (np.rint(each * shrink).astype(np.uint8) for each in (both & 15, both >> 4))
    return (low | high << 4).reshape(-1).view(np.int32), np.where(far, wider, scales)


def _codes4_of_q4_1(weight: StoredTensor) -> Codes4:
    blocks = _raw_blocks(weight)
    steps = by_panels(blocks.view(np.float16)[..., :2]).reshape(-1, 2, NUM_LANES)
    scales, minima = (steps[:, part].astype(np.float32).reshape(-1) for part in (0, 1))
    return _codes4(by_panels(blocks.view(np.int32)[..., 1:]), scales, minima)


def _codes4_of_q4_0(weight: StoredTensor) -> Codes4:
    blocks = _raw_blocks(weight)
    scales = _scales(blocks).view(np.float16).astype(np.float32)
    return _codes4(_words(blocks[..., 2:]), scales, -8 * scales)


def _codes4_by_rounding(weight: StoredTensor) -> Codes4:
    """Quantise to sixteen levels, from each group's smallest number to its largest."""
    groups = _dequantized_groups(weight)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    minima = low.astype(np.float16).astype(np.float32)
    scales = ((high - minima) / 15).astype(np.float16)
    codes = np.rint((groups - minima[..., None]) / _divisors(scales))
    codes = np.nan_to_num(codes).clip(0, 15).astype(np.uint8)  # a NaN's scale is NaN, too
    packed = codes[..., :16] | codes[..., 16:] << 4
    steps = (by_panels(each[..., None]) for each in (scales.astype(np.float32), minima))
    return _codes4(_words(packed), *steps)


def _codes8_of_q8_0(weight: StoredTensor) -> Codes8:
    blocks = _raw_blocks(weight)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int32)
    codes ^= _SIGN_BITS  # adds 128 to each code
    return Codes8(_together(by_panels(codes), _scales(blocks)))


def keeps_codes(integers: IntegerCodes, form: str) -> bool:
    """Return whether "int4" or "int8" holds these codes as they are.

    A group of 32 columns must lie within one group of the file, and float16 must hold the scale to
    a part in 2048. In 8 bits the zero point is subtracted first, so it must leave the codes within
    a signed byte.
    """
    if integers.group_size % GROUP and integers.scales.shape[1] > 1:
        return False
    if not _fits_float16(integers.scales):
        return False
    if form == "int4":
        return integers.bits <= 4
    return form == "int8" and (integers.bits < 8 or bool((integers.zeros == 128).all()))


def rounds_scales(integers: IntegerCodes) -> bool:
    """Return whether float16 rounds a scale of codes that are kept."""
    return not torch.equal(integers.scales.half().float(), integers.scales)


def _fits_float16(numbers: Float[Tensor, "rows groups"]) -> bool:
    """Return whether float16 holds each number to a part in 2048: neither infinite nor tiny."""
    return bool(((numbers.half().float() - numbers).abs() <= numbers.abs() / 2048).all())


def _of_groups(
    steps: Float[Tensor, "rows groups"], integers: IntegerCodes, num_groups: int
) -> Steps:
    """Repeat each number for every group of 32 columns in its own group, by panels."""
    repeats = num_groups if steps.shape[1] == 1 else integers.group_size // GROUP
    repeated = steps.repeat_interleave(repeats, dim=1)[:, :num_groups]
    return by_panels(repeated.numpy()[..., None])


def _codes4_of_integers(integers: IntegerCodes) -> Codes4:
    codes = integers.read().numpy()
    groups = codes.reshape(len(codes), -1, GROUP)
    packed = groups[..., :16] | groups[..., 16:] << 4
    minima = -integers.zeros * integers.scales
    steps = (_of_groups(each, integers, groups.shape[1]) for each in (integers.scales, minima))
    return _codes4(_words(packed), *steps)


def _codes8_of_integers(integers: IntegerCodes) -> Codes8:
    codes = integers.read()
    zeros = integers.zeros.short().repeat_interleave(integers.group_size, dim=1)
    shifted = (codes.short() - zeros[:, : codes.shape[1]] + 128).to(torch.uint8).numpy()
    groups = shifted.reshape(len(shifted), -1, GROUP)
    scales = _of_groups(integers.scales, integers, groups.shape[1])
    return Codes8(_together(_words(groups), scales.astype(np.float16)))


def _codes8_by_rounding(weight: StoredTensor) -> Codes8:
    """Quantise with 254 equal steps, from -max to max of each group's absolute values."""
    groups = _dequantized_groups(weight)
    scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    codes = np.nan_to_num(np.rint(groups / _divisors(scales))).clip(-127, 127).astype(np.int8)
    words = _words(codes.view(np.uint8) ^ 128)
    return Codes8(_together(words, by_panels(scales[..., None])))


def _divisors(scales: Float16[np.ndarray, "rows groups"]) -> Float32[np.ndarray, "rows groups 1"]:
    """Return the scales as they are stored, also the smallest ones; 1 instead of 0 and of NaN."""
    return np.where(scales > 0, scales, 1).astype(np.float32)[..., None]


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
    of_integers: dict[str, Callable[[IntegerCodes], PackedWeights]] = {
        "int4": _codes4_of_integers,
        "int8": _codes8_of_integers,
    }
    integers = weight.integers() if form in of_integers else None
    if integers is not None and keeps_codes(integers, form):
        packed = of_integers[form](integers)
    else:
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


def pack_rows(matrix: StoredTensor, form: str) -> PackedWeights:
    """Pack one large matrix as `pack_layers` does, in slices of its rows.

    The slices need little temporary memory, and the packers share them. A matrix of integer codes
    stays whole, because its scales are judged as a whole (`keeps_codes`).
    """
    num_slices = 1
    if matrix.row_unit == 1 and matrix.integers() is None:
        num_slices = math.gcd(matrix.shape[0] // NUM_LANES, SLICES)
    num_rows = matrix.shape[0] // num_slices
    starts = range(0, matrix.shape[0], num_rows)
    packed = pack_layers([[matrix.rows(each, each + num_rows)] for each in starts], form)
    return packed._replace(words=packed.words.reshape(1, -1))
