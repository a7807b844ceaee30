"""The numbers that panels of codes stand for, multiplied with inputs that are not rounded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.linear import PanelLinear, panel_linear
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear
from minigen.protocols import Linear


def unrounded(linear: PanelLinear) -> DenseLinear:
    """The same weights in float32: what each input, alone and 1, is multiplied with."""
    told = PanelLinear(linear.panels, linear.in_features, None, linear.parts, linear.num_threads)
    weight = told(torch.eye(linear.in_features)).T.contiguous()
    return DenseLinear(weight, linear.bias, linear.parts)


def with_unrounded_inputs(form: str) -> MakeLinear:
    """Layers that multiply with the weights of a form, and leave their inputs as they are."""

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        linear = panel_linear(form, 1)(weights, biases)
        assert isinstance(linear, PanelLinear)
        return unrounded(linear)

    return make


def root_mean_square(x: Tensor) -> float:
    """Of all its numbers."""
    return float(x.double().square().mean().sqrt())
