"""Exercise row_maximum of chapter 31 (warm-up, 5 points, about 10 minutes).

Write a kernel that finds the largest number of each row: maxima[r] = max over c of x[r, c]. A
program has one row, which fits into its block. The lanes behind the end of the row hold nothing
of it: choose a value for them that cannot be the maximum, also if all numbers of the row are
negative.

Check it:     minigen check exercises/31_triton/row_maximum.py
With a hint:  minigen check exercises/31_triton/row_maximum.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.lab.inspect_model import next_logits
    from minigen_course.lab.triton_interpreter import launch

    import torch

    llm = load_model(weights="float32")
    logits = torch.stack([next_logits(llm, text) for text in ("The old lighthouse", "Two and two is")])
    best = torch.empty(2)
    launch(mine, (2,), logits, best, logits.shape[1], BLOCK=65536)
    print("the highest logits:", best.tolist(), "torch's own:", logits.amax(1).tolist())

Harder: Also store the column of the maximum (tl.argmax): that is greedy sampling. A row of
logits can have 150,000 columns. Why should it not be one block, and how would several programs
share it?
"""

# exercise: minigen_course.ch31_triton.kernels.row_maximum
import triton.language as tl


def row_maximum(x_ptr, maxima_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the largest number of each row of x.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous. Each element of x is loaded once, and each maximum is stored once.
    """
    raise NotImplementedError  # your turn
