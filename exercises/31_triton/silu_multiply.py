"""Exercise silu_multiply of chapter 31 (core, 10 points, about 10 minutes).

Write the activation of SwiGLU as one kernel: SiLU(gate) x up, element by element, where SiLU(z)
= z x sigmoid(z). Gate and up are the two halves of each row of one matrix product, so their
rows start `row_stride` elements apart. The rows of the result are contiguous: they start
`num_columns` elements apart. Compute in float32.

Check it:     minigen check exercises/31_triton/silu_multiply.py
With a hint:  minigen check exercises/31_triton/silu_multiply.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.lab.triton_interpreter import interpreted
    from minigen_course.ch31_triton.lesson import swiglu_by

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with interpreted(), using(13, swiglu=swiglu_by(mine)):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: row * row_stride is a 32-bit integer. With an ffn of 14,336, from how many tokens on
does it overflow, and what does the package's kernel do about it?
"""

# exercise: minigen_course.ch31_triton.kernels.silu_multiply
import triton.language as tl


def silu_multiply(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Store mixed = SiLU(gate) x up, in float32: one program for `BLOCK` columns of a row.

    The grid is (rows, programs per row). In gate and in up, rows start `row_stride` elements apart;
    in mixed, `num_columns`. Each element of gate and up is loaded once, and each element of mixed
    is stored once.
    """
    raise NotImplementedError  # your turn
