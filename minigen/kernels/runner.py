"""The compiled step as a `Runner`: it packs the batch, the rest is one call."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.cache.manager import BlockManager
from minigen.engine.runner import Packed, Packer
from minigen.kernels.compiled import run_step
from minigen.kernels.memory import zeros
from minigen.kernels.paging import PanelPool, Shape, make_scratch
from minigen.kernels.panels import Pairs
from minigen.kernels.rows import quantised, rounded
from minigen.kernels.step import Weights, Workspace, num_phases
from minigen.kernels.threads import available_threads, team_of
from minigen.sequence import Chunk

EVERYTHING = 2**40  # the window of a layer that has none


class CompiledRunner:
    """Runs the model over chunks in one compiled function, keys and values in a `PanelPool`.

    The logits are good until the next step. A token's logits are the same, bit for bit, whatever
    else is in its batch and however its prompt was cut into chunks.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        pool: PanelPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_batch_tokens: int,
        num_threads: int,
    ):
        self.shape, self.weights, self.pool, self.manager = shape, weights, pool, manager
        self.num_threads = available_threads(num_threads)
        self.packer = Packer(manager, shape.block_size, max_batch_tokens)
        self._windows = np.array([window or EVERYTHING for window in windows], np.int64)
        self._work = make_workspace(shape, max_batch_tokens, isinstance(weights.qkv, Pairs))
        self._scratch = make_scratch(shape, max_batch_tokens, self.num_threads, pool.kv_dtype)
        self._logits = zeros(len(manager.tables) * shape.vocab, np.float32)

    def logits(self, chunks: SequenceOf[Chunk]) -> Float[Tensor, "rows vocab"]:
        """The raw logits of each chunk's `told_rows`, then of its samples."""
        packed = self.packer.pack(chunks)
        self.pool.copy_blocks(self.manager.take_copies())
        rows = packed.logits_rows
        if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
            return self._logits_of(packed)
        distinct, wanted = np.unique(rows, return_inverse=True)  # siblings begin with one row
        return self._logits_of(packed._replace(logits_rows=distinct))[torch.from_numpy(wanted)]

    def _logits_of(self, packed: Packed) -> Float[Tensor, "rows vocab"]:
        shape = (len(packed.logits_rows), self.shape.vocab)
        logits = self._logits[: shape[0] * shape[1]]
        if len(logits) < shape[0] * shape[1]:  # the prompt's own logprobs are asked for
            logits = np.empty(shape[0] * shape[1], np.float32)
        self.run(packed, logits)
        return torch.from_numpy(logits.reshape(shape))

    def run(self, packed: Packed, logits: np.ndarray) -> None:
        """One step; writes the logits of `packed.logits_rows`, ascending, one after another."""
        team_of(self.num_threads).run(
            num_phases(self.shape),
            run_step,
            self.shape,
            self.weights,
            self._windows,
            packed,
            self.pool.cache,
            self._scratch,
            self._work,
            logits,
        )


def make_workspace(shape: Shape, max_tokens: int, in_bfloat16: bool) -> Workspace:
    """What a step of at most so many tokens writes on its way."""
    heads_width = shape.q_heads * shape.head_dim
    widest = max(shape.hidden, heads_width)
    room = rounded if in_bfloat16 else quantised
    return Workspace(
        x=zeros(max_tokens * shape.hidden, np.float32),
        qkv=zeros(max_tokens * (heads_width + 2 * shape.kv_heads * shape.head_dim), np.float32),
        mixed=zeros(max_tokens * heads_width, np.float32),
        inputs=room(max_tokens * widest),
        ffn_inputs=room(max_tokens * shape.ffn),
    )
