"""Exercise flash_kernel of chapter 32 (stretch, 15 points, about 40 minutes).

Write causal attention with grouped heads as a kernel, for any number of tokens. A program
computes `BLOCK_M` queries of one head, and stores nothing but their result. Write a plain
function: the launch adds `@triton.jit`.

Check it:     minigen check exercises/32_flash_attention/flash_kernel.py
With a hint:  minigen check exercises/32_flash_attention/flash_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.grading.plug_in import attend_by
    from minigen_course.ch32_flash_attention.lesson import flash_by

    llm = load_model(weights="float32", attention_backend=attend_by(flash_by(mine)))
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: Only the tiles on the diagonal need the causal mask. Split the loop into two, the first
without the mask, and count the comparisons that are left.
"""

# exercise: minigen_course.ch32_flash_attention.kernels.flash_kernel
import triton.language as tl


def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_new,
    context,
    scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, h): causal attention of `BLOCK_M` queries of head h, from row i * `BLOCK_M` on.

    q and mixed (the result) are [num_new, Q_HEADS, HEAD_DIM], k and v [context, KV_HEADS,
    HEAD_DIM]. All are contiguous and have one dtype of 16 or 32 bits; the maximum, the sum and the
    weighted values are float32. The queries are the last `num_new` of the `context` positions.
    Query head h uses KV head h // (Q_HEADS // KV_HEADS). Scores are multiplied by `scale`. A
    program loads its queries once, and `BLOCK_N` keys and values at a time, none after the position
    of its last query. HEAD_DIM and both block sizes are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn
