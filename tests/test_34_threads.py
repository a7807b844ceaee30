"""Kernels leave torch one thread, and engines that are loaded later still get all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from minigen import LLM, SamplingParams, hardware
from minigen.assembly import build
from minigen.config import EngineConfig
from minigen.hardware import set_torch_threads, torch_threads
from minigen.kernels.cpu.team import one_at_a_time
from tests.test_34_cpu_kernels import SIZES
from tests.tiny import save_model, save_tokenizer


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    threads = hardware._Threads()
    threads.of_caller = 2
    monkeypatch.setattr(hardware, "_THREADS", threads)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_after_a_kernel_it_is_known_how_many_threads_torch_had() -> None:
    assert torch_threads() == 2
    with one_at_a_time():
        assert torch.get_num_threads() == 1
    assert torch_threads() == 2
    torch.set_num_threads(3)
    assert torch_threads() == 3


def test_the_threads_of_one_model_are_not_those_of_the_next() -> None:
    torch.set_num_threads(8)
    for _ in range(3):
        assert torch_threads() == 8
        set_torch_threads(torch_threads() // 2)  # as for two ranks
        assert torch.get_num_threads() == 4
    torch.set_num_threads(6)
    assert torch_threads() == 6


def test_a_models_own_number_of_threads_is_not_kept(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", **SIZES)
    save_tokenizer(tmp_path)
    torch.set_num_threads(2)
    said = [LLM.load(tmp_path, weights="float32", threads=n).describe() for n in (3, None)]
    assert [each["threads"] for each in said] == ["3", "2"]


@pytest.mark.parametrize(("here", "expected"), [(None, 4), ("1", 1), ("2", 2)])
def test_the_threads_are_divided_among_the_ranks_of_this_machine(
    here: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if here is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert build._num_local_ranks(EngineConfig(tensor_parallel_size=4)) == expected
    assert build._num_local_ranks(EngineConfig()) == 1


def test_an_engine_loaded_after_another_has_computed_has_as_many_threads(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", **SIZES)
    save_tokenizer(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in range(2):
        llm = LLM.load(tmp_path, weights="int8")
        assert llm.describe()["threads"] == "2"
        llm.generate("abc", params)
