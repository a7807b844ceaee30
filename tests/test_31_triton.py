"""The Triton kernels, each in a separate process: interpreted, and compiled for real GPUs."""

import json

import pytest

pytest.importorskip("triton", reason="Triton is for Linux alone")
from minigen_course.ch31_triton.gpu_kernels import SHARED_MEMORY
from tests.gpu.processes import assert_passes_interpreted, run_python


def test_small_kernels_equal_their_twins_and_move_the_bytes_of_their_docstrings() -> None:
    assert_passes_interpreted("equal_twins.py", "counted_bytes.py")


def compiled(chips: str, head_dims: str) -> list[dict]:
    lines = run_python("-m", "tests.gpu.compile_all", chips, head_dims).splitlines()
    return [json.loads(line) for line in lines]


def assert_fits(code: dict) -> None:
    assert code["spilled"] == 0, code
    assert code["shared"] <= SHARED_MEMORY[code["chip"]], code
    assert {"ptx", "amdgcn"} & set(code["texts"]), "it was compiled to assembly"


def test_every_kernel_compiles_for_real_gpus_without_spills() -> None:
    codes = compiled(",".join(SHARED_MEMORY), "128")
    kernels = {code["kernel"] for code in codes}
    assert len(kernels) == 10
    assert {(code["chip"], code["kernel"]) for code in codes} == {
        (chip, kernel) for chip in SHARED_MEMORY for kernel in kernels
    }
    for code in codes:
        assert_fits(code)


@pytest.mark.long
@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_heads_of_other_widths_compile_without_spills(chip: str) -> None:
    for code in compiled(chip, "64,80,96"):
        assert_fits(code)


def test_minigen_works_without_triton() -> None:
    blocked = "import sys; sys.modules['triton'] = None; import minigen.llm, minigen.assembly.cpu"
    run_python("-c", blocked)
