"""Calibration: what a model's linear layers see of a text, one transformer layer at a time.

The hidden states of all windows wait between two layers. A layer is built, it runs over them with
linear layers that record their inputs, its matrices are quantized, and the layer runs again with
the quantized matrices, so that the next layer is calibrated on the inputs that it will really have
(the order of GPTQ, Frantar et al. 2022, section 4). Memory: one layer in float32, its Hessians
(4 * columns^2 bytes per input), and one hidden state per token.

**The first token counts more.** Most heads put much of their attention on a text's first token (an
attention sink, Xiao et al. 2023), whose value is small, so that little is added. It is one token of
hundreds: GPTQ repays the errors of the others with its value, which all tokens then read. On
SmolLM2 in 4 bits the values' matrices alone then do more harm than rounding to nearest. So for the
inputs of Q, K and V the first token of a window counts as often as all others together. RSQ (Sung
et al. 2025) weighs all tokens by the attention that they get; IntactKV (Liu et al. 2024) keeps the
keys and values of such tokens as they were.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import (
    Layer,
    MakeLinear,
    build_frequencies,
    build_layer,
    run_layer,
)
from minigen.protocols import Linear


@dataclass
class InputStatistics:
    """What calibration keeps of one input of `columns` channels, summed over its tokens.

    `hessian` is X^T X; a token may count several times in it, and `weight` is the sum. With it the
    squared error of a linear layer's outputs, over all the tokens that were seen, is known without
    the tokens: see `output_error`.
    """

    columns: int
    num_tokens: int = 0
    weight: int = 0
    hessian: Float[Tensor, "columns columns"] = field(init=False)
    sum_abs: Float[Tensor, " columns"] = field(init=False)
    max_abs: Float[Tensor, " columns"] = field(init=False)

    def __post_init__(self) -> None:
        self.hessian = torch.zeros(self.columns, self.columns)
        self.sum_abs = torch.zeros(self.columns)
        self.max_abs = torch.zeros(self.columns)

    def add(self, x: Float[Tensor, "tokens columns"], first_counts: int = 1) -> None:
        """Count some more tokens' inputs, the first of them `first_counts` times in the Hessian."""
        x = x.float()
        self.num_tokens += len(x)
        self.weight += len(x) - 1 + first_counts
        self.hessian.addmm_(x.T, x)
        self.hessian.addr_(x[0], x[0], alpha=first_counts - 1)
        self.sum_abs += x.abs().sum(0)
        self.max_abs = torch.maximum(self.max_abs, x.abs().amax(0))

    @property
    def mean_abs(self) -> Float[Tensor, " columns"]:
        """The mean magnitude of each channel, by which AWQ chooses its scales."""
        return self.sum_abs / max(self.num_tokens, 1)

    @property
    def mean_square(self) -> Float[Tensor, " columns"]:
        """The mean square of each channel: llama.cpp's importance matrix, but for first tokens."""
        return self.hessian.diagonal() / max(self.weight, 1)

    def output_error(self, change: Float[Tensor, "rows columns"]) -> float:
        """Return the mean squared change of a token's outputs if the weights change by `change`.

        This is |X change^T|^2 / tokens = trace(change H change^T) / tokens, summed over the rows; a
        token that counts several times is several tokens.
        """
        change = change.float()
        total = (change @ self.hessian * change).sum(dtype=torch.float64)
        return float(total) / max(self.weight, 1)


@dataclass(frozen=True)
class RecordingLinear:
    """A linear layer that adds each of its inputs, a window, to `statistics`.

    With `weighs_first`, the first token counts as much as all others of its window together.
    """

    linear: Linear
    statistics: InputStatistics
    weighs_first: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """The output widths of the fused layers."""
        return self.linear.parts

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        self.statistics.add(x, max(len(x) - 1, 1) if self.weighs_first else 1)
        return self.linear(x)


@dataclass(frozen=True)
class SharedInput:
    """The matrices of one layer that read the same input, by name, and what that input was.

    Q, K and V share one, gate and up another; `o_proj` and `down_proj` have their own.
    """

    layer_id: int
    weights: Mapping[str, Float[Tensor, "_rows columns"]]
    statistics: InputStatistics


Quantize = Callable[[SharedInput], Mapping[str, Tensor]]  # the weights to go on with, by name


def calibrate(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    windows: Sequence[Int64[Tensor, " _tokens"]],
    quantize: Quantize,
    *,
    sequential: bool = True,
    weigh_first: bool = True,
    first_layer: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the layers over windows of token ids, and call `quantize` for each input of each layer.

    `quantize` returns the dequantized matrices, by name; names that it leaves out keep their
    weights. With `sequential`, later layers see the outputs of these matrices, otherwise those of
    the original ones. With `weigh_first`, a window's first token counts as much as all others in
    the Hessian of Q, K and V: most heads attend to it. Layers before `first_layer` run, but
    `quantize` is not called for them. `progress` gets the layers done, and their number.

    Raises `OptionError` if there are no windows or an empty one.
    """
    if not windows or min(len(window) for window in windows) == 0:
        raise OptionError("Calibration needs at least one window with at least one token.")
    embedding = tensors["model.embed_tokens.weight"].dequantize()
    states = [embedding[window] for window in windows]
    del embedding
    run = _layer_runner(config, tensors)
    for layer_id in range(config.num_layers):
        recorded: dict[tuple[str, ...], RecordingLinear] = {}
        make = replaced_linear({})
        if layer_id >= first_layer:  # a Hessian takes as long as the layer itself
            make = _recording(recorded, weigh_first)
        layer = build_layer(tensors, layer_id, torch.float32, make)
        outputs = [run(layer_id, layer, x) for x in states]
        rounded: dict[str, Tensor] = {}
        for names, linear in recorded.items():
            assert isinstance(linear.linear, DenseLinear)
            rows = linear.linear.weight.split(linear.parts)
            shared = SharedInput(layer_id, dict(zip(names, rows, strict=True)), linear.statistics)
            rounded |= quantize(shared)
        recorded.clear()
        if sequential and rounded:
            layer = build_layer(tensors, layer_id, torch.float32, replaced_linear(rounded))
            outputs = [run(layer_id, layer, x) for x in states]
        states = outputs
        progress(layer_id + 1, config.num_layers)


def collect(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    windows: Sequence[Int64[Tensor, " _tokens"]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, InputStatistics]:
    """Return the statistics of every matrix's input by name, with the model as it is.

    All layers' Hessians stay in memory: 4 * columns^2 bytes for each of four inputs per layer.
    """
    found: dict[str, InputStatistics] = {}

    def keep(shared: SharedInput) -> dict[str, Tensor]:
        found.update(dict.fromkeys(shared.weights, shared.statistics))
        return {}

    calibrate(config, tensors, windows, keep, sequential=False, progress=progress)
    return found


def replaced_linear(replaced: Mapping[str, Tensor]) -> MakeLinear:
    """Return a `MakeLinear` of dense float32 layers that takes the weights in `replaced` by name.

    A matrix that is not in `replaced` is dequantized from its stored form.
    """

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> DenseLinear:
        rows = [
            replaced[each.name].float() if each.name in replaced else each.dequantize()
            for each in weights
        ]
        bias = torch.cat([each.dequantize() for each in biases]) if biases else None
        return DenseLinear(torch.cat(rows), bias, tuple(len(each) for each in rows))

    return make


def _recording(recorded: dict[tuple[str, ...], RecordingLinear], weigh_first: bool) -> MakeLinear:
    """Return a `MakeLinear` whose layers are kept in `recorded`, by the names of their weights."""
    make = replaced_linear({})

    def recording(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        names = tuple(each.name for each in weights)
        linear = RecordingLinear(
            make(weights, biases),
            InputStatistics(weights[0].shape[1]),
            weigh_first and any(name.endswith(".v_proj.weight") for name in names),
        )
        recorded[names] = linear
        return linear

    return recording


def _layer_runner(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> Callable[[int, Layer, Tensor], Tensor]:
    """Return a function that runs one layer over the hidden states of one window."""
    frequencies = build_frequencies(config, tensors)

    def run(layer_id: int, layer: Layer, x: Tensor) -> Tensor:
        rotation = rotary_tables(frequencies, torch.arange(len(x)))
        attend = attend_packed([len(x)], config.sliding_windows)
        with torch.inference_mode():
            return run_layer(
                layer,
                x,
                rotation,
                lambda q, k, v: attend(layer_id, q, k, v),
                config.head_dim,
                config.norm_eps,
            )

    return run
