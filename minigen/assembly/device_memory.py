"""How much of a device's free memory its KV cache gets, after the weights and the largest step."""

from math import prod
from typing import TYPE_CHECKING

import torch

from minigen.config import EngineConfig

if TYPE_CHECKING:  # reading checkpoints needs packages that a GPU's kernels do not need
    from minigen.checkpoint.checkpoint import Checkpoint


def left_for_cache(
    free: int,
    checkpoint: "Checkpoint",
    options: EngineConfig,
    dtype: torch.dtype,
    share: float,
) -> int:
    """Return this `share` of the bytes, of `free` ones, that weights and the largest step leave.

    Each rank holds about as much as rank 0, and all of them hold logits of the whole vocabulary.
    """
    config, num_parameters = checkpoint.config, checkpoint.num_parameters
    vocab_size, ranks = config.vocab_size, options.tensor_parallel_size
    if ranks > 1:
        from minigen.parallel.sharding import local_config, shard_tensors

        shares = shard_tensors(checkpoint.tensors, config, 0, ranks)
        num_parameters = sum(prod(each.shape) for each in shares.values())
        config = local_config(config, 0, ranks)
    widest = 3 * config.ffn + 4 * config.hidden + 4 * config.q_heads * config.head_dim
    step = options.max_num_batched_tokens * widest * dtype.itemsize
    logits = 3 * options.max_num_seqs * vocab_size * 4
    tables = config.max_positions * config.head_dim * 4
    weights = num_parameters * dtype.itemsize
    return max(int((free - weights - step - logits - tables) * share), 0)
