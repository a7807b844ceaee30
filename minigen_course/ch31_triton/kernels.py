"""Three first kernels, as plain functions: `triton.jit` makes kernels of them.

They are chapter 31's exercises. The engine on a GPU runs their grown-up forms: `norm`,
`activation`, which round between steps as torch does.
"""

from types import SimpleNamespace

try:
    import triton.language as tl
except ImportError:  # not for this system: the functions can be read, and not run
    tl = SimpleNamespace(constexpr=int)


def add_scaled(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """sum = x + factor y: one program for `BLOCK` of their `num` numbers.

    The grid is (programs,), as many as it takes. Each number is loaded once and stored once.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num
    x = tl.load(x_ptr + places, mask=inside)
    y = tl.load(y_ptr + places, mask=inside)
    tl.store(sum_ptr + places, x + factor * y, mask=inside)


def silu_multiply(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """mixed = SiLU(gate) x up, computed in float32: one program for `BLOCK` columns of a row.

    The grid is (rows, programs a row). In gate and in up, a row begins `row_stride` numbers after
    the one before; in mixed, `num_columns`. Each number is loaded once and stored once.
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
    """Each row of x over its root mean square, times weight: one program a row, in float32.

    The grid is (rows,); `BLOCK` is at least `num_columns`. Rows follow one another, in x and in the
    result. `eps` is added to the mean square. A program loads each number of its row and of the
    weight once, and stores each result once.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(x_ptr + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / num_columns
    normalised = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(normalised_ptr + row * num_columns + columns, normalised, mask=inside)
