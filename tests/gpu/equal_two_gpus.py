"""A model over two GPUs gives what plain torch gives, and ends as a whole.

In Triton's interpreter the same ranks are two processes with a CPU each, and gloo takes the place
of NCCL.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.workloads import below_likeliest
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.errors import WorkerError
from minigen.model.transformer import build_transformer, dense_linear
from tests.gpu.contexts import DEVICE
from tests.gpu.processes import run_python
from tests.gpu.two_ranks import QWEN3, answers, save_model, split_engine

FOUND = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and FOUND < 2,
    reason=f"two ranks need two GPUs, and torch finds {FOUND}: NCCL between GPUs was not tried",
)
MOST_MARGIN = 0.3 if DEVICE == "cuda" else 1e-3
SOON = 5.0  # seconds


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_model(tmp_path_factory.mktemp("two"))


def workers() -> list[int]:
    """Return the processes that this one has started, as Linux lists them."""
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(each) for path in listed for each in path.read_text("utf-8").split()]


def test_two_ranks_continue_as_plain_torch_does_also_after_one_was_killed(
    checkpoint: Checkpoint,
) -> None:
    model = build_transformer(QWEN3, checkpoint.tensors, torch.float32, dense_linear(torch.float32))
    for _ in range(2):  # the second time after the end of a rank
        with split_engine(checkpoint) as (engine, plan):
            if DEVICE == "cuda":
                said = plan.describe()
                assert said["runner"].endswith("decode steps as CUDA graphs with their messages")
                free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
                assert plan.default_kv_bytes <= 2 * max(free)
            sequences = answers(engine, 3)
            margin = below_likeliest(model, sequences, QWEN3.sliding_windows)
            assert float(margin.max()) < MOST_MARGIN
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(WorkerError, match=rf"\(process {worker}\) was killed by SIGKILL"):
                answers(engine, 100)
            assert time.monotonic() - started < SOON
        assert workers() == []


def test_two_ranks_that_torchrun_started_are_joined(checkpoint: Checkpoint) -> None:
    with split_engine(checkpoint) as (engine, _):
        expected = [each.output_ids for each in answers(engine, 3)]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    address = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    interpreted = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = ("-m", "tests.gpu.two_ranks", str(checkpoint.path))
    assert run_python(*torchrun, *address, *script, **interpreted).strip() == str(expected)
