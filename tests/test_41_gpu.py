"""Tensor parallelism with a GPU for each rank, as far as a machine without GPUs can check it."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minigen import LLM
from minigen.assembly import cuda
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.config import EngineConfig
from minigen.errors import OptionError
from tests.gpu.processes import ROOT, assert_passes_interpreted, run_python
from tests.ranks import save_eight_heads

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")
# Bytes of shared memory that one program can use. Source: CUDA C++ Programming Guide, table of
# compute capabilities.
SHARED_MEMORY = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
SHARES = "llama-3-8b/2,llama-3-8b/8,qwen3-0.6b/2,smollm2-135m/3"
MORE_SHARES = "llama-3-8b/4,llama-3-8b/16,qwen3-0.6b/4,qwen3-0.6b/8"


@needs_triton
def test_shares_in_threads_give_what_the_whole_model_gives() -> None:
    assert_passes_interpreted("equal_shares.py")


@needs_triton
def test_two_ranks_end_as_a_whole_and_are_joined_under_torchrun() -> None:
    assert_passes_interpreted("equal_two_gpus.py")


@needs_triton
@pytest.mark.long
def test_two_and_three_processes_give_the_answers_of_one() -> None:
    assert_passes_interpreted("shares_over_gloo.py")


def assert_shares_compile(chips: str, shares: str) -> None:
    lines = run_python("-m", "tests.gpu.compile_all", chips, shares).splitlines()
    codes = [json.loads(line) for line in lines]
    assert {code["chip"] for code in codes} == set(chips.split(","))
    assert {code["launch"].split(", ")[-1] for code in codes} == set(shares.split(","))
    for code in codes:
        assert code["spilled"] == 0, code
        assert code["shared"] <= SHARED_MEMORY[code["chip"]], code


@needs_triton
@pytest.mark.parametrize(
    "chip",
    [
        "sm_90",
        *(pytest.param(each, marks=pytest.mark.long) for each in SHARED_MEMORY if each != "sm_90"),
    ],
)
def test_the_kernels_of_a_share_compile_without_spills(chip: str) -> None:
    assert_shares_compile(chip, "llama-3-8b/2" if chip == "sm_90" else SHARES)


@needs_triton
@pytest.mark.long
def test_the_kernels_of_other_shares_compile_without_spills() -> None:
    assert_shares_compile(",".join(SHARED_MEMORY), MORE_SHARES)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_eight_heads(tmp_path)


def pretend_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)
) -> None:
    import minigen.parallel.gpu  # noqa: F401  # its kernels are imported without GPUs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@needs_triton
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gpu_without_bfloat16_and_an_interpreter_are_refused(
    num_ranks: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2, capability=(7, 5))
    message = r"needs compute capability 8\.0 or more; GPU 0, a GPU, has 7\.5: leave device at"
    with pytest.raises(OptionError, match=message):
        LLM.load(directory, device="cuda", tensor_parallel_size=num_ranks)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(OptionError, match=r"TRITON_INTERPRET=1 asks for .* unset it"):
        LLM.load(directory, device="cuda", tensor_parallel_size=num_ranks)


@needs_triton
def test_a_model_that_fills_the_gpu_is_refused_in_words_of_the_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    message = (
        r"of 0 bytes, what the weights and a step of .* 40 leave free, holds no block: a block"
    )
    with pytest.raises(OptionError, match=message):
        LLM.load(directory, device="cuda", max_num_batched_tokens=40, max_num_seqs=2)


@needs_triton
@pytest.mark.parametrize(
    ("num_ranks", "options", "message"),
    [
        (2, {}, r"tensor_parallel_size 2 .* needs 2 GPUs .* torch finds 1: set it to 1 or less\."),
        (3, {}, r"tensor_parallel_size 3 does not divide this model: .* are: 1, 2, 4, 8\."),
        (2, {"attention_backend": "torch"}, "minigen's own attention_backend"),
        (2, {"weights": "int8"}, "computes in bfloat16 only"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence_before_anything_starts(
    num_ranks: int,
    options: dict[str, str],
    message: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr("minigen.parallel.gpu.start_ranks", lambda *given: pytest.fail("started"))
    with pytest.raises(OptionError, match=message):
        LLM.load(directory, device="cuda", tensor_parallel_size=num_ranks, **options)


@needs_triton
def test_under_torchrun_a_machine_needs_gpus_for_its_own_ranks_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 1)
    settings = {"TORCHELASTIC_RUN_ID": "41", "RANK": "1", "WORLD_SIZE": "4"}
    for name, value in {**settings, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="needs 2 GPUs on this machine, one per rank"):
        LLM.load(directory, device="cuda", tensor_parallel_size=4)


@needs_triton
def test_the_cache_is_as_large_as_the_fullest_gpu_allows_every_rank(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigen.parallel import gpu

    checkpoint = open_checkpoint(directory)
    options = EngineConfig(device="cuda", tensor_parallel_size=2, max_num_seqs=4)
    plans = []
    for free in (10**9, 2 * 10**9):
        group = SimpleNamespace(free_bytes=free, obstacle=None)
        monkeypatch.setattr(gpu, "GpuGroup", lambda *given, group=group: group)
        plans.append(cuda.interpreted_plan(checkpoint, options, None))
    small, large = (plan.default_kv_bytes for plan in plans)
    assert 0 < large - small == pytest.approx(2 * 0.9 * 10**9, abs=4)
    kept = 10**9 - small / 2 / 0.9
    assert kept > checkpoint.num_parameters / 2 * 2, "the share's weights in bfloat16 fit as well"
    assert plans[0].kv_bytes == 2 * checkpoint.config.kv_heads * checkpoint.config.head_dim * 4


@needs_triton
def test_ranks_report_the_free_memory_of_all() -> None:
    from minigen.parallel.comm import run_ranks
    from minigen.parallel.gpu import gather_numbers

    found = run_ranks(3, lambda comm: gather_numbers(comm, 7 * 10**10 + comm.rank))
    assert found == 3 * [[7 * 10**10, 7 * 10**10 + 1, 7 * 10**10 + 2]]


SKIPS = """
import torch
import benchmarks.gpu.parts
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
import tests.gpu.equal_two_gpus as two
print(benchmarks.gpu.parts.parts()["two_gpus"]({})["left out"])
print(two.pytestmark.args, two.pytestmark.kwargs["reason"])
"""


@needs_triton
def test_with_one_gpu_checks_and_benchmark_of_two_say_in_a_sentence_why_not() -> None:
    measured, checked = run_python("-c", SKIPS).splitlines()
    assert measured == "two ranks need two GPUs, and torch finds 1"
    assert checked == f"(True,) {measured}: NCCL between GPUs was not tried"
    assert "-rs" in (ROOT / "Makefile").read_text("utf-8"), "pytest prints the reason"
