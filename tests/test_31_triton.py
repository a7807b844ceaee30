"""The Triton kernels, each in a process of its own: interpreted, and compiled for real GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux alone")
from minigen.kernels.gpu.machine_code import SHARED_MEMORY

ROOT = Path(__file__).resolve().parent.parent


def run_python(*arguments: str, **environment: str) -> str:
    """Standard output of another Python in this repository; fails with its words if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    return run.stdout


def test_every_kernel_equals_its_twin_in_the_interpreter() -> None:
    command = ("-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "tests/gpu/equal_twins.py")
    told = run_python(*command, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert " passed" in told
    assert "skipped" not in told


def compiled(chips: str, head_dims: str) -> list[dict]:
    lines = run_python("-m", "tests.gpu.compile_all", chips, head_dims).splitlines()
    return [json.loads(line) for line in lines]


def assert_fits(code: dict) -> None:
    assert code["spilled"] == 0, code
    assert code["shared"] <= SHARED_MEMORY[code["chip"]], code
    assert {"ptx", "amdgcn"} & set(code["texts"]), "it went as far as assembly"


def test_every_kernel_compiles_for_real_gpus_without_spills() -> None:
    codes = compiled(",".join(SHARED_MEMORY), "128")
    kernels = {code["kernel"] for code in codes}
    assert len(kernels) == 9
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
    blocked = "import sys; sys.modules['triton'] = None; import minigen.llm, minigen.runners"
    run_python("-c", blocked)
