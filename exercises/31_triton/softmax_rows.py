"""Exercise softmax_rows of chapter 31 (core, 10 points, about 15 minutes).

Write the softmax of each row as one kernel: weights[r, c] = exp(x[r, c] - m) / l, where m is
the maximum of row r, and l is the sum of exp(x[r, c] - m) over the row. Each program has one
row, and loads it once. Compute in float32. Scores may be minus infinity, because a causal mask
sets them so.

Check it:     minigen check exercises/31_triton/softmax_rows.py
With a hint:  minigen check exercises/31_triton/softmax_rows.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.lab.triton_interpreter import interpreted
    from minigen_course.ch31_triton.lesson import attention_by

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with interpreted(), using(14, attention=attention_by(mine)):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=1)).text)

Harder: Write it for rows that are longer than any block: one loop finds m, a second l, and a
third stores the weights. How often is x loaded? Chapter 32 finds m and l in one loop.
"""

# exercise: minigen_course.ch31_triton.kernels.softmax_rows
import triton.language as tl


def softmax_rows(x_ptr, weights_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the softmax of each row of x, computed in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous, and each has a finite number. Each element of x is loaded once, and each weight is
    stored once.
    """
    raise NotImplementedError  # your turn
