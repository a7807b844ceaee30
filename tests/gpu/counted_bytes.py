"""The bytes that kernels move, counted in the interpreter, match their docstrings."""

import pytest
import torch
import triton
import triton.language as tl

from minigen.kernels.triton import elementwise, matvec
from minigen.kernels.triton.elementwise import silu_multiply_kernel
from minigen.model.layers import DenseLinear
from minigen_course.ch31_triton import gpu_kernels
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, bytes_required


@triton.jit
def copy_kernel(source_ptr, target_ptr, num, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < (num if MASKED else num + BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=inside), mask=inside)


def test_each_program_loads_and_stores_its_own_elements() -> None:
    source, target = torch.arange(10.0), torch.zeros(10)
    found = record_programs(
        lambda: copy_kernel[(3,)](source, target, 10, BLOCK=4, MASKED=True),
        source=source,
        target=target,
    )
    seen = [(each.program[0], each.tensor, each.is_store, each.offsets) for each in found]
    assert seen[:2] == [(0, "source", False, (0, 1, 2, 3)), (0, "target", True, (0, 1, 2, 3))]
    assert seen[-1] == (2, "target", True, (8, 9))
    assert bytes_moved(found) == bytes_required(found) == 2 * 10 * 4
    assert target.tolist() == source.tolist()


def test_a_missing_mask_is_reported_with_the_program_before_memory_is_touched() -> None:
    source, target = torch.arange(10.0), torch.zeros(10)
    with pytest.raises(Exception, match=r"Program \(2, 0, 0\) loads 2 elements outside of source"):
        record_programs(
            lambda: copy_kernel[(3,)](source, target, 10, BLOCK=4, MASKED=False),
            source=source,
            target=target,
        )
    assert target.tolist() == [*range(8), 0, 0]


def test_silu_reads_four_bytes_and_writes_two_a_number() -> None:
    gate_up, mixed = torch.randn(2, 60).half(), torch.zeros(2, 30).half()
    found = record_programs(
        lambda: silu_multiply_kernel[(2, 1)](gate_up, mixed, 30, BLOCK=32),
        gate_up=gate_up,
        mixed=mixed,
    )
    assert bytes_moved(found) == bytes_required(found) == (4 + 2) * 60


@pytest.mark.parametrize(("has_residual", "bytes_a_number"), [(False, 4), (True, 8)])
def test_a_norm_moves_each_row_once(has_residual: bool, bytes_a_number: int) -> None:
    x, residual, out = (torch.randn(3, 20).half() for _ in range(3))
    weight = torch.ones(20).half()

    def launch() -> None:
        elementwise.rms_norm_kernel[(3,)](
            x, residual, weight, out, 20, 1e-5, HAS_RESIDUAL=has_residual, BLOCK=32
        )

    found = record_programs(launch, x=x, residual=residual, weight=weight, out=out)
    rows = [each for each in found if each.tensor != "weight"]
    assert bytes_moved(rows) == bytes_required(rows) == bytes_a_number * 60


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_of_one_row_reads_each_weight_once(gated: bool) -> None:
    x, weight = torch.randn(1, 600).half(), torch.randn(20, 600).half()
    linear = DenseLinear(weight, None, (10, 10))
    found = record_programs(
        lambda: matvec.matvec_triton(x, linear, gated=gated), x=x, weight=weight
    )
    weights = [each for each in found if each.tensor == "weight"]
    assert bytes_moved(weights) == bytes_required(weights) == 2 * 20 * 600


def test_a_softmax_moves_four_bytes_a_number() -> None:
    x, weights = torch.randn(2, 7).half(), torch.zeros(2, 7).half()
    found = record_programs(
        lambda: gpu_kernels.softmax_kernel[(2,)](x, weights, 7, BLOCK=8), x=x, weights=weights
    )
    assert bytes_moved(found) == bytes_required(found) == 4 * 14
