"""A context divided over real processes gives the answers of one, and ends as a whole."""

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.questions import candidates
from benchmarks.sure import keeping, sure_ones
from minigen import LLM, SamplingParams
from minigen.errors import OptionError, WorkerError
from minigen.parallel.comm import Comm, MessageCounters, local_comm
from minigen.trace.timeline import Timeline
from tests.processes import workers_of
from tests.ranks import GREEDY, answers, save_eight_heads
from tests.test_42_context_steps import tokens_of_200

SAMPLED = SamplingParams(seed=3, n=2, max_tokens=12, temperature=0.8, ignore_eos=True)
SOON = 5.0  # seconds

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # threads check them


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eight_heads(tmp_path_factory.mktemp("context"))


@contextmanager
def divided(directory: Path, num_ranks: int, **options: Any) -> Generator[LLM, None, None]:
    """Load a model in float32 whose context is divided over processes, which end with the block."""
    llm = LLM.load(directory, weights="float32", context_parallel_size=num_ranks, **options)
    try:
        yield llm
    finally:
        llm.close()


def pass_round(comm: Comm) -> list[torch.Tensor]:
    """Shift a small and a large tensor, and one in bfloat16, once round."""
    found = []
    for size, dtype in ((3, torch.float32), (1_000_000, torch.float32), (5, torch.bfloat16)):
        x = torch.full((size,), float(comm.rank), dtype=dtype)
        for _ in range(comm.num_ranks - 1):
            x = comm.shift(x)
        found.append(x)
    return found


# The program of one rank of a ring, without this module's imports.
PEER = f"""
import sys
from pathlib import Path
import torch
from minigen.parallel.comm import Comm, local_comm
{inspect.getsource(pass_round)}
pass_round(local_comm(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
"""


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_ring_of_processes_passes_tensors_of_any_size_on(num_ranks: int, tmp_path: Path) -> None:
    meeting = tmp_path / "rendezvous"
    peers = [
        subprocess.Popen([sys.executable, "-c", PEER, str(rank), str(num_ranks), str(meeting)])
        for rank in range(1, num_ranks)
    ]
    try:
        found = pass_round(local_comm(0, num_ranks, meeting))
    finally:
        assert [peer.wait(timeout=60) for peer in peers] == [0] * (num_ranks - 1)
    assert all(bool((x == 1).all()) for x in found), "after n - 1 shifts, that of the next rank"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_answers_are_those_of_one_process_with_preemptions_and_shared_prefixes(
    directory: Path, num_ranks: int
) -> None:
    crowded: dict[str, Any] = {"num_blocks": 11, "block_size": 4, "max_num_seqs": 6}
    alone = LLM.load(directory, weights="float32", **crowded)
    with divided(directory, num_ranks, **crowded) as llm:
        assert llm.describe()["ranks"] == f"{num_ranks} processes, over gloo"
        assert "ring" in llm.describe()["attention"]
        with llm.count_work() as counted:
            for params in (GREEDY, SAMPLED):
                assert answers(llm, params) == answers(alone, params)
        assert counted.preemptions > 0
        assert counted.tokens_cached > 0
        assert counted.blocks_copied > 0
        counters = MessageCounters()
        with llm.trace.subscribed(Timeline(on_message=counters)):
            llm.generate("abcdefgh" * 4, SamplingParams(max_tokens=2, ignore_eos=True))
    layers = alone.config.num_layers
    shifts = (num_ranks - 1) * layers
    assert counters.num_messages == {"broadcast": 4, "shifted": shifts, "all_gathered": layers}


@pytest.mark.long
def test_three_processes_give_the_answers_of_one(directory: Path) -> None:
    alone = LLM.load(directory, weights="float32", block_size=12)
    with divided(directory, 3, block_size=12) as llm:
        for params in (GREEDY, SAMPLED):
            assert answers(llm, params) == answers(alone, params)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_200_requests_with_preemptions_and_aborts_get_the_tokens_of_one_process(
    directory: Path, num_ranks: int
) -> None:
    small: dict[str, Any] = {"block_size": 12, "num_blocks": 7, "max_num_seqs": 6}
    with divided(directory, num_ranks, **small) as llm, llm.count_work() as counted:
        found = tokens_of_200(llm)
        assert llm.manager.num_available == 7
    assert found == tokens_of_200(LLM.load(directory, weights="float32", **small))
    assert sum(reason == "abort" for _, reason in found.values()) > 5
    assert counted.preemptions > 5


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_default_model_gives_the_answers_that_it_is_sure_of(
    default_llm: LLM, default_model_path: Path, num_ranks: int
) -> None:
    sure = sure_ones(default_llm, candidates()[::4])
    assert len(sure) > 20
    size = 12 if num_ranks == 3 else 16
    with divided(default_model_path, num_ranks, block_size=size) as llm:
        kept = keeping(llm, sure)
    assert kept["kept"] == kept["of"]


def test_a_killed_process_is_one_clear_error_soon(directory: Path) -> None:
    with divided(directory, 2) as llm:
        (worker,) = workers_of(os.getpid())
        stream = llm.stream_deltas(["abc"], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"Rank 1 of 2 \(process {worker}\) was killed by"):
            list(stream)
        assert time.monotonic() - started < SOON
    assert workers_of(os.getpid()) == []


@pytest.mark.long
def test_ranks_that_torchrun_started_are_joined(directory: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "minigen", "generate", "-m", str(directory), "--weights", "float32"]
    options = ["abcdefghij" * 3, "--context-parallel-size", "2", "--max-tokens", "12"]
    done = subprocess.run(
        [*command, *options], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    alone = LLM.load(directory, weights="float32")
    text = alone.generate("abcdefghij" * 3, SamplingParams(temperature=0, max_tokens=12)).text
    assert done.stdout.strip("\n") == text.strip("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "set only one of them above 1"),
        ({"device": "cuda"}, "runs on CPUs only"),
        ({"attention_backend": lambda pool, batch, windows: None}, "its own attention"),
        ({"block_size": 15}, r"block_size 15 cannot be divided .* such as 16\."),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' needs minigen's own attention in one"),
        ({"kv_cache_dtype": "int8", "weights": "int8"}, "kv_cache_dtype='int8'"),
        (
            {"speculative_config": {"method": "draft_model", "num_layers": 1}},
            "has no draft_model",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_starts(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LLM.load(directory, context_parallel_size=2, **({"weights": "float32"} | options))
    assert workers_of(os.getpid()) == []
