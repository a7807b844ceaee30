"""Exercise tiled_kernel of chapter 33 (core, 10 points, about 30 minutes).

Write the grouped kernel for many sequences at once, in place. Each program has one KV head of
one sequence. It walks over the context in tiles of `BLOCK_N` tokens: it looks the blocks of the
tile up in the block table, loads keys and values where they are, and keeps maximum, total and
mixed as chapter 32 does. At the end it divides and stores. No key or value is loaded twice.

Check it:     minigen check exercises/33_paged_attention/tiled_kernel.py
With a hint:  minigen check exercises/33_paged_attention/tiled_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch33_paged_attention.rungs import tiling

    llm = load_model(weights="float32", num_blocks=2, attention_backend=tiling(mine))
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: A tile may be smaller or larger than a block. What changes in the number of loads if
BLOCK_N equals BLOCK_SIZE, and if BLOCK_SIZE is 1? Which of the two suits a GPU better, whose
memory answers with 32 neighbouring bytes at a time?
"""

# exercise: minigen_course.ch33_paged_attention.kernels.tiled_kernel
from minigen_course.lab.triton_interpreter import tl


def tiled_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    mixed_ptr,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend in place, tile by tile: one program per KV head and sequence (`program_id` 0 and 1).

    The tokens of sequence i are in the first `lengths_ptr`[i] slots of the blocks that row i of
    `tables_ptr` lists; rows are `table_stride` entries apart. The key and the value (`HEAD_DIM`
    elements) of block b, slot s, KV head h start at b * `block_stride` + s * `slot_stride` + h *
    `head_stride`. `q_ptr` and `mixed_ptr` are [sequences, q_heads, `HEAD_DIM`]. Query head h uses
    KV head h // `GROUP`. A program loads tiles of `BLOCK_N` tokens, one after another. `scale`
    includes log2(e), so weights are powers of two. `BLOCK_G` and `BLOCK_D` are powers of two, at
    least 16, that hold `GROUP` and `HEAD_DIM`. Each key and value is loaded once.
    """
    raise NotImplementedError  # your turn
