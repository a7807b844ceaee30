"""Chapter 31's exercises: kernels run program by program, and every load and store is recorded."""

from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from minigen_course.grading.exercise import Wrong, expect, expect_close
from minigen_course.lab.triton_interpreter import Access, launch, watched

Kernel = Callable[..., None]
UNTOUCHED = 99.0  # in the output before the kernel runs


def _random(*shape: int, seed: int = 31) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _watched(
    part: Any, grid: tuple[int, ...], given: tuple[Any, ...], block: int, **tensors: Tensor
) -> list[Access]:
    """Run a kernel and return its loads and stores; raise `Wrong` for one outside the tensors."""
    return watched(lambda: launch(part, grid, *given, BLOCK=block), **tensors)


def _expect_nothing_else(
    accesses: Iterable[Access], tensor: str, is_store: bool, allowed: Iterable[int]
) -> None:
    """Raise `Wrong` if another element of a tensor than these is loaded, or stored."""
    verb, left = "stores" if is_store else "loads", set(allowed)
    for access in accesses:
        if access.tensor == tensor and access.is_store == is_store:
            for offset in access.offsets:
                if offset not in left:
                    raise Wrong(
                        f"program {access.program} {verb} element {offset} of {tensor}; it should "
                        "not touch it."
                    )


def _expect_each(
    accesses: Iterable[Access], tensor: str, is_store: bool, expected: Iterable[int], times: int = 1
) -> None:
    """Raise `Wrong` unless each of these elements is loaded, or stored, `times` times."""
    done, counts = "stored" if is_store else "loaded", Counter[int]()
    for access in accesses:
        if access.tensor == tensor and access.is_store == is_store:
            counts.update(access.offsets)
    for offset in expected:
        if counts[offset] != times:
            raise Wrong(
                f"element {offset} of {tensor} is {done} {_often(counts[offset])}; it should be "
                f"{done} {_often(times)}."
            )


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _summed(part: Kernel, num: int, block: int, behind: int = 0) -> None:
    """Check x + 2.5 y for the first `num` elements of tensors with `behind` more."""
    x, y = _random(num + behind), _random(num + behind, seed=32)
    total = torch.full_like(x, UNTOUCHED)
    given = (x, y, total, num, 2.5)
    accesses = _watched(part, (ceil(num / block),), given, block, x=x, y=y, sum=total)
    for name, is_store in (("x", False), ("y", False), ("sum", True)):
        _expect_nothing_else(accesses, name, is_store, range(num))
        _expect_nothing_else(accesses, name, not is_store, ())
    _expect_each(accesses, "sum", True, range(num))
    expect_close(total[:num], (x + 2.5 * y)[:num], "sum", ("element",))
    for name in ("x", "y"):
        _expect_each(accesses, name, False, range(num))


def one_program_adds_a_whole_block(part: Kernel) -> None:
    """eight elements, one program with a block of eight:"""
    _summed(part, 8, 8)


def each_program_adds_its_own_block(part: Kernel) -> None:
    """twelve elements, three programs with blocks of four:"""
    _summed(part, 12, 4)


def the_last_block_is_not_full(part: Kernel) -> None:
    """ten elements, three programs with blocks of four:"""
    _summed(part, 10, 4)


def elements_past_the_end_are_left_alone(part: Kernel) -> None:
    """the first seven of twelve elements, two programs with blocks of four:"""
    _summed(part, 7, 4, behind=5)


def a_block_may_be_larger_than_the_tensor(part: Kernel) -> None:
    """five elements, one program with a block of sixteen:"""
    _summed(part, 5, 16)


def _mixed(part: Kernel, gate_up: Tensor, block: int, tolerance: float = 1e-4) -> None:
    """Check SiLU(gate) x up of the two halves of each row."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    gate, up = gate_up.chunk(2, dim=-1)
    mixed = torch.full((rows, columns), UNTOUCHED, dtype=gate_up.dtype)
    given = (gate, up, mixed, columns, gate_up.stride(0))
    grid = (rows, ceil(columns / block))
    accesses = _watched(part, grid, given, block, gate_and_up=gate_up, mixed=mixed)
    _expect_nothing_else(accesses, "gate_and_up", True, ())
    _expect_nothing_else(accesses, "mixed", False, ())
    _expect_each(accesses, "mixed", True, range(mixed.numel()))
    right = gate.double().sigmoid() * gate.double() * up.double()
    expect_close(mixed, right, "mixed", ("row", "column"), tolerance)
    _expect_each(accesses, "gate_and_up", False, range(gate_up.numel()))


def one_row_is_mixed(part: Kernel) -> None:
    """one row of eight columns, one program with a block of eight:"""
    _mixed(part, _random(1, 16), 8)


def rows_start_a_stride_apart(part: Kernel) -> None:
    """three rows of eight columns, gate and up side by side, so their row stride is 16:"""
    _mixed(part, _random(3, 16), 8)


def programs_share_a_row(part: Kernel) -> None:
    """two rows of twelve columns, three programs per row with blocks of four:"""
    _mixed(part, _random(2, 24), 4)


def the_end_of_a_row_is_not_the_next(part: Kernel) -> None:
    """three rows of ten columns, three programs per row with blocks of four:"""
    _mixed(part, _random(3, 20), 4)


def gates_may_be_of_any_size(part: Kernel) -> None:
    """gates far above 0, where the sigmoid is 1, and far below, where it is 0:"""
    _mixed(part, torch.tensor([[20.0, 200.0, -200.0, -20.0, 3.0, -2.0, 5.0, 7.0]]), 4)


def sixteen_bits_are_mixed_in_float32(part: Kernel) -> None:
    """inputs in float16, as in the engine:"""
    _mixed(part, 3 * _random(2, 16).half(), 8, tolerance=2e-3)


def _normalised(
    part: Kernel, x: Tensor, weight: Tensor, eps: float, block: int, tolerance: float = 1e-4
) -> None:
    """Check that each row of x is divided by its root mean square and multiplied by weight."""
    rows, columns = x.shape
    made = torch.full_like(x, UNTOUCHED)
    given = (x, weight, made, columns, eps)
    accesses = _watched(part, (rows,), given, block, x=x, weight=weight, normalised=made)
    for name, is_store in (("x", True), ("weight", True), ("normalised", False)):
        _expect_nothing_else(accesses, name, is_store, ())
    _expect_each(accesses, "normalised", True, range(x.numel()))
    expect(
        not made.isnan().any(),
        "the result has nan. A masked lane holds an arbitrary value unless other= sets it; it "
        "must not count in a sum.",
    )
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    expect_close(made, right, "normalised", ("row", "column"), tolerance)
    _expect_each(accesses, "x", False, range(x.numel()))
    _expect_each(accesses, "weight", False, range(columns), times=rows)


def a_row_is_divided_by_its_root_mean_square(part: Kernel) -> None:
    """the row 1, 1, 7, 7, whose root mean square is 5, in a block of four:"""
    _normalised(part, torch.tensor([[1.0, 1.0, 7.0, 7.0]]), torch.ones(4), 0.0, 4)


def each_program_has_its_row(part: Kernel) -> None:
    """three rows of eight columns, of different sizes:"""
    sizes = torch.tensor([[1.0], [10.0], [0.1]])
    _normalised(part, sizes * _random(3, 8), torch.ones(8), 0.0, 8)


def each_column_has_its_weight(part: Kernel) -> None:
    """two rows of four columns, whose weights are 1, 2, 3 and -1:"""
    _normalised(part, _random(2, 4), torch.tensor([1.0, 2.0, 3.0, -1.0]), 0.0, 4)


def a_row_may_be_shorter_than_its_block(part: Kernel) -> None:
    """three rows of five columns, in blocks of eight:"""
    _normalised(part, _random(3, 5), _random(5, seed=33), 0.0, 8)


def eps_is_added_to_the_mean_square(part: Kernel) -> None:
    """eps = 0.16, and a row of zeros:"""
    x = torch.tensor([[0.3, -0.3, 0.3], [0.0, 0.0, 0.0]])
    _normalised(part, x, torch.ones(3), 0.16, 4)


def squares_do_not_overflow_in_sixteen_bits(part: Kernel) -> None:
    """inputs in float16 whose squares overflow in float16:"""
    x = torch.tensor([[1000.0, 1000.0, 7000.0, -7000.0]]).half()
    _normalised(part, x, torch.ones(4).half(), 1e-5, 4, tolerance=2e-3)


CHECKS = {
    "add_scaled": (
        one_program_adds_a_whole_block,
        each_program_adds_its_own_block,
        the_last_block_is_not_full,
        elements_past_the_end_are_left_alone,
        a_block_may_be_larger_than_the_tensor,
    ),
    "silu_multiply": (
        one_row_is_mixed,
        rows_start_a_stride_apart,
        programs_share_a_row,
        the_end_of_a_row_is_not_the_next,
        gates_may_be_of_any_size,
        sixteen_bits_are_mixed_in_float32,
    ),
    "rms_norm_rows": (
        a_row_is_divided_by_its_root_mean_square,
        each_program_has_its_row,
        each_column_has_its_weight,
        a_row_may_be_shorter_than_its_block,
        eps_is_added_to_the_mean_square,
        squares_do_not_overflow_in_sixteen_bits,
    ),
}
