"""`device="cuda"` over real processes, in Triton's interpreter: gloo in the place of NCCL."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.assembly import cuda
from minigen.errors import OptionError, WorkerError
from minigen.parallel.comm import MessageCounters
from minigen.trace.timeline import Timeline
from tests.processes import workers_of
from tests.ranks import save_six_heads

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["abcdefgh", "abcdefghij", "q", "xyzxyz"]
CROWDED: dict[str, Any] = {"num_blocks": 7, "block_size": 4, "max_num_seqs": 3}
SOON = 5.0  # seconds


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_six_heads(tmp_path_factory.mktemp("split"), 128)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "plan", cuda.interpreted_plan)


@contextmanager
def split(directory: Path, num_ranks: int, **options: Any) -> Iterator[LLM]:
    llm = LLM.load(directory, device="cuda", tensor_parallel_size=num_ranks, **options)
    try:
        yield llm
    finally:
        llm.close()
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_answers_are_those_of_plain_torch_with_preemptions_and_shared_prefixes(
    directory: Path, num_ranks: int
) -> None:
    alone = LLM.load(directory, weights="float32", **CROWDED)
    expected = [each.token_ids for each in alone.generate(PROMPTS, GREEDY, progress=False)]
    with split(directory, num_ranks, **CROWDED) as llm:
        said = llm.describe()
        assert said["ranks"] == f"{num_ranks} processes with a GPU each, over gloo; sums over gloo"
        assert said["runner"].endswith("no CUDA graphs: Triton's interpreter has none")
        with llm.count_work() as counted:
            found = llm.generate(PROMPTS, GREEDY, progress=False)
        assert [each.token_ids for each in found] == expected
        assert counted.preemptions > 0
        assert counted.tokens_cached > 0
        counters = MessageCounters()
        with llm.trace.subscribed(Timeline(on_message=counters)):
            llm.generate("abc", SamplingParams(max_tokens=1))
        sums = 2 * llm.config.num_layers + 1
        assert counters.num_messages == {"broadcast": 2, "all_reduced": sums, "all_gathered": 1}
        (worker, *_) = workers_of(os.getpid())
        stream = llm.stream_deltas(["abc"], SamplingParams(max_tokens=20, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"Rank 1 .* \(process {worker}\) was killed by"):
            list(stream)
        assert time.monotonic() - started < SOON


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory": 1000}, "kv_cache_memory 1000 bytes holds no block"),
        ({"speculative_config": {"method": "draft_model", "model": "x"}}, "draft_model"),
    ],
)
def test_ranks_end_if_another_part_cannot_be_built(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LLM.load(directory, device="cuda", tensor_parallel_size=2, **options)
    assert workers_of(os.getpid()) == []
