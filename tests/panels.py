"""The numbers that packed codes stand for, multiplied by inputs that are not rounded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.panel_linear import PanelLinear, panel_linear
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear
from minigen.protocols import Linear


def unrounded(linear: PanelLinear) -> DenseLinear:
    """Return the same weights in float32; they are found by multiplying with an identity matrix."""
    copy = PanelLinear(linear.weights, linear.in_features, None, linear.parts, linear.num_threads)
    weight = copy(torch.eye(linear.in_features)).T.contiguous()
    return DenseLinear(weight, linear.bias, linear.parts)


def with_unrounded_inputs(form: str) -> MakeLinear:
    """Return layers with the weights of a format that do not round their inputs."""

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        linear = panel_linear(form, 1)(weights, biases)
        assert isinstance(linear, PanelLinear)
        return unrounded(linear)

    return make


def root_mean_square(x: Tensor) -> float:
    """Return the root mean square of all numbers."""
    return float(x.double().square().mean().sqrt())
