"""Weights in few bits, with a scale and a minimum per group, and a model with rounded inputs."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear
from minigen.model.transformer import Layer
from minigen.protocols import Linear
from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows, byte_rows
from minigen_course.lab.inspect_model import log_probabilities_in, transformer_of

MultiplyCodes = Callable[[CodeRows, ByteRows], np.ndarray]
MultiplyBytes = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Codes(NamedTuple):
    """Quantised numbers: number = code x scale + minimum, with a scale and a minimum per group.

    `codes` are uint8, [rows, width]; `scales` and `minima` are float32, [rows, groups], with values
    that fit into float16. A group has `size` numbers; the last group of a row may be shorter.
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray
    size: int

    def numbers(self) -> np.ndarray:
        """Dequantise the codes: float32, [rows, width]."""
        return self.codes * self._spread(self.scales) + self._spread(self.minima)

    def _spread(self, of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, self.size, axis=1)[:, : self.codes.shape[1]]


def round_weights(rows: np.ndarray, bits: int, size: int) -> Codes:
    """Quantise float32 rows to 2^bits levels from each group's smallest number to its largest.

    Raises `ValueError` unless `bits` is 1 to 8 and `size` is at least 1.
    """
    if not 1 <= bits <= 8 or size < 1:
        raise ValueError(
            f"{bits} bits in groups of {size} are impossible; give 1 to 8 bits, and groups of at "
            "least 1 number."
        )
    begins = np.arange(0, rows.shape[1], size)
    low = np.minimum.reduceat(rows, begins, axis=1).astype(np.float16).astype(np.float32)
    high = np.maximum.reduceat(rows, begins, axis=1)
    last = 2**bits - 1
    scales = ((high - low) / last).astype(np.float16).astype(np.float32)
    made = Codes(np.zeros(rows.shape, np.uint8), scales, low, size)
    steps = made._spread(np.where(scales > 0, scales, 1))
    codes = np.rint((rows - made._spread(low)) / steps).clip(0, last).astype(np.uint8)
    return made._replace(codes=codes)


def bits_a_weight(width: int, bits: int, size: int) -> float:
    """Return the bits per weight of a row: a code, and a share of a 16-bit scale and minimum."""
    return bits + 32 * -(-width // size) / width


def relative_error(rows: np.ndarray, bits: int, size: int) -> float:
    """Return the error of quantised rows, relative to the size of the weights.

    Both are root mean squares: 0.1 is an error of a tenth of a typical weight.
    """
    off = rows - round_weights(rows, bits, size).numbers()
    return float(np.sqrt(np.square(off).mean() / np.square(rows).mean()))


@dataclass(frozen=True)
class CodesLinear:
    """A linear layer that quantises its inputs to bytes, and multiplies by `multiply`."""

    weights: CodeRows
    multiply: MultiplyCodes
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return torch.from_numpy(self.multiply(self.weights, byte_rows(x.numpy())))


@dataclass(frozen=True)
class BytesLinear:
    """A linear layer whose weights and inputs are bytes with a scale for each 32."""

    codes: np.ndarray
    scales: np.ndarray
    multiply: MultiplyBytes
    parts: tuple[int, ...]

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        inputs, input_scales = quantise_groups(x.numpy(), 32)
        pairs = zip(inputs, input_scales, strict=True)
        rows = [self.multiply(self.codes, self.scales, *each) for each in pairs]
        return torch.from_numpy(np.stack(rows))


def continue_in_bytes(llm: LLM, prompt: str, num_tokens: int, multiply: MultiplyBytes) -> str:
    """Continue a prompt greedily, with the first layer's output projection by `multiply`.

    The model must be in float32, and 32 must divide its width.
    """

    def in_bytes(out: DenseLinear) -> Linear:
        codes, scales = quantise_groups(out.weight.numpy(), 32)
        return BytesLinear(codes, scales, multiply, out.parts)

    return _continue_with_first_out(llm, prompt, num_tokens, in_bytes)


def continue_in_codes(llm: LLM, prompt: str, num_tokens: int, multiply: MultiplyCodes) -> str:
    """Continue a prompt greedily, with the first layer's output projection by `multiply`.

    The model must be in float32, and 32 must divide its width.
    """

    def in_codes(out: DenseLinear) -> Linear:
        made = round_weights(out.weight.numpy(), 4, 32)
        weights = CodeRows(made.codes.reshape(*made.scales.shape, 32), made.scales, made.minima)
        return CodesLinear(weights, multiply, out.parts)

    return _continue_with_first_out(llm, prompt, num_tokens, in_codes)


@torch.inference_mode()
def _continue_with_first_out(
    llm: LLM, prompt: str, num_tokens: int, changed: Callable[[DenseLinear], Linear]
) -> str:
    model = transformer_of(llm)
    first = model.layers[0]
    assert isinstance(first.out, DenseLinear), "load it with weights='float32'"
    assert first.out.bias is None, "the course's models have no bias here"
    layer = replace(first, out=changed(first.out))
    model = replace(model, layers=(layer, *model.layers[1:]))
    token_ids = llm.tokenizer.encode(prompt)
    for _ in range(num_tokens):
        attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        token_ids.append(int(model.logits(hidden[-1:])[0].argmax()))
    return llm.tokenizer.decode(token_ids)


Quantise = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
Rounded = Callable[[Tensor], Tensor]


def quantise_groups(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers to bytes, with a scale for every `size` of a row: number = byte x scale.

    `rows` is float32, [rows, width], and `size` divides the width. Returns the bytes (int8 from
    -127 to 127, [rows, groups, size]) and the scales (float32, [rows, groups]). The largest
    magnitude of a group is 127 steps, and each number goes to the nearest step. A group of zeros
    has the scale 0.
    """
    groups = rows.reshape(len(rows), -1, size)
    largest = np.abs(groups).max(axis=-1)
    steps = np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(groups * steps[..., None]).astype(np.int8), largest / np.float32(127)


def rounded(share: Literal["text", "token"] | int, quantise: Quantise = quantise_groups) -> Rounded:
    """Return a function that rounds a product's inputs to bytes, and converts them back to float32.

    `share` says what shares a scale: the whole text, a token, or groups of this many numbers.
    """

    def there_and_back(x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        rows = x.reshape(1, -1) if share == "text" else x
        codes, scales = quantise(rows.numpy(), share if isinstance(share, int) else rows.shape[1])
        return torch.from_numpy(codes * scales[..., None]).reshape(x.shape)

    return there_and_back


@dataclass(frozen=True)
class RoundedLinear:
    """A linear layer whose inputs are rounded first."""

    linear: Linear
    rounded: Rounded

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of the wrapped layer."""
        return self.linear.parts

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return self.linear(self.rounded(x))


@torch.inference_mode()
def scores(
    llm: LLM, token_ids: Sequence[int], rounding: Rounded | None = None
) -> Float[Tensor, "tokens vocab"]:
    """Return the logits after each token of a text; `rounding` changes all products' inputs."""
    model = transformer_of(llm)
    if rounding is not None:
        layers = tuple(_with_rounded_inputs(each, rounding) for each in model.layers)
        model = replace(model, layers=layers, head=RoundedLinear(model.head, rounding))
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    return model.logits(model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend))


def _with_rounded_inputs(layer: Layer, rounding: Rounded) -> Layer:
    return replace(
        layer,
        qkv=RoundedLinear(layer.qkv, rounding),
        out=RoundedLinear(layer.out, rounding),
        gate_up=RoundedLinear(layer.gate_up, rounding),
        down=RoundedLinear(layer.down, rounding),
    )


@torch.inference_mode()
def inputs_of_down(
    llm: LLM, token_ids: Sequence[int], layer_id: int
) -> Float[Tensor, "tokens ffn"]:
    """Return the inputs of one layer's down projection, for every token of a text."""
    model, found = transformer_of(llm), []

    def recorded(x: Tensor) -> Tensor:
        found.append(x)
        return x

    layers = list(model.layers)
    layers[layer_id] = replace(
        layers[layer_id], down=RoundedLinear(layers[layer_id].down, recorded)
    )
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    replace(model, layers=tuple(layers))(
        torch.tensor(token_ids), torch.arange(len(token_ids)), attend
    )
    return found[0]


def continue_rounded(llm: LLM, prompt: str, num_tokens: int, quantise: Quantise) -> str:
    """Continue a prompt greedily; all products get inputs as bytes, with a scale for each 32."""
    token_ids = llm.tokenizer.encode(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(scores(llm, token_ids, rounded(32, quantise))[-1].argmax()))
    return llm.tokenizer.decode(token_ids)


def log_probabilities_of(
    logits: Sequence[Tensor], texts: Sequence[Sequence[int]]
) -> Float[Tensor, " followers"]:
    """Return the log-probabilities of all tokens that follow another one in their text.

    `logits` are [tokens, vocab] per text. They are taken a few rows at a time, so that the copies
    in float64 stay small.
    """
    found = []
    for rows, ids in zip(logits, texts, strict=True):
        for start in range(0, len(ids) - 1, 16):
            piece = slice(start, start + 17)  # its last token only follows another one
            found.append(log_probabilities_in(rows[piece], ids[piece]))
    return torch.cat(found)


def perplexity_cost(
    found: Float[Tensor, " followers"], exact: Float[Tensor, " followers"]
) -> tuple[float, float]:
    """Return by how many per cent the perplexity rises from `exact`, and half its 95 % interval.

    Both are log-probabilities of the same tokens. The interval is of the mean of the differences at
    each token, as if tokens were independent; it is too narrow where they are not.
    """
    differences = exact - found
    ratio = math.exp(float(differences.mean()))
    error = float(differences.std()) / math.sqrt(len(differences))
    return 100 * (ratio - 1), 100 * ratio * 1.96 * error


def rate_and_constant(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = bytes / rate + constant; return the rate in bytes per second, and the constant.

    The line has the smallest squared errors.
    """
    slope, constant = np.polyfit(num_bytes, seconds, 1)
    return float(1 / slope), float(constant)


def possible_fits(
    num_bytes: Sequence[float], seconds: Sequence[float], doubt: float
) -> list[tuple[float, float]]:
    """Fit the line to one round of times, and again with each time longer or shorter by `doubt`.

    `doubt` is a share of a time: 0.02 stands for 2 %, by which a form may be off the line for
    reasons of its own. The first fit is that of the times as they are.
    """
    fits = [rate_and_constant(num_bytes, seconds)]
    for place in range(len(seconds)):
        for factor in (1 - doubt, 1 + doubt):
            changed = list(seconds)
            changed[place] *= factor
            fits.append(rate_and_constant(num_bytes, changed))
    return fits


class TimeParts(NamedTuple):
    """The seconds of a step: reading at full speed, more because it reads slower, the constant.

    `rest` is what the fitted line does not explain, so that the four add up to the step's time.
    """

    full_speed: float
    slower: float
    constant: float
    rest: float


def parts_of_time(
    num_bytes: float, seconds: float, bandwidth: float, rate: float, constant: float
) -> TimeParts:
    """Split a step's seconds by a line seconds = bytes / `rate` + `constant`."""
    full_speed, read = num_bytes / bandwidth, num_bytes / rate
    return TimeParts(full_speed, read - full_speed, constant, seconds - read - constant)


def processor_parts(features: Collection[str], machine: str) -> dict[str, str]:
    """Name what a processor has for this chapter, from LLVM's names of its features ("+avx2").

    `machine` is `platform.machine()`.
    """
    arm = machine.lower() in ("arm64", "aarch64")
    widths = {"+avx512f": 512, "+avx2": 256, "+avx": 256}
    bits = next((each for name, each in widths.items() if name in features), 128)
    dots = {
        "+avx512vnni": "vpdpbusd (AVX512-VNNI)",
        "+avxvnni": "vpdpbusd (AVX-VNNI)",
        "+dotprod": "sdot",
    }
    byte_dots = next((each for name, each in dots.items() if name in features), "none")
    return {
        "SIMD register": f"{bits} bits, {bits // 32} lanes of float32",
        "FMA": "yes" if arm or "+fma" in features else "no",
        "byte dot product": byte_dots,
        "bfloat16 dot product": "yes" if {"+avx512bf16", "+bf16"} & set(features) else "no",
        "AMX tiles": "yes" if "+amx-bf16" in features else "no",
    }


class Roof(NamedTuple):
    """Bytes that memory delivers per second, and operations per second in three forms."""

    instructions: str
    bandwidth: float
    int4: float
    int8: float
    bfloat16: float

    @property
    def tokens(self) -> float:
        """The tokens whose operations on an int8 weight take as long as reading its 8.5 bits."""
        return self.int8 * (8.5 / 8) / (2 * self.bandwidth)


# One Intel Xeon; from benchmarks/results/34_roofs.json, by the ends of its names there.
ROOFS = {
    "avx2": Roof("AVX2", 32.86e9, 210.2e9, 166.4e9, 152.3e9),
    "avx2-vnni": Roof("AVX2 with VNNI", 32.84e9, 398.8e9, 352.6e9, 151.0e9),
    "avx512": Roof("AVX-512 with VNNI, BF16", 32.04e9, 505.7e9, 457.9e9, 163.3e9),
    "amx": Roof("AVX-512 with AMX", 33.99e9, 632.4e9, 505.5e9, 1001.45e9),
}


def table_of_roofs(roofs: Iterable[Roof] = ROOFS.values()) -> str:
    """Return a line per roof: 10^9 bytes and operations per second, and the ridge in tokens."""
    head = f"{'':23} {'bytes':>6} {'int4':>5} {'int8':>5} {'bfloat16':>9} {'ridge':>6}"
    lines = [
        f"{each.instructions:23} {each.bandwidth / 1e9:6.1f} {each.int4 / 1e9:5,.0f} "
        f"{each.int8 / 1e9:5,.0f} {each.bfloat16 / 1e9:9,.0f} {each.tokens:6.1f}"
        for each in roofs
    ]
    return "\n".join([head, *lines])
