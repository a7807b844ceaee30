"""Exercise sequences_that_fit of chapter 21 (warm-up, 5 points, about 5 minutes).

Write the capacity of a memory: how many sequences of `num_tokens` tokens each fit beside the
weights. The memory that the weights leave is cut into whole blocks of `block_size` tokens, and
a sequence takes whole blocks. If the weights do not fit, no sequence does: return 0.

Check it:     minigen check exercises/21_blocks/sequences_that_fit.py
With a hint:  minigen check exercises/21_blocks/sequences_that_fit.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    print(mine(80 * 10**9, 16 * 10**9, 131_072, 2048, 16), "sequences of 2,048 tokens")

Harder: All sequences begin with the same prompt of P tokens, and they keep one copy of its full
blocks, as the chapter's section on several owners shows. How many fit now?
"""

# exercise: minigen_course.ch21_blocks.lesson.sequences_that_fit
def sequences_that_fit(
    memory_bytes: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_tokens: int,
    block_size: int,
) -> int:
    """Return how many sequences of `num_tokens` tokens fit into a memory beside the weights.

    What the weights leave is cut into whole blocks of `block_size` tokens, and each sequence takes
    whole blocks. If the weights do not fit, no sequence does.

    >>> sequences_that_fit(1000, 200, kv_bytes_per_token=2, num_tokens=17, block_size=16)
    12
    """
    raise NotImplementedError  # your turn
