"""Exercise copy_on_write of chapter 21 (warm-up, 5 points, about 10 minutes).

Write copy-on-write: what happens before a sequence writes into block `index` of its table. If
the sequence is the only owner, nothing changes; return None. If the block has other owners, a
new block replaces it in the table; return (source, target), so that the engine copies the
contents. If no block is free, raise `OutOfBlocksError` and change nothing.

Check it:     minigen check exercises/21_blocks/copy_on_write.py
With a hint:  minigen check exercises/21_blocks/copy_on_write.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams

    llm = LLM.load(num_blocks=64)
    with using(21, copy_on_write=mine):
        params = SamplingParams(n=3, seed=1, max_tokens=12)
        answer = llm.generate("The sea is", params, progress=False)
    for choice in answer.choices:
        print(choice.text)

Harder: A sequence whose last block is full is forked. How many copies are made, and when? The
chapter's notebook compares your prediction with the engine's count.
"""

# exercise: minigen.kv_cache.block_allocator.copy_on_write
from minigen.protocols import BlockAllocator as Allocator


def copy_on_write(allocator: Allocator, table: list[int], index: int) -> tuple[int, int] | None:
    """Make the block at `index` of a sequence's block table writable: owned by that sequence only.

    If the block has other owners, a new block takes its place in the table, and the old block loses
    one owner. Returns the pair (source, target), so that the caller can copy the contents; None if
    the sequence was the only owner. Raises `OutOfBlocksError`, and changes nothing, if no block is
    free.
    """
    raise NotImplementedError  # your turn
