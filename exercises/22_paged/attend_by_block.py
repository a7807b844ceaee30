"""Exercise attend_by_block of chapter 22 (stretch, 15 points, about 20 minutes).

Write the attention of one query over the first `num_tokens` tokens of a sequence, block by
block: call `pool.gather(layer_id, ...)` with one block at a time, and only with blocks that
hold some of these tokens. Query head h uses KV head h // (q_heads / kv_heads), and scores are
divided by the root of head_dim, as in chapter 14. The result must be right for large scores
too: softmax subtracts the largest score, which you do not know before the last block.

Check it:     minigen check exercises/22_paged/attend_by_block.py
With a hint:  minigen check exercises/22_paged/attend_by_block.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen.kv_cache.paged import KVPool

    pool = KVPool(1, 8, 3, 16, 64, torch.float32)
    print(mine(torch.randn(9, 64), pool, 0, [7, 3], 20).abs().max(), "should be 0: the pool is empty")

Harder: The blocks may be visited in any order, so two workers can share them, as chapter 33
does. Write a function that merges what two halves of the table found, from the three values
that each carries: the largest score, the sum of the exponentials, and the sum of the values
under them.
"""

# exercise: minigen_course.ch22_paged.lesson.attend_by_block
from jaxtyping import Float
from torch import Tensor

from minigen.kv_cache.paged import KVPool as Pool


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
    raise NotImplementedError  # your turn
