"""Kernels leave torch one thread, and engines that are loaded later still get all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from minigen import LLM, SamplingParams, hardware
from minigen.hardware import torch_threads
from minigen.kernels.cpu.thread_pool import one_at_a_time
from tests.test_34_cpu_kernels import SIZES
from tests.tiny import save_model, save_tokenizer


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "_THREADS_AT_START", 2)
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


def test_an_engine_loaded_after_another_has_computed_has_as_many_threads(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", **SIZES)
    save_tokenizer(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in range(2):
        llm = LLM.load(tmp_path, weights="int8")
        assert llm.describe()["threads"] == "2"
        llm.generate("abc", params)
