"""A scheduler that reserves the longest possible answer, and two functions for the exercises.

The scheduler is there for comparison; everything else is the engine's own. Source: Kwon et al.
2023, section 3.1, on systems before PagedAttention.
"""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import KVPool as Pool
from minigen.sequence import Sequence


class ReservingManager(BlockManager):
    """A block manager that gives a sequence all blocks that it may ever need when it starts."""

    def __init__(self, manager: BlockManager):
        self.__dict__ = (
            manager.__dict__
        )  # the same tables, because the engine reads the original manager

    def allocate(self, sequence: Sequence, max_tokens: int) -> int:
        """Allocate as `BlockManager` does, or return 0 if the longest answer does not fit."""
        longest = len(sequence.prompt_ids) + sequence.max_output
        if blocks_needed(longest, self.block_size) > self.num_available:
            return 0
        num_tokens = super().allocate(sequence, max_tokens)
        if num_tokens:
            reserved = self.allocate_slots(sequence, longest - sequence.num_computed)
            assert reserved, "the blocks for the longest answer are free"
        return num_tokens


class ReservingScheduler(ContinuousScheduler):
    """Continuous batching that admits a request once blocks for its longest answer are free."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(ReservingManager(manager), max_num_seqs, max_num_batched_tokens)


def decode_slots(
    block_tables: Int64[np.ndarray, "sequences max_blocks"],
    context_lens: Int64[np.ndarray, " sequences"],
    block_size: int,
) -> Int64[np.ndarray, " sequences"]:
    """Return the slot of each sequence's last token, of all sequences at once.

    `context_lens` counts the last token. Rows of `block_tables` are padded with 0 at their ends.

    >>> decode_slots(np.array([[7, 3], [5, 0]]), np.array([6, 4]), block_size=4).tolist()
    [13, 23]
    """
    last = context_lens - 1
    blocks = block_tables[np.arange(len(last)), last // block_size]
    return blocks * block_size + last % block_size


def attend_by_block(
    q: Float[Tensor, "q_heads head_dim"],
    pool: Pool,
    layer_id: int,
    block_ids: list[int],
    num_tokens: int,
) -> Float[Tensor, "q_heads head_dim"]:
    """Return the attention of one query over the first `num_tokens` tokens of a block table.

    The blocks are read one after another; no tensor holds the keys or values of two blocks.
    """
    size, q_heads = pool.block_size, len(q)
    maximum = torch.full((q_heads, 1), -torch.inf)
    total, mixed = torch.zeros(q_heads, 1), torch.zeros_like(q)
    for index in range(-(-num_tokens // size)):
        held = min(size, num_tokens - index * size)
        block = pool.gather(layer_id, torch.tensor(block_ids[index : index + 1]))
        keys, values = (
            each[:held].repeat_interleave(q_heads // each.shape[1], dim=1) for each in block
        )
        scores = torch.einsum("hd,khd->hk", q, keys) / q.shape[-1] ** 0.5
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights, kept = (scores - higher).exp(), (maximum - higher).exp()
        total = kept * total + weights.sum(-1, keepdim=True)
        mixed = kept * mixed + torch.einsum("hk,khd->hd", weights, values)
        maximum = higher
    return mixed / total
