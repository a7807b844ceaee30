"""Exercise add_rms_norm of chapter 31 (stretch, 15 points, about 20 minutes).

Fuse the residual sum and RMSNorm: the kernel of the chapter's first number. Add each row of x
to the row of the residual stream, store the sum in its place, and store the RMSNorm of the sum
as the result. Each program has one row. It loads x and the residual once, and does not load the
sum that it has stored. Compute in float32.

Check it:     minigen check exercises/31_triton/add_rms_norm.py
With a hint:  minigen check exercises/31_triton/add_rms_norm.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen.kernels.triton.elementwise import rms_norm_torch
    from minigen_course.lab.memory_watch import record_operators
    from minigen_course.lab.programs import record_programs
    from minigen_course.lab.triton_interpreter import bytes_moved, launch

    import torch

    x, residual, weight = torch.randn(8, 576), torch.randn(8, 576), torch.ones(576)
    result, total = torch.empty_like(x), residual.clone()
    seen = record_programs(
        lambda: launch(mine, (8,), x, total, weight, result, 576, 1e-5, BLOCK=1024),
        x=x, total=total, weight=weight, result=result,
    )
    steps = record_operators(lambda: rms_norm_torch(x, weight, 1e-5, residual))
    torch.testing.assert_close(result, rms_norm_torch(x, weight, 1e-5, residual - x))
    print(f"bytes: operators {sum(step.num_bytes for step in steps):,}, yours {bytes_moved(seen):,}")

Harder: The engine's kernel rounds the sum to the residual's type before it normalises, and
yours need not. Which tokens could differ because of that, and why does the engine insist on it?
"""

# exercise: minigen_course.ch31_triton.kernels.add_rms_norm
import triton.language as tl


def add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr
):
    """Add x to the residual in place, and store the RMSNorm of the sum, both in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. All rows are
    contiguous. A program loads each element of its row of x, of the residual and of the weight
    once, and stores each element of the sum and of its result once.
    """
    raise NotImplementedError  # your turn
