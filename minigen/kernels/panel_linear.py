"""Linear layers on packed weights, for a model that runs layer by layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.cpu.arrays.inputs import quantized, rounded
from minigen.kernels.cpu.arrays.step_arrays import product_scratch
from minigen.kernels.cpu.packed_weights import GROUP, PackedWeights, Pairs, pack_layers
from minigen.kernels.cpu.team import available_threads, team_of
from minigen.kernels.jit.machine_code import CompiledFunction
from minigen.model.transformer import MakeLinear
from minigen.protocols import Linear

prepare_and_multiply = CompiledFunction("minigen.kernels.cpu.linear", "prepare_and_multiply")

# All layers share it, because one product runs at a time in a process (`Team.run`).
_shared_scratch = cache(product_scratch)


@dataclass(frozen=True)
class PanelLinear:
    """y = x W^T + b with packed W; x is rounded to the input type that the weights need."""

    weights: PackedWeights
    in_features: int
    bias: Float[Tensor, " out_features"] | None
    parts: tuple[int, ...]
    num_threads: int

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        num_tokens, width, groups = len(x), sum(self.parts), self.in_features // GROUP
        flat = x.float().contiguous().numpy().reshape(-1)
        in_bfloat16 = isinstance(self.weights, Pairs)
        inputs = (rounded if in_bfloat16 else quantized)(*x.shape)
        out = np.empty(num_tokens * width, np.float32)
        sizes = (num_tokens, groups, out, width)
        scratch = _shared_scratch(in_bfloat16, groups, self.num_threads)
        team_of(self.num_threads).run(
            2, prepare_and_multiply, self.weights, flat, inputs, *sizes, scratch
        )
        made = torch.from_numpy(out).unflatten(0, (num_tokens, width))
        return (made if self.bias is None else made + self.bias).to(x.dtype)


def check_panels(matrices: Iterable[StoredTensor], form: str) -> None:
    """Raise `OptionError` if a matrix's width is no multiple of 32, or its rows are none of 16."""
    for matrix in matrices:
        rows, width = matrix.shape
        if width % GROUP or rows % NUM_LANES:
            raise OptionError(
                f"weights={form!r} needs a multiple of {GROUP} columns and a multiple of "
                f"{NUM_LANES} rows, but {matrix.name} is {matrix.shape}. Use weights='bfloat16'."
            )


def panel_linear(form: str, num_threads: int) -> MakeLinear:
    """Return a factory of linear layers in the form "int8" or "int4".

    It raises `OptionError` as `check_panels` does.
    """

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        check_panels(weights, form)
        parts, width = tuple(each.shape[0] for each in weights), weights[0].shape[1]
        bias = torch.cat([each.dequantize(torch.float32) for each in biases]) if biases else None
        packed = pack_layers([weights], form)
        return PanelLinear(packed, width, bias, parts, available_threads(num_threads))

    return make
