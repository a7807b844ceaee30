"""Exercise rms_norm_rows of chapter 31 (core, 10 points, about 15 minutes).

Write RMSNorm as one kernel. Divide each row of x by the root of its mean square plus `eps`, and
multiply it by `weight`, column by column. Each program has one whole row, and loads it once.
Compute in float32.

Check it:     minigen check exercises/31_triton/rms_norm_rows.py
With a hint:  minigen check exercises/31_triton/rms_norm_rows.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.lab.triton_interpreter import interpreted
    from minigen_course.ch31_triton.lesson import rms_norm_by

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with interpreted(), using(13, rms_norm=rms_norm_by(mine)):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: Fuse the residual addition: load a second row, store the sum over it, and normalise the
sum. How many bytes does that save compared with a separate kernel for the addition? Compare
with minigen.kernels.triton.elementwise.
"""

# exercise: minigen_course.ch31_triton.kernels.rms_norm_rows
import triton.language as tl


def rms_norm_rows(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Divide each row of x by its root mean square and multiply it by weight, in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous in x and in the result. `eps` is added to the mean square. A program loads each
    element of its row and of the weight once, and stores each element of its result once.
    """
    raise NotImplementedError  # your turn
