"""Answers to the exercises of chapter 31: other right ones, and changed copies of the solution."""

import inspect
from collections.abc import Callable
from typing import Any

from minigen_course.ch31_triton import kernels
from minigen_course.ch31_triton.gpu_kernels import tl
from minigen_course.ch31_triton.kernels import add_scaled, rms_norm_rows, silu_multiply
from tests.answers import Answers


def changed(part: Callable[..., Any], *changes: tuple[str, str]) -> Any:
    """Return a kernel with its source text changed."""
    source = inspect.getsource(part)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    names = dict(vars(kernels))
    exec(source, names)
    return names[part.__name__]


def add_by_pointers(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Right, with block pointers, and a mask from the number of elements left."""
    start = tl.program_id(axis=0) * BLOCK
    left = num - start
    lanes = tl.arange(0, BLOCK)
    x_ptrs, y_ptrs, sum_ptrs = x_ptr + start + lanes, y_ptr + start + lanes, sum_ptr + start + lanes
    total = tl.load(x_ptrs, mask=lanes < left, other=0.0)
    total += tl.load(y_ptrs, mask=lanes < left, other=0.0) * factor
    tl.store(sum_ptrs, total, mask=lanes < left)


def add_by_halves(x_ptr, y_ptr, sum_ptr, num, factor, BLOCK: tl.constexpr):
    """Right, each block in two halves."""
    for half in range(2):
        places = (tl.program_id(0) * 2 + half) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        y = tl.load(y_ptr + places, places < num)
        x = tl.load(x_ptr + places, places < num)
        tl.store(sum_ptr + places, tl.fma(y, factor, x), places < num)


WRONG_ADD = {
    "no mask": [(", mask=inside", "")],
    "a store without a mask": [("factor * y, mask=inside", "factor * y")],
    "a load without a mask": [("y_ptr + places, mask=inside", "y_ptr + places")],
    "one too many": [("places < num", "places <= num")],
    "one too few": [("places < num", "places < num - 1")],
    "every program the first block": [("tl.program_id(0) * BLOCK + ", "")],
    "blocks one apart": [("tl.program_id(0) * BLOCK", "tl.program_id(0)")],
    "the other axis": [("program_id(0)", "program_id(1)")],
    "the factor for x": [("x + factor * y", "factor * x + y")],
    "no factor": [("factor * y", "y")],
    "into x": [("sum_ptr + places", "x_ptr + places")],
    "places stored": [("x + factor * y", "places")],
    "y twice": [("x_ptr + places", "y_ptr + places")],
    "x again in the store": [
        ("x + factor * y", "tl.load(x_ptr + places, mask=inside) + factor * y")
    ],
}


def silu_by_exponential(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Right, the sigmoid written out."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < num_columns
    gate_row = gate_ptr + tl.program_id(0) * row_stride
    up_row = up_ptr + tl.program_id(0) * row_stride
    gate = tl.load(gate_row + columns, mask=there, other=0).to(tl.float32)
    opened = gate / (1 + tl.exp(-gate))
    up = tl.load(up_row + columns, mask=there, other=0)
    tl.store(mixed_ptr + tl.program_id(0) * num_columns + columns, opened * up, mask=there)


def silu_up_first(gate_ptr, up_ptr, mixed_ptr, num_columns, row_stride, BLOCK: tl.constexpr):
    """Right, in another order, with the row offset in the pointers."""
    row, block = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < num_columns - block * BLOCK
    at = row * row_stride + block * BLOCK + lanes
    up = tl.load(up_ptr + at, mask).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask).to(tl.float32)
    result = up * gate * tl.sigmoid(gate)
    to = mixed_ptr + row * num_columns + block * BLOCK + lanes
    tl.store(to, result.to(mixed_ptr.dtype.element_ty), mask)


WRONG_SILU = {
    "rows close together": [("row * row_stride", "row * num_columns")],
    "the result's rows far apart": [("row * num_columns + columns", "places")],
    "one row for all": [("row = tl.program_id(0)", "row = 0")],
    "axes swapped": [
        ("row = tl.program_id(0)", "row = tl.program_id(1)"),
        ("columns = tl.program_id(1)", "columns = tl.program_id(0)"),
    ],
    "one block for all": [("tl.program_id(1) * BLOCK + ", "")],
    "no mask": [(", mask=inside", "")],
    "a mask of all numbers": [("columns < num_columns", "places < row_stride * 1000")],
    "sigmoid alone": [("gate * tl.sigmoid(gate)", "tl.sigmoid(gate)")],
    "gate and up swapped": [("gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate")],
    "exp over exp": [("tl.sigmoid(gate)", "tl.exp(gate) / (1 + tl.exp(gate))")],
    "in its own type": [(".to(tl.float32)", "")],
    "of the product": [("gate * tl.sigmoid(gate) * up", "gate * up * tl.sigmoid(gate * up)")],
    "up at gate's place": [("up_ptr + places", "gate_ptr + places")],
    "over the gates": [("mixed_ptr + row * num_columns + columns", "gate_ptr + places")],
}


def rms_norm_by_root(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Right, by the root itself, the weight first."""
    lanes = tl.arange(0, BLOCK)
    there = lanes < num_columns
    start = tl.program_id(0) * num_columns
    weight = tl.load(weight_ptr + lanes, mask=there, other=1)
    x = tl.load(x_ptr + start + lanes, mask=there, other=0).to(tl.float32)
    size = tl.sqrt(tl.sum(x * x) / num_columns + eps)
    tl.store(normalised_ptr + start + lanes, weight * (x / size), mask=there)


def rms_norm_by_where(x_ptr, weight_ptr, normalised_ptr, num_columns, eps, BLOCK: tl.constexpr):
    """Right, with masked lanes set to 0 after the load."""
    lanes = tl.arange(0, BLOCK)
    there = lanes < num_columns
    at = tl.program_id(0) * num_columns + lanes
    x = tl.where(there, tl.load(x_ptr + at, mask=there), 0.0).to(tl.float32)
    squares = x * x
    factor = 1 / tl.sqrt(squares.sum(axis=0) / num_columns + eps)
    tl.store(normalised_ptr + at, x * factor * tl.load(weight_ptr + lanes, mask=there), mask=there)


WRONG_NORM = {
    "no value for masked lanes": [(", other=0.0", "")],
    "masked lanes hold 1": [("other=0.0", "other=1.0")],
    "mean over the block": [("/ num_columns", "/ BLOCK")],
    "no mean": [("/ num_columns", "")],
    "no mask": [("mask=inside, other=0.0", ""), (", mask=inside", "")],
    "a store without a mask": [("normalised, mask=inside", "normalised")],
    "one row for all": [("row = tl.program_id(0)", "row = 0")],
    "rows a block apart": [("row * num_columns", "row * BLOCK")],
    "no weight": [("(mean_square + eps) * weight", "(mean_square + eps)")],
    "weights by rows": [("weight_ptr + columns", "weight_ptr + row + columns * 0")],
    "no eps": [(" + eps", "")],
    "eps outside": [("tl.rsqrt(mean_square + eps)", "(1 / (tl.sqrt(mean_square) + eps))")],
    "no root": [("x * tl.rsqrt(mean_square + eps)", "x / (mean_square + eps)")],
    "largest instead of mean": [("tl.sum(x * x, axis=0) / num_columns", "tl.max(x * x, axis=0)")],
    "in its own type": [(".to(tl.float32)", "")],
    "layer norm": [
        ("mean_square = ", "x = x - tl.sum(x, axis=0) / num_columns\n    mean_square = ")
    ],
    "loads x twice": [
        (
            "normalised = x *",
            "x = tl.load(x_ptr + row * num_columns + columns, mask=inside)\n    normalised = x *",
        )
    ],
}


def answers(
    part: Callable[..., Any], right: tuple[Any, ...], wrong: dict[str, list[tuple[str, str]]]
) -> Answers:
    return Answers(right, {name: changed(part, *each) for name, each in wrong.items()}, {})


ANSWERS = {
    "add_scaled": answers(add_scaled, (add_by_pointers, add_by_halves), WRONG_ADD),
    "silu_multiply": answers(silu_multiply, (silu_by_exponential, silu_up_first), WRONG_SILU),
    "rms_norm_rows": answers(rms_norm_rows, (rms_norm_by_root, rms_norm_by_where), WRONG_NORM),
}
