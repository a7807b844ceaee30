"""The ranks of `device="cuda"` without GPUs: threads, whose kernels Triton interprets on the CPU.

The code of a rank is `minigen.parallel.gpu`; only the messages are those of threads.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.kv_cache.paged import Batch
from minigen.model.attention import attend_packed
from minigen.model.transformer import build_transformer, dense_linear
from minigen.parallel.comm import Comm, MessageCounters, TracedComm, run_ranks
from minigen.parallel.runner import Step
from minigen.parallel.sharding import local_config
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from minigen_course.lab.triton_interpreter import interpreted, triton_part

PATIENCE = 300.0  # seconds that a rank waits for the others


@dataclass(frozen=True)
class PromptOnRanks:
    """The logits of a prompt on every rank and in plain torch, and rank 0's messages by kind."""

    logits: tuple[Float[Tensor, "tokens vocab"], ...]
    expected: Float[Tensor, "tokens vocab"]
    num_messages: dict[str, int]


def run_prompt(
    checkpoint: Checkpoint, num_ranks: int, token_ids: list[int], num_layers: int
) -> PromptOnRanks:
    """Run a prompt through a model's first layers, on ranks as with a GPU each, and in plain torch.

    All numbers are float32. A layer takes about half a second. Raises `OptionError` if Triton is
    not installed.
    """
    windows = checkpoint.config.sliding_windows[:num_layers]
    config = replace(checkpoint.config, num_layers=num_layers, sliding_windows=windows)
    shorter = replace(checkpoint, config=config)
    trace, counters = Trace(), MessageCounters()

    def work(comm: Comm) -> Tensor:
        own = TracedComm(comm, trace) if comm.rank == 0 else comm
        return _run_rank(shorter, own, token_ids)

    with interpreted(), trace.subscribed(Timeline(on_message=counters)):
        logits = tuple(run_ranks(num_ranks, work, timeout=PATIENCE))
    return PromptOnRanks(logits, _in_plain_torch(shorter, token_ids), dict(counters.num_messages))


def _run_rank(checkpoint: Checkpoint, comm: Comm, token_ids: list[int]) -> Tensor:
    """Load a share and run one step with it, whose tokens are in block 1 of the KV cache."""
    gpu = triton_part("minigen.parallel.gpu")
    pools = triton_part("minigen.kernels.triton.attention")
    steps = triton_part("minigen.kernels.triton.runner")
    cpu, dtype, length = torch.device("cpu"), torch.float32, len(token_ids)
    rank = gpu.GpuRank(comm, comm, cpu, dtype, obstacle=None)
    share = local_config(checkpoint.config, comm.rank, comm.num_ranks)
    heads = (share.kv_heads, length, share.head_dim)
    pool = pools.DevicePool(share.num_layers, 2, *heads, dtype, cpu)
    model, windows = gpu.share_model(rank, checkpoint), checkpoint.config.sliding_windows
    runner = gpu.GpuRankRunner(rank, steps.DeviceSteps(model, pool, windows, 1, sizes=()))
    places = torch.arange(length)
    batch = Batch(
        token_ids=torch.tensor(token_ids),
        positions=places,
        slots=length + places,
        query_starts=[0, length],
        context_lens=torch.tensor([length]),
        block_tables=torch.tensor([[1]]),
        logits_rows=places,
        num_decodes=0,
    )
    logits: Tensor = runner.run(Step([], batch))
    return logits


@torch.inference_mode()
def _in_plain_torch(checkpoint: Checkpoint, token_ids: list[int]) -> Tensor:
    config, linear = checkpoint.config, dense_linear(torch.float32)
    model = build_transformer(config, checkpoint.tensors, torch.float32, linear)
    attend = attend_packed([len(token_ids)], config.sliding_windows)
    return model.logits(model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend))
