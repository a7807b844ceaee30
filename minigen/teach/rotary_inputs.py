"""Something to rotate and store: what `minigen.kernels.gpu.rotary` is given, of any size."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minigen.model.layers import rotary_tables

BLOCK_SIZE = 4


class RotaryInputs(NamedTuple):
    """Arguments of `rotary_store_triton` and of its twin, in their order; all in float16."""

    qkv: Tensor
    norms: None
    eps: float
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor

    def named(self) -> dict[str, Tensor]:
        """The tensors by their names."""
        names = ("qkv", "positions", "slots", "keys", "values")
        cos, sin = self.tables
        return {name: getattr(self, name) for name in names} | {"cos": cos, "sin": sin}


def rotary_inputs(slots: Sequence[int], q_heads: int, kv_heads: int, head_dim: int) -> RotaryInputs:
    """A token for each slot, at positions 0, 1, 2, ..., and a pool of zeros in blocks of 4."""
    num_tokens, num_blocks = len(slots), max(slots) // BLOCK_SIZE + 1
    positions = torch.arange(num_tokens)
    keys, values = (
        torch.zeros(num_blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.float16)
        for _ in range(2)
    )
    return RotaryInputs(
        qkv=torch.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim).half(),
        norms=None,
        eps=1e-5,
        tables=rotary_tables(torch.rand(head_dim // 2), positions),
        positions=positions,
        slots=torch.tensor(slots),
        keys=keys,
        values=values,
    )
