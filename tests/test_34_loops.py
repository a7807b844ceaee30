"""Loops by rows give the products of bytes, and machine code is counted as it is written."""

from math import isnan

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from minigen.kernels.cpu.simd import all_lanes, fused, load, sum_of_lanes
from minigen_course.ch34_cpu_kernels import loops
from minigen_course.ch34_cpu_kernels.loops import (
    add_lane_dots,
    best_in_turns,
    in_floats,
    lanes_of,
    loop_costs,
    two_scales,
)
from minigen_course.ch34_cpu_kernels.reference import multiply_bytes


@njit
def _by_rows(words, scales, inputs, input_scales, start, groups, out):
    for row in range(len(out)):
        total = all_lanes(np.float32(0))
        for pair in range(groups // 2):
            at = pair * 16
            dots = add_lane_dots(
                load(start, at), load(words, row * groups * 8 + at), load(inputs, at)
            )
            both = two_scales(scales, row * groups + 2 * pair) * load(input_scales, at)
            total = fused(in_floats(dots), both, total)
        out[row] = sum_of_lanes(total)


def test_lanes_kept_apart_until_the_rows_end_give_the_product() -> None:
    rng = np.random.default_rng(34)
    codes = rng.integers(-127, 128, (5, 6, 32)).astype(np.int8)
    inputs = rng.integers(-127, 128, (6, 32)).astype(np.int8)
    scales, input_scales = rng.random((5, 6), np.float32), rng.random(6, np.float32)
    expected = multiply_bytes(codes, scales, inputs, input_scales)
    words = (codes.view(np.uint8) ^ np.uint8(128)).reshape(-1).view(np.int32)
    start = -128 * inputs.reshape(-1, 4).sum(axis=-1, dtype=np.int32)
    given = words, scales.reshape(-1), inputs.reshape(-1).view(np.int32)
    out = np.empty(5, np.float32)
    _by_rows(*given, np.repeat(input_scales, 8), start, 6, out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-2)


X86 = """
.LBB4_8:
\tvpmovsxbd\t-31(%r13,%r12), %zmm3
\tvcvtdq2ps\t%zmm3, %zmm3
\tvfmadd231ps\t(%r15,%r12,4), %zmm3, %zmm1
\taddq\t$16, %r12
\t.p2align\t4
\tjne\t.LBB4_8
\tjmp\t.LBB4_16
.LBB4_15:
\tmovsbl\t-15(%rax), %edi
\tvcvtsi2ss\t%edi, %xmm15, %xmm2
\tvfmadd231ss\t(%r12), %xmm2, %xmm1
\tjne\t.LBB4_15
.LBB4_17:
\tdecq\t%rax
\tjne\t.LBB4_17
"""
ARM = """
LBB0_3:
\tsshll.4s\tv1, v1, #0
\tscvtf.4s\tv1, v1
\tfmla.4s\tv0, v1, v2
\tb.ne\tLBB0_3
.LBB0_5:
\tscvtf\ts1, w9
\tfmadd\ts0, s1, s2, s0
\tscvtf\tv3.2s, v3.2s
\tsubs\tx8, x8, #1
\tcbnz\tx8, .LBB0_5
"""


def test_instructions_are_counted_for_each_number_that_a_loop_converts() -> None:
    assert loop_costs(X86) == (5 / 16, 4)
    assert loop_costs(ARM) == (1, 5 / 3)


def test_the_lanes_of_a_loop_are_those_of_its_widest_conversion() -> None:
    assert [lanes_of(each) for each in (X86, ARM, "")] == [16, 4, 1]


def test_code_without_such_a_loop_has_no_costs() -> None:
    for assembly in ("", ".LBB0_1:\n\tdecq\t%rax\n\tjne\t.LBB0_1\n", "\tvcvtdq2ps\t%zmm3, %zmm3\n"):
        assert all(isnan(each) for each in loop_costs(assembly))


def test_a_compiled_product_of_bytes_is_found() -> None:
    @njit(fastmath=True)
    def product(codes, x):
        total = np.float32(0)
        for column in range(len(x)):
            total += codes[column] * x[column]
        return total

    product(np.ones(64, np.int8), np.ones(64, np.float32))
    costs = loop_costs(*product.inspect_asm().values())
    assert 0 < costs.fewest <= costs.most


def test_each_function_is_measured_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    times = iter([0.0, 5.0, 5.0, 7.0, 7.0, 8.0, 8.0, 9.0])
    monkeypatch.setattr(loops.time, "perf_counter", lambda: next(times))
    runs = {name: (lambda name=name: called.append(name)) for name in "ab"}
    assert best_in_turns(runs, rounds=2) == {"a": 1, "b": 1}
    assert called == list("aabb") * 2
