"""Exercise add_scaled of chapter 31 (warm-up, 5 points, about 10 minutes).

Write your first kernel. It computes the first `num` elements of `x + factor * y`, in blocks of
`BLOCK`. Each program loads its block of x and its block of y, and stores its block of the sum.
The last block may reach past the end: mask the elements from `num` on, because they belong to
other data.

Check it:     minigen check exercises/31_triton/add_scaled.py
With a hint:  minigen check exercises/31_triton/add_scaled.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.lab.triton_interpreter import launch
    from minigen_course.lab.inspect_model import recorded_states

    import torch

    states = recorded_states(load_model(weights="float32"), [1, 2, 3])[:, -1]  # of one token
    before, added = states[-2], states[-1] - states[-2]  # the last layer's input, what it adds
    after = torch.empty_like(before)
    launch(mine, (3,), before, added, after, len(before), 1.0, BLOCK=256)
    print("equal to the model's own sum:", torch.allclose(after, states[-1]))

Harder: Let each program add two blocks: block i, and block i + the number of programs. What
changes in the bytes moved, and in the number of programs?
"""

# exercise: minigen_course.ch31_triton.kernels.add_scaled
import triton.language as tl


def add_scaled(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Store sum = x + factor y: one program for `BLOCK` of the `num` elements.

    The grid is (programs,), as many as needed. Each element of x and y is loaded once, and each
    element of the sum is stored once.
    """
    raise NotImplementedError  # your turn
