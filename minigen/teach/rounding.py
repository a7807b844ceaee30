"""A model whose products are given bytes: inputs rounded, in groups that share a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.transformer import Layer
from minigen.protocols import Linear
from minigen.teach.looking import transformer_of

Quantise = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
Rounded = Callable[[Tensor], Tensor]


def quantise_groups(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as bytes with a scale for every `size` of a row's: number = byte x scale.

    `rows` is float32, [rows, width], and `size` divides the width. Returns the bytes, int8 from
    -127 to 127, [rows, groups, size], and the scales, float32, [rows, groups]. A group's largest
    magnitude is 127 steps, every number goes to the nearest step, and zeros have the scale 0.
    """
    groups = rows.reshape(len(rows), -1, size)
    largest = np.abs(groups).max(axis=-1)
    steps = np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(groups * steps[..., None]).astype(np.int8), largest / np.float32(127)


def rounded(share: Literal["text", "token"] | int, quantise: Quantise = quantise_groups) -> Rounded:
    """What becomes of a product's inputs as bytes, back in float32.

    A scale is for the whole text, for a token, or for so many of a token's numbers.
    """

    def there_and_back(x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        rows = x.reshape(1, -1) if share == "text" else x
        codes, scales = quantise(rows.numpy(), share if isinstance(share, int) else rows.shape[1])
        return torch.from_numpy(codes * scales[..., None]).reshape(x.shape)

    return there_and_back


@dataclass(frozen=True)
class RoundedLinear:
    """Another linear layer, whose inputs are rounded first."""

    linear: Linear
    rounded: Rounded

    @property
    def parts(self) -> tuple[int, ...]:
        """As the layer's own."""
        return self.linear.parts

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        return self.linear(self.rounded(x))


@torch.inference_mode()
def scores(
    llm: LLM, token_ids: Sequence[int], rounding: Rounded | None = None
) -> Float[Tensor, "tokens vocab"]:
    """The logits after each token, of a whole text at once, all inputs of products `rounding`."""
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
    """What one layer's last product is given, for every token of a text."""
    model, found = transformer_of(llm), []

    def listening(x: Tensor) -> Tensor:
        found.append(x)
        return x

    layers = list(model.layers)
    layers[layer_id] = replace(
        layers[layer_id], down=RoundedLinear(layers[layer_id].down, listening)
    )
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    replace(model, layers=tuple(layers))(
        torch.tensor(token_ids), torch.arange(len(token_ids)), attend
    )
    return found[0]


def continue_rounded(llm: LLM, prompt: str, num_tokens: int, quantise: Quantise) -> str:
    """The likeliest continuation of a prompt, all products given bytes with a scale for each 32."""
    token_ids = llm.tokenizer.encode(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(scores(llm, token_ids, rounded(32, quantise))[-1].argmax()))
    return llm.tokenizer.decode(token_ids)
