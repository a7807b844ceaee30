"""A learner's kernel in the engine: launchers with the signatures of the layers they stand for."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from minigen.teach.interpreted import launch

BLOCK = 1024


def swiglu_by(kernel: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """`minigen.model.layers.swiglu` by a kernel as `minigen.kernels.gpu.first.silu_multiply` is.

    Gate and up may be the halves of one product: then their rows lie as far apart as its rows do.
    """

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        num_tokens, ffn = gate.shape
        mixed = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grid = (num_tokens, triton.cdiv(ffn, BLOCK))
        launch(kernel, grid, gate, up, mixed, ffn, gate.stride(0), BLOCK=BLOCK)
        return mixed

    return swiglu


def rms_norm_by(kernel: Any) -> Callable[[Tensor, Tensor, float], Tensor]:
    """`minigen.model.layers.rms_norm` by a kernel as `minigen.kernels.gpu.first.rms_norm_rows` is.

    Rows are contiguous, and a row fits into one program.
    """

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden = x.shape[-1]
        normalised, grid = torch.empty_like(x), (x.numel() // hidden,)
        block = triton.next_power_of_2(hidden)
        launch(kernel, grid, x, weight, normalised, hidden, eps, BLOCK=block)
        return normalised

    return rms_norm
