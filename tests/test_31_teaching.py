"""The tools of chapter 31: the interpreter, counted operators, kernels of learners."""

import inspect
from types import FunctionType

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux alone")
import triton
import triton.language as tl
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.kernels.triton.elementwise import (
    rms_norm_torch,
    rms_norm_triton,
    rotary_store_torch,
    rotary_store_triton,
    silu_multiply_torch,
)
from minigen.model.attention import attention_naive
from minigen_course.ch31_triton import kernels
from minigen_course.ch31_triton.lesson import (
    apply_rotary_by,
    attention_by,
    instructions,
    memory_instructions,
    num_operations,
    num_sectors,
    operation,
    operators_of_layer,
    rms_norm_by,
    rotary_inputs,
    swiglu_by,
    warp_loads,
)
from minigen_course.grading.check import judge
from minigen_course.grading.exercise import exercises
from minigen_course.grading.plug_in import using
from minigen_course.lab.inspect_model import transformer_of
from minigen_course.lab.memory_watch import record_operators
from minigen_course.lab.programs import record_programs
from minigen_course.lab.triton_interpreter import bytes_moved, bytes_required, interpreted, launch
from tests.gpu.processes import run_python

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def sum_kernel(x_ptr, sums_ptr, num, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Twice the sum of each row of `num` numbers, by a method and by a function of its own."""
    lanes = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.program_id(0) * num + lanes
    if OTHER:
        x = tl.load(x_ptrs, mask=lanes < num, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=lanes < num)
    tl.store(sums_ptr + tl.program_id(0), doubled(x.sum(axis=0)))


def broken(x_ptr, num, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, BLOCK))
    raise ZeroDivisionError("mine")


def sums_of(x: Tensor, other: bool = True) -> Tensor:
    sums = torch.zeros(len(x))
    with interpreted():
        sum_kernel[(len(x),)](x, sums, x.shape[1], BLOCK=8, OTHER=other)
    return sums


def test_kernels_run_interpreted_with_the_functions_that_they_call() -> None:
    x = torch.arange(15.0).reshape(3, 5)
    assert torch.equal(sums_of(x), 2 * x.sum(1))


def test_nested_blocks_count_as_one() -> None:
    x = torch.ones(2, 5)
    with interpreted():
        assert sums_of(x).tolist() == sums_of(x).tolist() == [10, 10]


def test_the_language_is_restored_even_after_an_error() -> None:
    before = [dict(vars(each)) for each in (tl, tl.core, tl.math, tl.tensor)]
    with pytest.raises(ZeroDivisionError, match="mine"):
        launch(broken, (1,), torch.zeros(4), 4, BLOCK=4)
    after = [dict(vars(each)) for each in (tl, tl.core, tl.math, tl.tensor)]
    for then, now in zip(before, after, strict=True):
        assert then.keys() == now.keys()
        assert all(then[name] is now[name] for name in then)


def test_a_function_without_its_source_runs_and_is_not_mistaken_for_another() -> None:
    lines = inspect.getsource(kernels.add_scaled).replace("x + factor", "x - factor")
    names: dict[str, FunctionType] = {"tl": tl}
    exec(compile(lines, kernels.__file__, "exec"), names)  # as if it were defined in that file
    x, y, total = torch.randn(3, 5)
    launch(names["add_scaled"], (2,), x, y, total, 5, 2.0, BLOCK=4)
    torch.testing.assert_close(total, x - 2 * y)


def test_a_nested_function_keeps_its_closure() -> None:
    factor = 3.0

    def times(x_ptr, num, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        tl.store(x_ptr + lanes, factor * tl.load(x_ptr + lanes, mask=lanes < num), mask=lanes < num)

    x = torch.ones(3)
    launch(times, (1,), x, 3, BLOCK=4)
    assert x.tolist() == [3, 3, 3]


@pytest.mark.parametrize("part", [3, None, torch.zeros(2), str])
def test_an_object_that_is_not_a_kernel_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="is no kernel; it should be a function"):
        launch(part, (1,), torch.zeros(4), BLOCK=4)


def test_a_process_interprets_and_compiles() -> None:
    script = (
        "import torch\n"
        "from minigen_course.ch31_triton.gpu_kernels import machine_code\n"
        "from minigen.kernels.triton.elementwise import rms_norm_torch, rms_norm_triton\n"
        "from minigen_course.lab.triton_interpreter import interpreted\n"
        "from minigen_course.ch31_triton.lesson import memory_instructions\n"
        "x, weight = torch.randn(2, 20), torch.randn(20)\n"
        "for _ in range(2):\n"
        "    with interpreted():\n"
        "        ours = rms_norm_triton(x, weight, 1e-5)\n"
        "    torch.testing.assert_close(ours, rms_norm_torch(x, weight, 1e-5))\n"
        "    on = torch.empty(2, 4096, device='meta', dtype=torch.float16)\n"
        "    code, = machine_code('sm_90', lambda: rms_norm_triton(on, on[0], 1e-5))\n"
        "    print(code.spilled, len(memory_instructions(code.texts['ptx'])) >= 3)\n"
    )
    assert run_python("-W", "error", "-c", script).split() == ["0", "True", "0", "True"]


def test_masked_lanes_hold_anything_unless_a_value_is_given() -> None:
    x, sums = torch.ones(2, 5), torch.zeros(2)
    for other, expected in ((True, [10.0, 10.0]), (False, [torch.nan, torch.nan])):
        record_programs(
            lambda other=other: sum_kernel[(2,)](x, sums, 5, BLOCK=8, OTHER=other), x=x, sums=sums
        )
        torch.testing.assert_close(sums, torch.tensor(expected), equal_nan=True)


def test_a_launch_returns_what_it_wrote_and_views_are_distinguished() -> None:
    x, residual = torch.randn(2, 3, 20).half()
    weight = torch.ones(20).half()
    found = record_programs(
        lambda: rms_norm_triton(x, weight, 1e-5, residual), x=x, residual=residual, weight=weight
    )
    touched = [(each.tensor, each.is_store) for each in found if each.program == (1, 0, 0)]
    assert sorted(touched) == [
        ("residual", False),
        ("residual", True),
        ("result", True),
        ("weight", False),
        ("x", False),
    ]
    assert bytes_moved(found) - bytes_required(found) == 2 * 20 * 2, "two more loads of the weight"


def test_rotation_stores_each_token_into_its_slot() -> None:
    given = rotary_inputs(slots=[5, 4, 2], q_heads=2, kv_heads=1, head_dim=8)
    found = record_programs(lambda: rotary_store_triton(*given), **given.named())
    rows = {
        each.program[0]: {offset // 8 for offset in each.offsets}
        for each in found
        if each.tensor == "keys"
    }
    assert rows == {0: {5}, 1: {4}, 2: {2}}
    keys = given.keys.clone()
    given.keys.zero_()
    rotary_store_torch(*given)
    torch.testing.assert_close(keys, given.keys)


def test_softmax_by_a_kernel_gives_the_attention_of_the_package() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    for window in (None, 2):
        mine = attention_by(kernels.softmax_rows)(q, k, v, window)
        torch.testing.assert_close(mine, attention_naive(q, k, v, window))


def names_of(run) -> list[str]:
    return [each.name for each in record_operators(run)]


def test_operators_are_counted_and_views_are_not() -> None:
    gate_up = torch.randn(4, 24).half()
    found = record_operators(lambda: silu_multiply_torch(gate_up))
    assert [(each.name, each.bytes_read, each.bytes_written) for each in found] == [
        ("silu", 96, 96),
        ("mul", 192, 96),
    ]


def test_repeated_elements_are_read_once_and_of_a_table_only_its_rows() -> None:
    table, at = torch.zeros(100, 6), torch.tensor([3, 7])
    (gathered,) = record_operators(lambda: table[at])
    assert (gathered.bytes_read, gathered.bytes_written) == (16 + 48, 48)
    ones = torch.ones(2, 6)
    (scattered,) = record_operators(lambda: table.index_put_((at,), ones))
    assert (scattered.bytes_read, scattered.bytes_written) == (16 + 48, 48)
    (copied,) = record_operators(lambda: table.index_copy_(0, at, ones))
    assert (copied.bytes_read, copied.bytes_written) == (16 + 48, 48)
    (added,) = record_operators(lambda: torch.add(table, table[:1].expand(100, 6)))
    assert added.bytes_read == 4 * 606


def test_a_sum_in_place_reads_both_and_writes_one() -> None:
    residual, x = torch.zeros(5), torch.ones(5)
    found = record_operators(lambda: residual.add_(x))
    assert [(each.name, each.num_bytes) for each in found] == [("add_", 60)]


def test_operators_of_tensors_without_memory_are_counted() -> None:
    x = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
    small = torch.empty(8, 4096, dtype=torch.bfloat16)
    by_shape = record_operators(lambda: rms_norm_torch(x, x[0], 1e-5, x))
    run = names_of(lambda: rms_norm_torch(small, small[0], 1e-5, small))
    assert [each.name for each in by_shape] == run


PTX = """
.visible .entry kernel(.param .u64 kernel_param_0)
{
\t.reg .pred \t%p<3>;
$L__BB0_1:
\t// begin inline asm
\t@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
\t// end inline asm
\tsetp.lt.s32 \t%p1, %r1, %r2;
\t@!%p2 st.global.b32 [ %rd2 + 0 ], { %r1 }; // stored
\tbra.uni \t$L__BB0_1;
\tret;
}
"""


def test_ptx_is_read_by_its_instructions() -> None:
    assert [operation(each) for each in instructions(PTX)] == [
        "ld.global.v2.b32",
        "setp.lt.s32",
        "st.global.b32",
        "bra.uni",
        "ret",
    ]
    assert [each[:4] for each in memory_instructions(PTX)] == ["@%p1", "@!%p"]
    assert num_operations(PTX)["setp"] == 1


WIDE = "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n"
NARROW = "add.s64 %rd1, %rd17, %rd19;\n" + "".join(
    f"add.s64 %rd{2 + place}, %rd1, {2 + 2 * place};\n" for place in range(7)
)
NARROW += "".join(f"@%p{n} ld.global.b16 {{ %rs{n} }}, [ %rd{n} + 0 ];\n" for n in range(1, 9))


def test_a_wide_load_is_coalesced_and_the_narrow_ones_of_the_same_lanes_are_strided() -> None:
    (wide,), narrow = warp_loads(WIDE, 8, 2), warp_loads(NARROW, 8, 2)
    assert wide.offsets == tuple(range(256))
    assert num_sectors([wide]) == 16
    assert [each.offsets[:3] for each in narrow] == [(j, 8 + j, 16 + j) for j in range(8)]
    assert [num_sectors([each]) for each in narrow] == [16] * 8
    assert sum(each.num_bytes for each in narrow) == wide.num_bytes == 512


def test_a_layers_small_operators_are_those_of_the_model(tiny_llm: LLM) -> None:
    model = transformer_of(tiny_llm)
    parts = operators_of_layer(model, tiny_llm.config.kv_heads, num_tokens=5)
    assert {name: len(each) for name, each in parts.items()} == {
        "first norm": 8,
        "rotation and store": 9 + 9 + 2,
        "sum and norm": 9,
        "SiLU x up": 2,
        "last sum": 1,
    }
    x = torch.zeros(5, tiny_llm.config.hidden).half()
    twin = record_operators(lambda: rms_norm_torch(x, x[0], 1e-5, x.clone()))
    bytes_of = [sum(each.num_bytes for each in some) for some in (parts["sum and norm"], twin[1:])]
    assert bytes_of[0] == bytes_of[1], "the twin's first operator is the clone"


@pytest.mark.parametrize(
    ("chapter", "layer", "launcher"),
    [
        (13, "swiglu", swiglu_by(kernels.silu_multiply)),
        (13, "rms_norm", rms_norm_by(kernels.rms_norm_rows)),
        (13, "apply_rotary", apply_rotary_by(kernels.rotate_pairs)),
        (14, "attention", attention_by(kernels.softmax_rows)),
    ],
)
def test_a_learners_kernel_runs_in_the_engine(
    chapter: int, layer: str, launcher: object, tiny_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tiny_llm.generate("a prompt", GREEDY).token_ids
    with interpreted(), using(chapter, **{layer: launcher}):
        assert tiny_llm.generate("a prompt", GREEDY).token_ids == expected
    output = capsys.readouterr().out
    assert f" {layer}, was called" in output or f"your {layer} was called" in output
    assert " 0 times" not in output


def as_of_a_notebook(function: FunctionType) -> FunctionType:
    made = FunctionType(function.__code__, dict(vars(kernels)), function.__name__)
    made.__module__ = "__main__"
    made.__annotations__ = inspect.get_annotations(function)
    return made


def test_a_kernel_is_checked_with_jit_above_it_and_without() -> None:
    exercise = exercises("31")["add_scaled"]
    plain = as_of_a_notebook(kernels.add_scaled)
    for part in (plain, triton.jit(plain)):
        result = judge("31", exercise.name, part)
        assert result.passed, result.message


def test_without_triton_a_check_says_what_to_do_and_stubs_are_there() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from minigen_course.handout.sheet import exercise_notebook\n"
        "from minigen_course.grading.exercise import exercises\n"
        "from minigen_course.grading.judge import verdict_on\n"
        "assert 'import triton.language as tl' in str(exercise_notebook('31'))\n"
        "exercise = exercises('31')['add_scaled']\n"
        "print(*verdict_on(exercise.checks, exercise.solution))\n"
    )
    output = run_python("-c", script)
    assert output.startswith("False check 1 of 5")
    assert "pip install 'minigen[gpu]'" in output


def test_the_engine_says_whose_kernel_ran(capsys: pytest.CaptureFixture[str]) -> None:
    def own(*arguments: object) -> None: ...

    for kernel, wanted in (
        (kernels.rms_norm_rows, "the course's rms_norm_rows"),
        (own, "your own"),
    ):
        with using(13, rms_norm=rms_norm_by(kernel)):
            pass
        assert f"{wanted}, in place of rms_norm, was called 0 times" in capsys.readouterr().out
