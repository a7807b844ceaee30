"""Exercise column_sums of chapter 31 (core, 10 points, about 15 minutes).

Write a kernel that adds up each column: sums[c] = sum over r of x[r, c], in float32. Program p
has the columns p * BLOCK to p * BLOCK + BLOCK - 1. The numbers of a column lie a whole row
apart, so a load of a column fetches a sector of 32 bytes for every number. Load neighbours of a
row together instead. The check counts the sectors.

Check it:     minigen check exercises/31_triton/column_sums.py
With a hint:  minigen check exercises/31_triton/column_sums.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.lab.inspect_model import recorded_states
    from minigen_course.lab.triton_interpreter import launch

    import torch

    llm = load_model(weights="float32")
    state = recorded_states(llm, llm.tokenizer.encode("The old lighthouse"))[20].abs().contiguous()
    sums = torch.empty(state.shape[1])
    launch(mine, (5,), state, sums, *state.shape, BLOCK=128)
    print("the columns that hold most of the residual stream:", sums.topk(3).indices.tolist())

Harder: With 1,024 columns and a BLOCK of 128 there are 8 programs, on a GPU with 108 SMs. Let a
second axis of the grid part the rows, and let a second kernel add up the parts. How many bytes
more are moved?
"""

# exercise: minigen_course.ch31_triton.kernels.column_sums
import triton.language as tl


def column_sums(x_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr):
    """Store the sum of each column of x, added up in float32: one program for `BLOCK` columns.

    The grid is (programs,), as many as needed. Rows are contiguous. Each element of x is loaded
    once, together with its neighbours in the row, and each sum is stored once.
    """
    raise NotImplementedError  # your turn
