"""Weights in few bits: codes with a scale and a minimum for every group, of any width."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.kernels.reference import ByteRows, CodeRows, byte_rows
from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear
from minigen.teach.looking import transformer_of

MultiplyCodes = Callable[[CodeRows, ByteRows], np.ndarray]


class Codes(NamedTuple):
    """Numbers as codes: number = code x scale + minimum, scale and minimum being a group's.

    `codes` are uint8, [rows, width]; `scales` and `minima` float32, [rows, groups], of values that
    16 bits hold. `size` numbers make a group; the last one of a row may be shorter.
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray
    size: int

    def numbers(self) -> np.ndarray:
        """What the codes stand for: float32, [rows, width]."""
        return self.codes * self._spread(self.scales) + self._spread(self.minima)

    def _spread(self, of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, self.size, axis=1)[:, : self.codes.shape[1]]


def round_weights(rows: np.ndarray, bits: int, size: int) -> Codes:
    """Rows of float32 in 2^bits even steps from each group's smallest number to its largest.

    Raises `ValueError` for bits that are not 1 to 8, and for groups of no numbers.
    """
    if not 1 <= bits <= 8 or size < 1:
        raise ValueError(f"{bits} bits in groups of {size}: it takes 1 to 8 bits, 1 number or more")
    begins = np.arange(0, rows.shape[1], size)
    low = np.minimum.reduceat(rows, begins, axis=1).astype(np.float16).astype(np.float32)
    high = np.maximum.reduceat(rows, begins, axis=1)
    last = 2**bits - 1
    scales = ((high - low) / last).astype(np.float16).astype(np.float32)
    made = Codes(np.zeros(rows.shape, np.uint8), scales, low, size)
    steps = made._spread(np.maximum(scales, np.finfo(np.float16).tiny))
    codes = np.rint((rows - made._spread(low)) / steps).clip(0, last).astype(np.uint8)
    return made._replace(codes=codes)


def bits_a_weight(width: int, bits: int, size: int) -> float:
    """What a weight of a row takes: its code, and its part of a scale and a minimum of 16 bits."""
    return bits + 32 * -(-width // size) / width


def relative_error(rows: np.ndarray, bits: int, size: int) -> float:
    """How far rounded rows are from the exact ones, in parts of the weights' own size.

    Both are root mean squares: 0.1 is an error of a tenth of a typical weight.
    """
    off = rows - round_weights(rows, bits, size).numbers()
    return float(np.sqrt(np.square(off).mean() / np.square(rows).mean()))


@dataclass(frozen=True)
class CodesLinear:
    """A linear layer of codes, which gets bytes, and is told how to multiply them."""

    weights: CodeRows
    multiply: MultiplyCodes
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return torch.from_numpy(self.multiply(self.weights, byte_rows(x.numpy())))


@torch.inference_mode()
def continue_in_codes(llm: LLM, prompt: str, num_tokens: int, multiply: MultiplyCodes) -> str:
    """The likeliest continuation of a prompt, the output of the first layer's heads by `multiply`.

    The model is in float32, and 32 divides its width.
    """
    model = transformer_of(llm)
    first = model.layers[0]
    assert isinstance(first.out, DenseLinear), "load it with weights='float32'"
    assert first.out.bias is None, "heads' output has no bias in models that the course loads"
    made = round_weights(first.out.weight.numpy(), 4, 32)
    weights = CodeRows(made.codes.reshape(*made.scales.shape, 32), made.scales, made.minima)
    layer = replace(first, out=CodesLinear(weights, multiply, first.out.parts))
    model = replace(model, layers=(layer, *model.layers[1:]))
    token_ids = llm.tokenizer.encode(prompt)
    for _ in range(num_tokens):
        attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        token_ids.append(int(model.logits(hidden[-1:])[0].argmax()))
    return llm.tokenizer.decode(token_ids)
