"""Numbers as bits: floating-point and integer formats, and what rounding to them costs.

Sources: IEEE 754; Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

import math
from dataclasses import dataclass

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.quant_formats import FORMATS


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format: a sign, `exponent_bits` and `mantissa_bits`.

    A format without infinity uses its largest exponent for numbers, too (FP8 E4M3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        if not self.has_infinity:  # the last pattern of all ones is nan
            top = 2**self.exponent_bits - 1 - self.bias
            return float(2.0**top * (2 - 2 * 2.0**-self.mantissa_bits))
        return float(2.0**self.bias * (2 - 2.0**-self.mantissa_bits))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number that has a full mantissa."""
        return float(2.0 ** (1 - self.bias))

    @property
    def num_bits(self) -> int:
        """Bits of one number."""
        return 1 + self.exponent_bits + self.mantissa_bits


FLOATS = (
    FloatFormat("FP32", 8, 23),
    FloatFormat("FP16", 5, 10),
    FloatFormat("BF16", 8, 7),
    FloatFormat("FP8 E4M3", 4, 3, has_infinity=False),
    FloatFormat("FP8 E5M2", 5, 2),
)


@dataclass(frozen=True)
class StoredNumber:
    """A number as a format holds it: (name, bits) of each field, and the value that is read."""

    fields: tuple[tuple[str, str], ...]
    value: float


def encode_float(number: float, form: FloatFormat) -> StoredNumber:
    """Round a number to the nearest one of a format, ties to even; `ValueError` for nan.

    Beyond the largest number it becomes infinity or, in a format without it, the largest number.
    """
    if math.isnan(number):
        raise ValueError("nan is not a number; give one, such as 0.1.")
    sign, size = math.copysign(1, number), abs(number)
    step = 2.0 ** (1 - form.bias - form.mantissa_bits)  # between subnormal numbers
    if form.smallest_normal <= size < math.inf:
        step = 2.0 ** (math.frexp(size)[1] - 1 - form.mantissa_bits)
    rounded = round(size / step) * step if size < math.inf else math.inf
    if rounded > form.largest:
        rounded = math.inf if form.has_infinity else form.largest
    exponent, mantissa = _stored_fields(rounded, form)
    fields = (
        ("sign", "1" if sign < 0 else "0"),
        ("exponent", f"{exponent:0{form.exponent_bits}b}"),
        ("mantissa", f"{mantissa:0{form.mantissa_bits}b}"),
    )
    return StoredNumber(fields, sign * rounded)


def _stored_fields(size: float, form: FloatFormat) -> tuple[int, int]:
    """Return the stored exponent and mantissa of a number of the format, without its sign."""
    if size == math.inf:
        return 2**form.exponent_bits - 1, 0
    if size < form.smallest_normal:
        return 0, round(size / form.smallest_normal * 2**form.mantissa_bits)
    exponent = math.frexp(size)[1] - 1
    return exponent + form.bias, round((size / 2.0**exponent - 1) * 2**form.mantissa_bits)


def float_of_bits(bits: str, exponent_bits: int) -> float:
    """Return the number that bits stand for: the sign first, then exponent and mantissa.

    A stored exponent of zeros means a subnormal number, one of ones means infinity (if the mantissa
    is zero) or nan.

    >>> float_of_bits("1" + "01111100" + "01000000000000000000000", exponent_bits=8)
    -0.15625
    """
    sign = -1.0 if bits[0] == "1" else 1.0
    stored, digits = bits[1 : 1 + exponent_bits], bits[1 + exponent_bits :]
    fraction = int(digits, 2) / 2 ** len(digits)
    bias = 2 ** (exponent_bits - 1) - 1
    if "0" not in stored:
        return sign * math.inf if fraction == 0 else math.nan
    if "1" not in stored:
        return sign * 2.0 ** (1 - bias) * fraction
    return sign * 2.0 ** (int(stored, 2) - bias) * (1 + fraction)


def encode_integer(number: float, largest: float, num_bits: int) -> StoredNumber:
    """Round a number to a signed integer times a scale, such that `largest` still fits.

    Raises `ValueError` unless `largest` is positive and finite.
    """
    if not 0 < largest < math.inf or not math.isfinite(number):
        raise ValueError("An integer format needs finite numbers, and a largest one above 0.")
    most = 2 ** (num_bits - 1) - 1
    scale = largest / most
    level = max(-most, min(most, round(number / scale)))
    return StoredNumber((("integer", f"{level % 2**num_bits:0{num_bits}b}"),), level * scale)


def bits_per_weight(kind: str) -> float:
    """Return the bits that a stored number takes, with its share of scales and minima."""
    return 8 * FORMATS[kind].block_bytes / FORMATS[kind].block_size


def rounding_error(kind: str, numbers: Float[Tensor, "rows columns"]) -> float:
    """Return the root mean square error of a format, as a share of that of the numbers.

    The gguf library packs them, and minigen unpacks them.
    """
    packed = torch.from_numpy(quantize(numbers.numpy(), GGMLQuantizationType[kind]))
    form = FORMATS[kind]
    blocks = packed.view(torch.uint8).unflatten(-1, (-1, form.block_bytes))
    errors = form.unpack(blocks).flatten(-2) - numbers
    return float(errors.square().mean().sqrt() / numbers.square().mean().sqrt())
