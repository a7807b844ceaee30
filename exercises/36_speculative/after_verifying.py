"""Exercise after_verifying of chapter 36 (core, 10 points, about 15 minutes).

Roll a block table back. Before a step, a sequence had `num_known` tokens, and keys and values
of all but the last one. The step computed those of the last one and of `num_drafts` drafts,
into the slots of the sequence's `num_blocks` blocks of `block_size` tokens. `num_right` drafts
were right, and one token more was sampled after them. Return three numbers: how many tokens
have valid keys and values now, how many blocks are full of them (only these may be published to
the prefix cache), and how many blocks must be allocated for the next step, if it verifies
`num_drafts` drafts again. Wrong drafts are not erased, because the next step writes over them.
So the sequence keeps all its blocks.

Check it:     minigen check exercises/36_speculative/after_verifying.py
With a hint:  minigen check exercises/36_speculative/after_verifying.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    known, blocks = 14, 5  # 4 drafts need slots for 18 tokens
    for right in (3, 0, 4, 1):
        computed, published, missing = mine(known, 4, right, blocks, 4)
        print(f"{right} of 4 right: {computed} valid, {published} blocks published, {missing} missing")
        known, blocks = computed + 1, blocks + missing

Harder: When memory is short, blocks that hold no valid token could be given back at once. How
many are these? Find a case in which giving them back costs an allocation in the next step, and
one in which it does not, because then fewer drafts are asked for.
"""

# exercise: minigen_course.ch36_speculative.reference.after_verifying
from minigen.kv_cache.block_allocator import blocks_needed


def after_verifying(
    num_known: int, num_drafts: int, num_right: int, num_blocks: int, block_size: int
) -> tuple[int, int, int]:
    """Return what a sequence has after a step that verified drafts.

    Before the step it had `num_known` tokens, and keys and values of all but the last one. The step
    computed those of the last one and of `num_drafts` drafts, of which `num_right` are right, into
    the slots of its `num_blocks` blocks. The result: the number of tokens with valid keys and
    values, how many blocks are full of them (the prefix cache may have these), and how many blocks
    the next step lacks, if it verifies `num_drafts` drafts again.
    """
    raise NotImplementedError  # your turn
