"""Paged decode and the engine with kernels, interpreted; and the errors without a GPU."""

from pathlib import Path

import pytest
import torch

from minigen import LLM
from minigen.errors import OptionError

pytest.importorskip("triton", reason="Triton is for Linux alone")
from minigen.kernels.triton.decode_attention import num_splits
from tests.gpu.processes import assert_passes_interpreted


def test_paged_decode_equals_its_twin_in_the_interpreter() -> None:
    assert_passes_interpreted("equal_decode.py")


def test_the_engine_with_kernels_equals_the_one_without() -> None:
    assert_passes_interpreted("engine_equal.py", "equal_engine.py")


@pytest.mark.parametrize("num_programs", [1, 8, 64, 1000])
@pytest.mark.parametrize("longest", [1, 127, 1000, 100_000])
def test_splits_are_a_power_of_two_and_no_part_is_tiny(num_programs: int, longest: int) -> None:
    splits = num_splits(num_programs, longest, num_processors=132)
    assert splits & (splits - 1) == 0
    assert splits == 1 or longest // splits >= 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "needs an NVIDIA GPU"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, mps"),
        ({"device": "cuda", "attention_backend": "torch"}, "has its own attention"),
        ({"attention_backend": "triton", "weights": "float32"}, "set TRITON_INTERPRET=1"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_sentence(
    options: dict[str, str], message: str, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptionError, match=message):
        LLM.load(tiny_directory, **options)


def test_without_triton_an_error_names_it(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigen.assembly.cuda.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'minigen\[gpu\]'"):
        LLM.load(tiny_directory, attention_backend="triton")


def test_the_interpreter_computes_only_in_float32(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(OptionError, match="needs weights='float32'"):
        LLM.load(tiny_directory, attention_backend="triton")
