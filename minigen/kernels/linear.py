"""Linear layers in panels for the layer-by-layer runner: the same products, one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from minigen.errors import OptionError
from minigen.kernels.crew import enter, leave
from minigen.kernels.llvm import NUM_LANES
from minigen.kernels.multiply import multiply
from minigen.kernels.panels import GROUP, Pairs, Panels, stack_panels
from minigen.kernels.rows import prepare, quantised, rounded
from minigen.kernels.threads import available_threads, team_of
from minigen.model.transformer import MakeLinear
from minigen.model.weights import StoredTensor
from minigen.protocols import Linear


@dataclass(frozen=True)
class PanelLinear:
    """y = x W^T + b with W in panels; x is rounded to what the panels are multiplied with."""

    panels: Panels
    in_features: int
    bias: Float[Tensor, " out_features"] | None
    parts: tuple[int, ...]
    num_threads: int

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        num_tokens, width = len(x), sum(self.parts)
        flat = x.float().contiguous().numpy().reshape(-1)
        inputs = (rounded if isinstance(self.panels, Pairs) else quantised)(flat.size)
        out = np.empty(num_tokens * width, np.float32)
        groups = self.in_features // GROUP
        team_of(self.num_threads).run(
            2, _prepare_and_multiply, self.panels, flat, inputs, num_tokens, groups, out, width
        )
        made = torch.from_numpy(out).unflatten(0, (num_tokens, width))
        return (made if self.bias is None else made + self.bias).to(x.dtype)


@njit(nogil=True)
def _prepare_and_multiply(crew, step, panels, x, inputs, num_tokens, groups, out, width):
    if enter(crew, step):
        prepare(crew, x, num_tokens, groups * GROUP, inputs)
        multiply(crew, panels, 0, inputs, num_tokens, groups, out, width, False)
        leave(crew)


def panel_linear(form: str, num_threads: int) -> MakeLinear:
    """Linear layers in the form "int8" or "int4"; raises `OptionError` for odd widths."""

    def make(weights: Sequence[StoredTensor], biases: Sequence[StoredTensor]) -> Linear:
        parts, width = tuple(each.shape[0] for each in weights), weights[0].shape[1]
        if width % GROUP or any(part % NUM_LANES for part in parts):
            raise OptionError(
                f"weights={form!r} needs rows of a multiple of {GROUP} numbers, by {NUM_LANES} "
                f"rows; {weights[0].name} is {weights[0].shape}. Use weights='bfloat16'."
            )
        bias = torch.cat([each.dequantise(torch.float32) for each in biases]) if biases else None
        panels = stack_panels([weights], form)
        return PanelLinear(panels, width, bias, parts, available_threads(num_threads))

    return make
