"""Exercise rotate_pairs of chapter 31 (core, 10 points, about 15 minutes).

Write the rotary embedding as one kernel. Dimension i of a head and dimension i + half form a
pair (a, b), which becomes (a cos - b sin, b cos + a sin). The angle of pair i depends on the
position of the token, and a program loads this position: row p of the tables cos and sin has
the `half` numbers of position p. Compute in float32. Program (t, h) has head h of token t.

Check it:     minigen check exercises/31_triton/rotate_pairs.py
With a hint:  minigen check exercises/31_triton/rotate_pairs.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.lab.triton_interpreter import interpreted
    from minigen_course.ch31_triton.lesson import apply_rotary_by

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with interpreted(), using(13, apply_rotary=apply_rotary_by(mine)):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=1)).text)

Harder: Each head loads the cosines and sines of its token again. Let a program have all heads
of a token: a block of heads by pairs, made with [:, None] and [None, :]. How many bytes does
that save?
"""

# exercise: minigen_course.ch31_triton.kernels.rotate_pairs
import triton.language as tl


def rotate_pairs(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, rotated_ptr, num_heads, half, BLOCK: tl.constexpr
):
    """Rotate the pairs (i, i + half) of each head by the angles of its token's position.

    The grid is (tokens, heads), and `BLOCK` is at least `half`. x and the result are tokens x heads
    x 2 half, contiguous. Row p of cos and of sin has the `half` numbers of position p. Each element
    of x is loaded once, and each of the result is stored once.
    """
    raise NotImplementedError  # your turn
