"""Quantizers of GGUF's K kinds and of IQ4_NL, for which the `gguf` library has no quantizer.

A super-block of Q4_K or Q5_K is 256 weights in 8 sub-blocks: weight = (d * s) * code - (dmin * m).
The scale s and the minimum m of a sub-block have 6 bits, d and dmin are float16. Q2_K is the same
with 16 sub-blocks and 4 bits. Q3_K and Q6_K have 16 sub-blocks with a signed scale of 6 or 8 bits
and no minimum. IQ4_NL has 32 weights, each one of 16 values that are not evenly spaced, times one
scale.

The method is the one that ggml publishes (`ggml-quants.c`): for each sub-block it tries ranges
slightly wider and narrower than that of the weights, rounds, solves the weighted least squares for
the scale (and the minimum), and keeps the try with the smallest error; then it rounds the scales of
the sub-blocks, and rounds the weights again with these. Written here from that description, over
many blocks at once. The result is not byte for byte that of ggml; its error is compared in
`tests/test_35_quantize.py` and with llama.cpp's own quantizer.
"""

from collections.abc import Iterable
from itertools import product

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from minigen.checkpoint.quant_formats import IQ4_LEVELS

Weights = Float[Tensor, "blocks block_size"]
Blocks = UInt8[Tensor, "blocks block_bytes"]
SubBlocks = Float[Tensor, "blocks parts part_size"]
PerPart = Float[Tensor, "blocks parts"]
PartBytes = UInt8[Tensor, "blocks parts"]
Codes = UInt8[Tensor, "blocks parts part_size"]
Half = Float[Tensor, "blocks 1"]

_AFFINE_TRIES = tuple(step / 10 for step in range(-10, 11))  # codes more or fewer in the range
_SYMMETRIC_TRIES = tuple(step / 10 for step in range(-9, 10))
_NONLINEAR_TRIES = tuple(range(-7, 8))


def quantize_q2_k(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize super-blocks of 256 weights to Q2_K, 84 bytes each: 2.625 bits per weight.

    `importance` says how much the squared error of each weight counts. Without it, larger weights
    count more, as in ggml; so for the other kinds.
    """
    d, dmin, scales, minima, codes = _affine_codes(weights, importance, (16, 16), 3, 15)
    scale_bytes = scales | minima << 4
    header = [scale_bytes, _quarters(codes)]
    return torch.cat([*header, d.view(torch.uint8), dmin.view(torch.uint8)], dim=-1)


def quantize_q3_k(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize super-blocks of 256 weights to Q3_K, 110 bytes each: 3.4375 bits per weight."""
    d, scales, codes = _symmetric_codes(weights, importance, 4, 32)
    eighths = (codes >> 2).flatten(-2).unflatten(-1, (8, 32))  # the third bit, set from 0 up
    highs = (eighths << _places(8)).sum(dim=-2, dtype=torch.uint8)
    shifted = (scales + 32).to(torch.uint8)
    low = shifted & 15
    upper = ((shifted >> 4).unflatten(-1, (4, 4)) << _places(4, 2)).sum(dim=-2, dtype=torch.uint8)
    packed = [low[:, :8] | low[:, 8:] << 4, upper]
    return torch.cat([highs, _quarters(codes & 3), *packed, d.view(torch.uint8)], dim=-1)


def quantize_q4_k(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize super-blocks of 256 weights to Q4_K, 144 bytes each: 4.5 bits per weight."""
    header, codes = _in_eight_parts(weights, importance, 15)
    return torch.cat([header, _nibble_pairs(codes)], dim=-1)


def quantize_q5_k(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize super-blocks of 256 weights to Q5_K, 176 bytes each: 5.5 bits per weight."""
    header, codes = _in_eight_parts(weights, importance, 31)
    fifth = ((codes >> 4) << _places(8)).sum(dim=-2, dtype=torch.uint8)
    return torch.cat([header, fifth, _nibble_pairs(codes & 15)], dim=-1)


def quantize_q6_k(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize super-blocks of 256 weights to Q6_K, 210 bytes each: 6.5625 bits per weight."""
    d, scales, codes = _symmetric_codes(weights, importance, 32, 128)
    halves = codes.flatten(-2).unflatten(-1, (2, 4, 32))
    low = halves & 15
    lows = torch.cat([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], dim=-1)
    highs = ((halves >> 4) << _places(4, 2)).sum(dim=-2, dtype=torch.uint8)
    signed = scales.to(torch.int8).view(torch.uint8)
    return torch.cat([lows.flatten(-2), highs.flatten(-2), signed, d.view(torch.uint8)], dim=-1)


def quantize_iq4_nl(weights: Weights, importance: Weights | None = None) -> Blocks:
    """Quantize blocks of 32 weights to IQ4_NL, 18 bytes each: 4.5 bits per weight."""
    values, borders = IQ4_LEVELS, (IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2
    weighed = weights.square() if importance is None else importance
    widest = torch.take_along_dim(weights, weights.abs().argmax(-1, keepdim=True), -1)
    scale, most_gain = torch.zeros_like(widest), torch.zeros_like(widest)
    for step in _NONLINEAR_TRIES:
        rounded = values[torch.bucketize(weights * _inverse(widest / (step + values[0])), borders)]
        cross = (weighed * weights * rounded).sum(-1, keepdim=True)
        square = (weighed * rounded.square()).sum(-1, keepdim=True)
        gain = cross.square() * _inverse(square)  # the sum of squares that this try explains
        better = gain > most_gain
        scale = torch.where(better, cross * _inverse(square), scale)
        most_gain = torch.where(better, gain, most_gain)
    d = scale.half()
    codes = torch.bucketize(weights * _inverse(d.float()), borders).to(torch.uint8)
    return torch.cat([d.view(torch.uint8), codes[:, :16] | codes[:, 16:] << 4], dim=-1)


def _in_eight_parts(
    weights: Weights, importance: Weights | None, max_code: int
) -> tuple[UInt8[Tensor, "blocks 16"], UInt8[Tensor, "blocks 8 32"]]:
    """Return the bytes of d, dmin and the 6-bit scales and minima, and the codes by sub-block."""
    d, dmin, scales, minima, codes = _affine_codes(weights, importance, (8, 32), max_code, 63)
    header = [d.view(torch.uint8), dmin.view(torch.uint8), _pack_sixes(scales, minima)]
    return torch.cat(header, dim=-1), codes


def _affine_codes(
    weights: Weights,
    importance: Weights | None,
    shape: tuple[int, int],
    max_code: int,
    max_scale: int,
) -> tuple[Half, Half, PartBytes, PartBytes, Codes]:
    """Return d, dmin, the scales and minima from 0 to `max_scale`, and the codes by sub-block.

    `shape` is the number of sub-blocks and their size. Beside the nearest scale and minimum of a
    sub-block their neighbours are tried, which ggml does not do.
    """
    parts = weights.unflatten(-1, shape)
    weighed = _affine_importance(parts, importance)
    scales, minima = _fit_affine(parts, weighed, max_code)
    d = (scales.amax(-1, keepdim=True) / max_scale).half()
    dmin = (minima.amax(-1, keepdim=True) / max_scale).half()
    near_scale = (scales * _inverse(d.float())).round()
    near_minimum = (minima * _inverse(dmin.float())).round()
    least = torch.full_like(scales, torch.inf)
    steps, floors, codes = near_scale, near_minimum, torch.zeros_like(parts)
    for more, lower in product((0, -1, 1), (0, -1, 1)):
        tried = (near_scale + more).clamp(0, max_scale)
        floor = (near_minimum + lower).clamp(0, max_scale)
        step = (tried * d.float()).unsqueeze(-1)
        offset = (floor * dmin.float()).unsqueeze(-1)
        rounded = ((parts + offset) * _inverse(step)).round_().clamp_(0, max_code)
        error = (weighed * (rounded * step - offset - parts).square()).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        steps, floors = torch.where(better, tried, steps), torch.where(better, floor, floors)
        codes = torch.where(better.unsqueeze(-1), rounded, codes)
    return d, dmin, steps.to(torch.uint8), floors.to(torch.uint8), codes.to(torch.uint8)


def _symmetric_codes(
    weights: Weights, importance: Weights | None, most: int, max_scale: int
) -> tuple[Half, PerPart, Codes]:
    """Return d, the scales of 16 sub-blocks from -max_scale to max_scale - 1, and the codes.

    A code is the signed one plus `most`, so it is from 0 to 2 * most - 1.
    """
    parts = weights.unflatten(-1, (16, 16))
    weighed = parts.square() if importance is None else importance.unflatten(-1, (16, 16))
    scales = _fit_symmetric(parts, weighed, most)
    widest = torch.take_along_dim(scales, scales.abs().argmax(-1, keepdim=True), -1)
    d = (widest / -max_scale).half()
    nearest = (scales * _inverse(d.float())).round()
    least = torch.full_like(scales, torch.inf)
    steps, codes = nearest, torch.zeros_like(parts)
    for more in (0, -1, 1):
        tried = (nearest + more).clamp(-max_scale, max_scale - 1)
        step = (tried * d.float()).unsqueeze(-1)
        rounded = (parts * _inverse(step)).round_().clamp_(-most, most - 1)
        error = (weighed * (rounded * step - parts).square()).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        steps = torch.where(better, tried, steps)
        codes = torch.where(better.unsqueeze(-1), rounded, codes)
    return d, steps, (codes + most).to(torch.uint8)


def _affine_importance(parts: SubBlocks, importance: Weights | None) -> SubBlocks:
    if importance is None:
        return parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    spread = 2 * parts.square().mean((-1, -2), keepdim=True)
    return importance.unflatten(-1, parts.shape[1:]) * (spread + parts.square()).sqrt()


def _fit_affine(
    parts: SubBlocks, importance: SubBlocks, max_code: int, tries: Iterable[float] = _AFFINE_TRIES
) -> tuple[PerPart, PerPart]:
    """Return scale and minimum with part = scale * code - minimum, both at least 0.

    For given codes the best pair solves two linear equations. The error follows from the same sums:
    sum(w x^2) - scale * sum(w x code) + minimum * sum(w x).
    """
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1)
    span = high - low
    from_low = parts - low.unsqueeze(-1)
    total, first = importance.sum(-1), (importance * parts).sum(-1)
    square = (importance * parts.square()).sum(-1)
    scale, minimum = span / max_code, -low
    least = torch.full_like(span, torch.inf)
    for more in tries:
        inverse = (max_code + more) * _inverse(span)
        codes = (from_low * inverse.unsqueeze(-1)).round_().clamp_(0, max_code)
        weighed = importance * codes
        s_code, s_square = weighed.sum(-1), (weighed * codes).sum(-1)
        s_cross = (weighed * parts).sum(-1)
        determinant = total * s_square - s_code.square()
        slope = (total * s_cross - first * s_code) * _inverse(determinant)
        offset = (s_square * first - s_code * s_cross) * _inverse(determinant)
        above = offset > 0  # a minimum above 0 cannot be stored
        slope = torch.where(above, s_cross * _inverse(s_square), slope)
        offset = torch.where(above, 0.0, offset)
        error = square - slope * s_cross - offset * first
        better = (error < least) & (determinant > 0) & (slope > 0)
        least = torch.where(better, error, least)
        scale, minimum = torch.where(better, slope, scale), torch.where(better, -offset, minimum)
    return scale, minimum


def _fit_symmetric(
    parts: SubBlocks, importance: SubBlocks, most: int, tries: Iterable[float] = _SYMMETRIC_TRIES
) -> PerPart:
    """Return the scale with part = scale * code, codes from -most to most - 1.

    The value farthest from 0 gets a code near -most, so the scale has its sign, negated.
    """
    widest = torch.take_along_dim(parts, parts.abs().argmax(-1, keepdim=True), -1)
    scale = torch.zeros_like(widest[..., 0])
    most_gain = torch.zeros_like(scale)
    for more in tries:
        inverse = -(most + more) * _inverse(widest)
        codes = (parts * inverse).round_().clamp_(-most, most - 1)
        weighed = importance * codes
        cross, square = (weighed * parts).sum(-1), (weighed * codes).sum(-1)
        gain = cross.square() * _inverse(square)  # the sum of squares that this try explains
        better = gain > most_gain
        scale = torch.where(better, cross * _inverse(square), scale)
        most_gain = torch.where(better, gain, most_gain)
    return scale


def _inverse(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return 1 / x, and 0 for 0 (and where 1 / x is not finite)."""
    inverse = 1 / x
    return torch.where(torch.isfinite(inverse), inverse, 0.0)


def _places(count: int, width: int = 1) -> UInt8[Tensor, "count 1"]:
    """Return by how many bits to shift 0, 1, 2, ... fields of `width` bits."""
    return (torch.arange(count, dtype=torch.uint8) * width).unsqueeze(-1)


def _quarters(codes: Codes) -> UInt8[Tensor, "blocks 64"]:
    """Pack codes of 2 bits: a byte has those of four weights that are 32 apart."""
    quarters = codes.flatten(-2).unflatten(-1, (2, 4, 32)) << _places(4, 2)
    return quarters.sum(dim=-2, dtype=torch.uint8).flatten(-2)


def _pack_sixes(s: PartBytes, m: PartBytes) -> UInt8[Tensor, "blocks 12"]:
    """Pack eight scales and eight minima of 6 bits into 12 bytes.

    The first four of each have a byte, whose two upper bits are the upper bits of the last four;
    the lower four bits of these share the other four bytes.
    """
    first_scales = s[:, :4] | (s[:, 4:] >> 4) << 6
    first_minima = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat([first_scales, first_minima, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], dim=-1)


def _nibble_pairs(codes: UInt8[Tensor, "blocks 8 32"]) -> UInt8[Tensor, "blocks 128"]:
    """Pack codes of 4 bits: sub-blocks 0, 2, 4, 6 in the low halves, the others in the high."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(-2)
