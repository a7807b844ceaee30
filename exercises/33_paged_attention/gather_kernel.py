"""Exercise gather_kernel of chapter 33 (warm-up, 5 points, about 10 minutes).

Write a kernel that gathers a sequence's keys (or values) through its block table. Each program
has a tile of `BLOCK_N` positions: it finds their slots, loads their rows, and stores the rows
one after another. Load each element of the sequence once, and no other elements. Write a plain
function: the launch adds `@triton.jit`.

Check it:     minigen check exercises/33_paged_attention/gather_kernel.py
With a hint:  minigen check exercises/33_paged_attention/gather_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch33_paged_attention.kernels import gathering

    llm = load_model(weights="float32", num_blocks=2, attention_backend=gathering(mine))
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: If BLOCK_N equals BLOCK_SIZE, a program needs only one entry of the table, instead of
one per position. How many bytes does that save, and when are small blocks a bad idea?
"""

# exercise: minigen_course.ch33_paged_attention.kernels.gather_kernel
from minigen_course.lab.triton_interpreter import tl


def gather_kernel(
    half_ptr,
    table_ptr,
    gathered_ptr,
    length,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy the row of each of `BLOCK_N` positions from its slot: one program per tile of positions.

    `half_ptr` points to a layer's keys, or to its values. The row of a slot has `WIDTH` elements
    (`BLOCK_W` is the next power of two); the row of slot s in block b starts at `half_ptr` + b *
    `block_stride` + s * `slot_stride`. `table_ptr` lists the blocks of the sequence, whose first
    `length` slots are in use. The row of position p is stored to row p of `gathered_ptr`, which is
    contiguous. Each element of these rows is loaded once, and no other element is loaded.
    """
    raise NotImplementedError  # your turn
