"""Exercise decode_kernel of chapter 33 (stretch, 15 points, about 35 minutes).

Write the tiled kernel once more, with the context split. Each program has one KV head of one
sequence, and one split of its context. For each query head of the group it stores its maximum,
its sum of weights and its weighted sum of values, undivided, which `join_kernel` joins. No key
or value is loaded twice.

Check it:     minigen check exercises/33_paged_attention/decode_kernel.py
With a hint:  minigen check exercises/33_paged_attention/decode_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch33_paged_attention.kernels import decoding

    llm = load_model(weights="float32", num_blocks=2, attention_backend=decoding(mine))
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: A layer with a sliding window attends to the last `window` tokens only. Take `window` as
an argument: where do the splits start then, and which tiles must not be loaded at all?
"""

# exercise: minigen_course.ch33_paged_attention.kernels.decode_kernel
from minigen_course.lab.triton_interpreter import tl


def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head, sequence and split of its context (`tl.program_id` 0, 1 and 2).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` is [sequences, q_heads, `HEAD_DIM`]. Query head h uses KV head h //
    `GROUP`; the `GROUP` query heads of a KV head share its loads.

    A score is the dot product of query and key times `scale`. `scale` includes log2(e), so weights
    are powers of two. The `SPLITS` programs divide the context's tiles of `BLOCK_N` tokens; each
    tile is loaded by one of them. They store what `join_kernel` joins: `parts_ptr` [sequences,
    q_heads, `SPLITS`, `HEAD_DIM`], `maxima_ptr` and `sums_ptr` [sequences, q_heads, `SPLITS`]; -inf
    and zeros if a program has no tokens. `BLOCK_G` and `BLOCK_D` are powers of two, at least 16,
    that hold `GROUP` and `HEAD_DIM`.
    """
    raise NotImplementedError  # your turn
