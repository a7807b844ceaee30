"""`device="mps"`: the same layers on any device of torch, and what is refused.

No test here runs on an Apple GPU. The plan for it runs on a CPU, where it must give the same logits
as `device="cpu"`, and on torch's device "meta", whose tensors have no values: an operation that
reads one there raises an error, and each transfer between devices is recorded.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigen import LLM, SamplingParams
from minigen.assembly import mps
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.config import EngineConfig
from minigen.errors import OptionError
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

# Both a window and a prompt in several chunks need a mask, and two requests for one prompt fork.
PROMPTS = ["a", "a longer prompt, in several chunks", "another one"]
SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 64}
COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy)
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model with a sliding window, and an output head that is the embedding."""
    directory = tmp_path_factory.mktemp("windowed")
    changes = {"sliding_window": 8, "tie_word_embeddings": True}
    save_model(directory, "mistral", vocab_size=TINY_VOCAB, **changes)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `device="mps"` stand for another device of torch, with 10 GB free."""

    def stand_for(device: str) -> None:
        plan = partial(mps.plan_on, torch.device(device), 10**10)
        monkeypatch.setattr(mps, "plan", plan)

    return stand_for


def answers(llm: LLM) -> tuple[list[list[int]], list[Tensor]]:
    """Return the tokens of all answers, and the logits of all steps."""
    steps: list[Tensor] = []
    runner: Any = llm.engine.runner
    compute = runner.logits

    def logits(chunks: Any) -> Tensor:
        steps.append(compute(chunks))
        return steps[-1].clone()

    runner.logits = logits
    outputs = llm.generate(PROMPTS, PARAMS)
    return [choice.token_ids for output in outputs for choice in output.choices], steps


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_plan_for_a_device_gives_the_logits_of_the_cpu(
    windowed: Path, run_on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    for by_onednn in ("can_pack", "is_faster"):
        monkeypatch.setattr(f"minigen.kernels.onednn.{by_onednn}", lambda dtype: False)
    expected, logits = answers(LLM.load(windowed, weights=weights, **SIZES))
    run_on("cpu")
    llm = LLM.load(windowed, weights=weights, device="mps", **SIZES)
    found, same = answers(llm)
    assert found == expected
    assert len(same) == len(logits) > 6
    assert all(torch.equal(a, b) for a, b in zip(same, logits, strict=True))
    assert llm.describe()["weights"] == f"{weights} (as requested)"


class Transfers(TorchDispatchMode):
    """Records each operation with tensors of two devices; what comes from "meta" becomes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up: list[Tensor] = []
        self.down: list[Tensor] = []
        self.num_inside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        used, target = devices((args, kwargs)), kwargs.get("device")
        if func.overloadpacket in COPIES and target is not None and used != {str(target)}:
            (source,) = args
            if target.type == "cpu":
                self.down.append(source)
                return torch.zeros(source.shape, dtype=source.dtype)
            self.up.append(source)
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        involved = used | devices(found)
        assert len(involved) <= 1, f"{func} has tensors on {sorted(involved)}"
        self.num_inside += involved == {"meta"}
        return found


def devices(values: Any) -> set[str]:
    return {str(each.device) for each in tree_leaves(values) if isinstance(each, Tensor)}


def test_a_step_has_all_tensors_on_its_device(
    windowed: Path, run_on: Callable[[str], None]
) -> None:
    run_on("meta")
    llm = LLM.load(windowed, device="mps", **SIZES)
    num_uploads: list[int] = []
    runner: Any = llm.engine.runner
    compute = runner.logits

    def logits(chunks: Any) -> Tensor:
        with Transfers() as seen:
            found: Tensor = compute(chunks)
        assert found.device.type == "cpu"
        (only,) = seen.down
        assert only.shape == found.shape
        assert {each.dtype for each in seen.up} == {torch.int64}, "numbers of the batch alone"
        assert seen.num_inside > 10 * llm.config.num_layers
        num_uploads.append(len(seen.up))
        return found

    runner.logits = logits
    outputs = llm.generate(PROMPTS, PARAMS)
    assert len(num_uploads) > 6
    assert set(num_uploads) == {6, 7}, "a batch's arrays, and at a fork the blocks to copy"
    assert all(len(choice.token_ids) == 6 for output in outputs for choice in output.choices)
    assert runner.pool.kv.device.type == "meta"
    assert llm.describe()["weights"].startswith("bfloat16 (auto: ")
    assert "on device 'meta'" in llm.describe()["runner"]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "torch is built without its MPS backend; use device='cpu'"),
        ({"weights": "int4"}, "weights='int4' does not work .* leave it at 'auto'"),
        ({"weights": "int8"}, "weights='int8' does not work .* leave it at 'auto'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' does not work .* in bfloat16: leave it"),
        ({"weights": "float32", "kv_cache_dtype": "bfloat16"}, "keys and values in float32"),
        ({"attention_backend": "triton"}, "has its own attention"),
        ({"tensor_parallel_size": 2}, "because a Mac has one GPU: leave it at 1"),
        ({"pipeline_parallel_size": 2}, "device='mps' runs no stages"),
        ({"context_parallel_size": 2}, "runs on CPUs only"),
        ({"speculative_config": {"method": "draft_model", "num_layers": 1}}, "device='mps' needs"),
    ],
)
def test_what_an_apple_gpu_does_not_run_is_refused(
    tiny_directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LLM.load(tiny_directory, device="mps", **options)


@pytest.mark.parametrize(
    ("built", "available", "version", "lacking"),
    [
        (True, False, "2.13.0", "finds no such GPU, or an older macOS; use"),
        (True, True, "2.12.1+cpu", "has torch 2.12.1\\+cpu; use"),
    ],
)
def test_a_machine_that_lacks_something_is_refused_with_the_reason(
    tiny_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: bool,
    available: bool,
    version: str,
    lacking: str,
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_built", lambda: built)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: available)
    monkeypatch.setattr("torch.__version__", version)
    with pytest.raises(OptionError, match=lacking):
        LLM.load(tiny_directory, device="mps")


def test_the_cache_gets_half_of_what_is_left_of_the_recommended_memory(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_lacking", lambda: None)
    monkeypatch.setattr("torch.mps.empty_cache", lambda: None)
    checkpoint, options = open_checkpoint(tiny_directory), EngineConfig(device="mps")

    def kv_bytes(recommended: int, in_use: int) -> int:
        monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: recommended)
        monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: in_use)
        return mps.plan(checkpoint, options).default_kv_bytes

    most = kv_bytes(12 * 10**9, 0)
    assert 5 * 10**9 < most < 6 * 10**9
    assert most - kv_bytes(12 * 10**9, 10**9) == 10**9 // 2
    assert kv_bytes(10**6, 0) == 0
