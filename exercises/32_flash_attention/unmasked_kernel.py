"""Exercise unmasked_kernel of chapter 32 (core, 10 points, about 30 minutes).

Write the loop over tiles of keys as a kernel, for one head, without a mask and without a rest:
the rows are a multiple of the tile. A program computes `BLOCK` queries. It keeps their maximum,
total and mixed values from tile to tile, and stores nothing but the result. Write a plain
function: the launch adds `@triton.jit`.

Check it:     minigen check exercises/32_flash_attention/unmasked_kernel.py
With a hint:  minigen check exercises/32_flash_attention/unmasked_kernel.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen_course.ch32_flash_attention.lesson import start_unmasked

    q, k, v = torch.randn(3, 64, 16)
    result = torch.empty_like(q)
    start_unmasked(mine, q, k, v, result)
    print((result - (q @ k.T / 4).softmax(-1) @ v).abs().max())

Harder: Write a second version that computes all scores twice and keeps no weighted values in
the first pass: one loop for the maximum and the total, one for the values. How many bytes of
keys does it load, and which instructions does it save?
"""

# exercise: minigen_course.ch32_flash_attention.kernels.unmasked_kernel
import triton.language as tl


def unmasked_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mixed_ptr,
    num_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: attention of rows i * `BLOCK` to (i + 1) * `BLOCK` of q over all keys; one head.

    q, k, v and mixed (the result) are [num_rows, HEAD_DIM], contiguous and float32. num_rows is a
    multiple of `BLOCK`, and every query sees every key. Scores are multiplied by `scale`. A program
    loads its queries once, and `BLOCK` keys and values at a time, each of them once. HEAD_DIM and
    `BLOCK` are powers of two, at least 16.
    """
    raise NotImplementedError  # your turn
