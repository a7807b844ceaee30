"""Exercise grouped_kernel of chapter 33 (core, 10 points, about 20 minutes).

Write attention for one query position over a contiguous context. Each program has one KV head,
with the whole group of query heads that share it. It loads each key and each value once,
computes the scores and the mix of all its heads by `tl.dot`, and stores their results. The
context fits into one tile.

Check it:     minigen check exercises/33_paged_attention/grouped_kernel.py
With a hint:  minigen check exercises/33_paged_attention/grouped_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch33_paged_attention.rungs import grouping

    llm = load_model(weights="float32", num_blocks=2, attention_backend=grouping(mine))
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: For one KV head of head_dim 128 and a group of 4, count the multiplications that the
padding to 16 rows adds. At which size of group does nothing of them remain, and why are they
free on a GPU even before?
"""

# exercise: minigen_course.ch33_paged_attention.kernels.grouped_kernel
from minigen_course.lab.triton_interpreter import tl


def grouped_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend with a whole group of query heads: one program per KV head (`tl.program_id(0)`).

    `q_ptr` and `mixed_ptr` are [q_heads, `HEAD_DIM`]; `keys_ptr` and `values_ptr` are [`length`,
    `KV_HEADS`, `HEAD_DIM`]; all are contiguous. Query head h uses KV head h // `GROUP`. A score is
    the dot product of query and key times `scale`. `scale` includes log2(e), so weights are powers
    of two. `BLOCK_G`, `BLOCK_D` and `BLOCK_N` are powers of two, at least 16, that hold `GROUP`,
    `HEAD_DIM` and `length`: the whole context is one tile. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn
