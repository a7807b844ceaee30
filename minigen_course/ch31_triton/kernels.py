"""Three first kernels, as plain functions that `triton.jit` turns into kernels.

They are chapter 31's exercises. On a GPU the engine runs the full versions in
`minigen.kernels.triton.elementwise`, which round between steps as torch does.
"""

from types import SimpleNamespace

try:
    import triton.language as tl
except ImportError:  # Triton is not available here: the functions can be read, not run
    tl = SimpleNamespace(constexpr=int)


def add_scaled(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Store sum = x + factor y: one program for `BLOCK` of the `num` elements.

    The grid is (programs,), as many as needed. Each element of x and y is loaded once, and each
    element of the sum is stored once.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num
    x = tl.load(x_ptr + places, mask=inside)
    y = tl.load(y_ptr + places, mask=inside)
    tl.store(sum_ptr + places, x + factor * y, mask=inside)


def silu_multiply(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Store mixed = SiLU(gate) x up, in float32: one program for `BLOCK` columns of a row.

    The grid is (rows, programs per row). In gate and in up, rows start `row_stride` elements apart;
    in mixed, `num_columns`. Each element of gate and up is loaded once, and each element of mixed
    is stored once.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = row * row_stride + columns
    gate = tl.load(gate_ptr + places, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + places, mask=inside).to(tl.float32)
    mixed = gate * tl.sigmoid(gate) * up
    tl.store(mixed_ptr + row * num_columns + columns, mixed, mask=inside)


def rms_norm_rows(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Divide each row of x by its root mean square and multiply it by weight, in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous in x and in the result. `eps` is added to the mean square. A program loads each
    element of its row and of the weight once, and stores each element of its result once.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(x_ptr + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / num_columns
    normalised = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(normalised_ptr + row * num_columns + columns, normalised, mask=inside)
