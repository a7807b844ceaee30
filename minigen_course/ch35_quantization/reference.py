"""The steps of quantization, each as a small function: the solutions of chapter 35.

`minigen.quantization` and `minigen.kv_cache.quantized` have their own versions, which do more at
once; the tests compare them. Sources: Lin et al. 2023 (AWQ), Frantar et al. 2022 (GPTQ), Liu et al.
2024 (KIVI).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

Round = Callable[[Tensor], Tensor]


def scale_and_zero(weights: Float[Tensor, " numbers"], bits: int) -> tuple[float, int]:
    """Return the scale and the zero point of a group: weight = (code - zero) * scale.

    The codes 0 to 2^bits - 1 reach from the smallest weight to the largest, and 0 is among their
    values, so the range is widened to 0 if all weights have one sign. If all are 0, the scale is 1.
    """
    low = min(float(weights.min()), 0.0)
    high = max(float(weights.max()), 0.0)
    if low == high:
        return 1.0, 0
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)


def pack_nibbles(codes: UInt8[Tensor, " count"]) -> UInt8[Tensor, " half"]:
    """Return codes of 4 bits as bytes, two in each: the first code has the low half.

    The last byte of an odd number of codes has 0 in its high half.
    """
    packed = codes[0::2].clone()
    high = codes[1::2]
    packed[: len(high)] |= high << 4
    return packed


def round_by_groups(
    weight: Float[Tensor, "rows columns"], bits: int, size: int
) -> Float[Tensor, "rows columns"]:
    """Return the weights on the grid of their group: `size` neighbours of a row share a scale.

    The grid is symmetric: the scale is the largest magnitude of the group divided by the largest
    code, 2^(bits-1) - 1. The last group of a row may be smaller. A group of zeros stays.
    """
    most = 2 ** (bits - 1) - 1
    rounded = torch.empty_like(weight)
    for start in range(0, weight.shape[1], size):
        group = weight[:, start : start + size]
        scale = group.abs().amax(dim=1, keepdim=True) / most
        scale[scale == 0] = 1
        rounded[:, start : start + size] = (group / scale).round() * scale
    return rounded


def search_factors(
    weight: Float[Tensor, "rows columns"], x: Float[Tensor, "tokens columns"], rounded: Round
) -> float:
    """Return AWQ's exponent: of 0.00, 0.05 to 0.95, the one with the smallest error of outputs.

    An exponent makes the factors mean|x| ** exponent, one per column. The matrix is multiplied by
    them, rounded, and divided by them again. The error is the sum of the squares of the changes of
    x @ weight.T; of equal errors the smallest exponent wins.
    """
    magnitudes = x.abs().mean(dim=0)
    best, least = 0.0, float("inf")
    for step in range(20):
        factors = magnitudes ** (step / 20)
        change = rounded(weight * factors) / factors - weight
        error = float((x @ change.T).square().sum())
        if error < least:
            best, least = step / 20, error
    return best


def round_columns(
    weight: Float[Tensor, "rows columns"],
    factor: Float[Tensor, "columns columns"],
    rounded: Callable[[Tensor, int], Tensor],
) -> Float[Tensor, "rows columns"]:
    """Return the matrix of GPTQ: columns are rounded in turn, and later ones repay each error.

    `factor` is the upper Cholesky factor U of the inverse Hessian, and `rounded(column, i)` are the
    nearest values of column i's grid. If column i becomes q, each later column j loses
    (w_i - q) / U[i, i] * U[i, j].
    """
    free = weight.clone()
    for i in range(weight.shape[1]):
        nearest = rounded(free[:, i], i)
        error = (free[:, i] - nearest) / factor[i, i]
        free[:, i] = nearest
        free[:, i + 1 :] -= torch.outer(error, factor[i, i + 1 :])
    return free


def choose_bits(
    options: Mapping[str, Sequence[tuple[int, int, float]]], max_bytes: int
) -> dict[str, int]:
    """Return the bits of each matrix: the greedy choice within `max_bytes`.

    A matrix's options are (bits, bytes, loss), from few bits to many. All matrices begin with their
    first one. Then, of all steps from a matrix's option to its next one that still fit, the step
    with the largest loss saved per byte is made, until none that saves loss fits.

    Raises `ValueError` if the first options do not fit.
    """
    chosen = dict.fromkeys(options, 0)
    used = sum(own[0][1] for own in options.values())
    if used > max_bytes:
        raise ValueError(f"The fewest bits need {used} bytes, more than {max_bytes}.")
    while True:
        best, most = None, 0.0
        for name, own in options.items():
            if chosen[name] + 1 == len(own):
                continue
            (_, now, loss), (_, then, less) = own[chosen[name]], own[chosen[name] + 1]
            gain = (loss - less) / (then - now)
            if used + then - now <= max_bytes and gain > most:
                best, most = name, gain
        if best is None:
            return {name: options[name][place][0] for name, place in chosen.items()}
        used += options[best][chosen[best] + 1][1] - options[best][chosen[best]][1]
        chosen[best] += 1


def residual_window(num_tokens: int, residual: int) -> tuple[int, int]:
    """Return how many of a sequence's oldest tokens have codes in KIVI's cache: keys, and values.

    A channel's scale is shared by `residual` tokens, so keys get codes when that many have come:
    whole groups of them. A value's scales are its own, so a value gets its codes as soon as
    `residual` newer ones are there.
    """
    return num_tokens // residual * residual, max(num_tokens - residual, 0)
