"""Exercise KVPool of chapter 22 (core, 10 points, about 20 minutes).

Write the KV pool. `store` writes each token's key and value into its slot. `gather` returns the
keys and values of the blocks in a block table, in the order of the table, as if they were
contiguous. The table is one row, or a row per sequence (as `decode` in
`minigen.kv_cache.paged.attend_paged` passes it), and so are the results. `copy_blocks` copies
whole blocks, in all layers. The pool also has block 0, for padding.

Check it:     minigen check exercises/22_paged/kv_pool.py
With a hint:  minigen check exercises/22_paged/kv_pool.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams

    with using(22, KVPool=mine):  # the runner that works layer by layer stores keys and values in it
        llm = LLM.load(weights="float32", num_blocks=64)
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

Harder: Attention over a gathered copy reads every key, writes it and reads it again. The
exercise `attend_by_block` goes through the table block by block, without a copy of the whole.
"""

# exercise: minigen.kv_cache.paged.KVPool
from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class KVPool:
    """The memory of all blocks, including block 0."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        slots: Int64[Tensor, " tokens"],
    ) -> None:
        """Write each token's key and value of one layer to its slot."""
        raise NotImplementedError  # your turn

    def gather(
        self, layer_id: int, block_table: Int64[Tensor, "*rows blocks"]
    ) -> tuple[
        Float[Tensor, "*rows slots kv_heads head_dim"],
        Float[Tensor, "*rows slots kv_heads head_dim"],
    ]:
        """Return copies of the keys and values in these blocks, contiguous and in table order."""
        raise NotImplementedError  # your turn

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""
        raise NotImplementedError  # your turn
