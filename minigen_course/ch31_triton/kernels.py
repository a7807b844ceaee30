"""First kernels, as plain functions that `triton.jit` turns into kernels, and a tuner of sizes.

They are chapter 31's exercises. On a GPU the engine runs the full versions in
`minigen.kernels.triton.elementwise`, which round between steps as torch does.
"""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from statistics import median
from types import SimpleNamespace
from typing import Any

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


def row_maximum(x_ptr, maxima_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the largest number of each row of x.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous. Each element of x is loaded once, and each maximum is stored once.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    places = row * num_columns + columns
    x = tl.load(x_ptr + places, mask=columns < num_columns, other=float("-inf"))
    tl.store(maxima_ptr + row, tl.max(x, axis=0))


def column_sums(x_ptr, sums_ptr, num_rows, num_columns, BLOCK: tl.constexpr):
    """Store the sum of each column of x, added up in float32: one program for `BLOCK` columns.

    The grid is (programs,), as many as needed. Rows are contiguous. Each element of x is loaded
    once, together with its neighbours in the row, and each sum is stored once.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(num_rows):
        total += tl.load(x_ptr + row * num_columns + columns, mask=inside)
    tl.store(sums_ptr + columns, total, mask=inside)


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


def softmax_rows(x_ptr, weights_ptr, num_columns, BLOCK: tl.constexpr):
    """Store the softmax of each row of x, computed in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. Rows are
    contiguous, and each has a finite number. Each element of x is loaded once, and each weight is
    stored once.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = tl.program_id(0) * num_columns + columns
    x = tl.load(x_ptr + places, mask=inside, other=float("-inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, axis=0))
    tl.store(weights_ptr + places, powers / tl.sum(powers, axis=0), mask=inside)


def rotate_pairs(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, rotated_ptr, num_heads, half, BLOCK: tl.constexpr
):
    """Rotate the pairs (i, i + half) of each head by the angles of its token's position.

    The grid is (tokens, heads), and `BLOCK` is at least `half`. x and the result are tokens x heads
    x 2 half, contiguous. Row p of cos and of sin has the `half` numbers of position p. Each element
    of x is loaded once, and each of the result is stored once.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    inside = pairs < half
    angles = tl.load(positions_ptr + token) * half + pairs
    cos = tl.load(cos_ptr + angles, mask=inside)
    sin = tl.load(sin_ptr + angles, mask=inside)
    places = (token * num_heads + head) * 2 * half + pairs
    first = tl.load(x_ptr + places, mask=inside).to(tl.float32)
    second = tl.load(x_ptr + places + half, mask=inside).to(tl.float32)
    tl.store(rotated_ptr + places, first * cos - second * sin, mask=inside)
    tl.store(rotated_ptr + places + half, second * cos + first * sin, mask=inside)


def add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr
):
    """Add x to the residual in place, and store the RMSNorm of the sum, both in float32.

    One program per row: the grid is (rows,), and `BLOCK` is at least `num_columns`. All rows are
    contiguous. A program loads each element of its row of x, of the residual and of the weight
    once, and stores each element of the sum and of its result once.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = row * num_columns + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    total = x + tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + places, total, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside).to(tl.float32)
    mean_square = tl.sum(total * total, axis=0) / num_columns
    tl.store(normalised_ptr + places, total * tl.rsqrt(mean_square + eps) * weight, mask=inside)


def pick_fastest(
    key: Hashable,
    sizes: Sequence[Any],
    seconds: Callable[[Any], float],
    found: dict[Hashable, Any],
    repeats: int = 5,
) -> Any:
    """Return the fastest size for problems of this key, and keep it in `found`.

    `seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit
    the chip. A size's first run does not count, because it compiles. A size that fits is run
    `repeats` times more, and its median counts. If `found` has the key, nothing is run. Raises
    `ValueError` if no size fits.
    """
    if key not in found:
        fitting = [size for size in sizes if seconds(size) < inf]
        if not fitting:
            raise ValueError(f"none of the sizes {list(sizes)} fits.")
        times = {size: median(seconds(size) for _ in range(repeats)) for size in fitting}
        found[key] = min(fitting, key=times.__getitem__)
    return found[key]
