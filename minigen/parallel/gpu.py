"""Tensor parallelism on GPUs: a rank has a GPU, and runs its share of the model in kernels.

Two groups connect the ranks. Over `control` (gloo, between CPUs) rank 0 broadcasts each step, as
`minigen.parallel.runner` describes. Over `data` (NCCL, between GPUs) the shares are joined inside a
step. A GPU executes NCCL's messages in the order of its own queue, so no CPU waits for them, and a
CUDA graph can hold them. In Triton's interpreter, on a CPU, both groups are the same one. Sources:
Shoeybi et al. 2019 (Megatron-LM); NCCL's documentation, "Using NCCL with CUDA Graphs".
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.errors import OptionError, WorkerError
from minigen.kernels.triton.attention import DevicePool
from minigen.kernels.triton.kernel_model import KernelModel, kernel_model
from minigen.kernels.triton.runner import DeviceSteps, captured_sizes
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.transformer import build_transformer, dense_linear
from minigen.parallel.comm import TIMEOUT, Comm, GroupComm, TracedComm
from minigen.parallel.launch import receive_settings, send_settings, start_ranks, torchrun_rank
from minigen.parallel.runner import (
    POLL_SECONDS,
    DriverRunner,
    Step,
    receive_step,
    run_steps,
    send_keepalive,
)
from minigen.parallel.sharding import (
    embed_share,
    gather_logits,
    local_config,
    shard_tensors,
    span,
)
from minigen.trace.events import Trace

_INTERPRETED = "Triton's interpreter has none"
_NAP_SECONDS = 2e-5  # between two looks at the GPU's event


@dataclass(frozen=True)
class SplitRanks:
    """The `minigen.kernels.triton.kernel_model.Ranks` of a share, over messages between GPUs."""

    comm: Comm
    vocab: int
    first_token: int

    @property
    def adds_residual(self) -> bool:
        """Whether this rank adds the residual stream to its part of a sum: rank 0 does."""
        return self.comm.rank == 0

    def embed(
        self, embedding: Float[Tensor, "share hidden"], token_ids: Int64[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the tokens' embeddings, of which each rank has a share."""
        return embed_share(embedding, token_ids, self.first_token, self.comm)

    def sum(self, part: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the sum of all ranks' parts."""
        return self.comm.all_reduce(part)

    def join(self, part: Float[Tensor, "rows share"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the whole vocabulary, of which each rank has a share."""
        return gather_logits(part, self.vocab, self.comm)


@dataclass(frozen=True)
class GpuSettings:
    """What rank 0 sends first: the model, and where the ranks compute.

    `device` is "cuda", or "cpu" for Triton's interpreter. `rendezvous` is the file through which
    the ranks' GPUs meet; None under `torchrun`.
    """

    path: str
    device: str
    dtype: str
    rendezvous: str | None


@dataclass(frozen=True)
class StepSizes:
    """What rank 0 sends when it knows the memory of all ranks: the sizes of pool and steps."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_blocks: int  # of one sequence


@dataclass(frozen=True)
class GpuRank:
    """A connected rank: its device, and its messages between CPUs and between GPUs.

    `obstacle` is why messages cannot be part of a CUDA graph, or None if they can.
    """

    control: Comm
    data: Comm
    device: torch.device
    dtype: torch.dtype
    obstacle: str | None


def connect_rank(control: Comm, settings: GpuSettings) -> GpuRank:
    """Connect this rank's GPU with the others', and try whether a CUDA graph can hold a message."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    if settings.device == "cpu":
        return GpuRank(control, control, torch.device("cpu"), dtype, _INTERPRETED)
    device = torch.device("cuda", local_gpu(control.rank))
    torch.cuda.set_device(device)
    data = nccl_comm(control.rank, control.num_ranks, settings.rendezvous)
    return GpuRank(control, data, device, dtype, _capture_obstacle(control, data, device))


def local_gpu(rank: int) -> int:
    """Return the index of the rank's GPU on its machine: torchrun's LOCAL_RANK, or the rank."""
    return rank if torchrun_rank() is None else int(os.environ["LOCAL_RANK"])


def nccl_comm(rank: int, num_ranks: int, rendezvous: str | None) -> GroupComm:
    """Connect this thread's current GPU with the other ranks' over NCCL, at their first message.

    The ranks meet at the file `rendezvous`; without one, as `torchrun` has set them up.
    """
    if rendezvous is None:
        return GroupComm(dist.new_group(backend="nccl", timeout=TIMEOUT))
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    return GroupComm(nccl(dist.FileStore(rendezvous, num_ranks), rank, num_ranks, options))


def _capture_obstacle(control: Comm, data: Comm, device: torch.device) -> str | None:
    """Return why a CUDA graph cannot hold an all-reduce, the same on every rank; None if it can.

    All ranks capture one, agree that all of them could, and compare what it computes.
    """
    ones = torch.ones(1, device=device)
    data.all_reduce(ones.clone())  # the first message connects the GPUs
    graph, stream, total = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), ones.clone()
    reason = None
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            total = data.all_reduce(total.copy_(ones))
    except (RuntimeError, WorkerError) as error:
        reason = str(error).splitlines()[0]
    if any(gather_numbers(control, int(reason is not None))):
        return reason or "another rank could not capture an all-reduce"
    graph.replay()
    is_wrong = float(total) != control.num_ranks
    if any(gather_numbers(control, int(is_wrong))):
        return "a captured all-reduce gave a wrong sum"
    return None


def gather_numbers(control: Comm, number: int) -> list[int]:
    """Return every rank's number, in order of ranks, on every rank."""
    found: list[int] = control.all_gather(torch.tensor([number])).tolist()
    return found


def free_memory(rank: GpuRank) -> list[int]:
    """Return the free bytes of every rank's GPU, in order; of a CPU, one GiB."""
    free = 2**30
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch still caches for earlier models counts as free
        free, _ = torch.cuda.mem_get_info(rank.device)
    return gather_numbers(rank.control, free)


def share_model(rank: GpuRank, checkpoint: Checkpoint) -> KernelModel:
    """Load this rank's share of the model onto its GPU; only these bytes are read."""
    config, data = checkpoint.config, rank.data
    shares = shard_tensors(checkpoint.tensors, config, data.rank, data.num_ranks)
    smaller = local_config(config, data.rank, data.num_ranks)
    make_linear = dense_linear(rank.dtype, rank.device)
    model = build_transformer(smaller, shares, rank.dtype, make_linear)
    first_token = span(config, "vocab", data.rank, data.num_ranks).start
    ranks = SplitRanks(data, config.vocab_size, first_token)
    return kernel_model(model, config.max_positions, rank.device, ranks)


def load_share(rank: GpuRank, checkpoint: Checkpoint, sizes: StepSizes) -> "GpuRankRunner":
    """Load the model's share and its KV cache, and capture decode steps; all ranks call this.

    Raises `OptionError` if a rank's GPU has too little memory.
    """
    smaller = local_config(checkpoint.config, rank.data.rank, rank.data.num_ranks)
    heads = (smaller.kv_heads, sizes.block_size, smaller.head_dim)
    parts = None
    try:
        model = share_model(rank, checkpoint)
        pool = DevicePool(smaller.num_layers, sizes.num_blocks, *heads, rank.dtype, rank.device)
        parts = model, pool
    except torch.cuda.OutOfMemoryError:
        pass  # the other ranks must hear of it
    full = gather_numbers(rank.control, int(parts is None))
    if parts is None or any(full):
        raise OptionError(
            f"The GPU of rank {full.index(1)} has too little free memory for its share of the "
            f"weights and num_blocks {sizes.num_blocks} of {sizes.block_size} tokens each."
        )
    captured = captured_sizes(sizes.max_num_seqs) if rank.obstacle is None else ()
    windows = checkpoint.config.sliding_windows
    return GpuRankRunner(rank, DeviceSteps(*parts, windows, sizes.max_blocks, captured))


class GpuRankRunner:
    """Runs one rank's share of every step on its GPU: a `minigen.parallel.runner.StepRunner`."""

    def __init__(self, rank: GpuRank, steps: DeviceSteps):
        self.rank, self.steps, self.block_size = rank, steps, steps.pool.block_size

    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """Return the logits, equal on every rank, on the device.

        Rank 0 returns when its GPU has finished. The others only queue the work, and then wait for
        the next step, so they hear of the end of rank 0 while their GPUs are still busy.
        """
        logits = self.steps.step(step.copies, step.batch)
        if self.rank.device.type == "cuda" and self.rank.control.rank == 0:
            self._wait()
        return logits

    def release(self) -> None:
        """Free the captured steps, and then end NCCL's messages, which waits for those."""
        self.steps.release()
        _abort(self.rank.data)

    def _wait(self) -> None:
        """Wait for the GPU. Raises `WorkerError` if a rank ends that this GPU may be waiting for.

        NCCL would wait for that rank forever, so from time to time a keepalive goes to all ranks.
        """
        finished = torch.cuda.Event()
        finished.record()
        look = time.monotonic() + POLL_SECONDS
        while not finished.query():
            time.sleep(_NAP_SECONDS)
            if time.monotonic() > look:
                look += POLL_SECONDS
                try:
                    send_keepalive(self.rank.control)
                except WorkerError:
                    self.release()  # else this GPU would never be free again
                    raise


def _abort(data: Comm) -> None:
    """End the messages between GPUs, also those that would never be complete."""
    comm = data.comm if isinstance(data, TracedComm) else data
    if isinstance(comm, GroupComm) and "nccl" in comm.group.name():
        comm.group.abort()


def run_gpu_worker(
    control: Comm, values: dict[str, Any], checkpoint: Checkpoint | None = None
) -> None:
    """Connect, load and run as a rank above 0 until rank 0 stops; `values` are a `GpuSettings`.

    `checkpoint` replaces the path in the settings. Raises `WorkerError` if rank 0 ends
    unexpectedly, or if the GPU of some rank has too little memory.
    """
    settings = GpuSettings(**values)
    rank = connect_rank(control, settings)
    free_memory(rank)
    sizes = receive_settings(control)
    if not sizes:  # rank 0 could not build its other parts
        receive_step(control)
        return
    own = checkpoint or open_checkpoint(Path(settings.path))
    try:
        runner = load_share(rank, own, StepSizes(**sizes))
    except OptionError as error:
        raise WorkerError(str(error)) from error
    run_steps(runner, control)


class GpuGroup:
    """The connected ranks of one model, as rank 0 sees them, before and after it is loaded.

    `device` is "cuda", or "cpu" for Triton's interpreter. `free_bytes` is the smallest free memory
    of all ranks' GPUs. `obstacle` is why decode steps are not CUDA graphs, or None. Under
    `torchrun` the constructor never returns on any other rank. Raises `WorkerError` if another
    rank does not start.
    """

    def __init__(
        self, checkpoint: Checkpoint, num_ranks: int, device: str, dtype: torch.dtype, trace: Trace
    ):
        self._checkpoint, self._trace = checkpoint, trace
        asked = f"tensor_parallel_size is {num_ranks}"
        self._started = start_ranks(checkpoint, num_ranks, trace, asked)
        self._driver: DriverRunner | None = None
        met = self._started.rendezvous
        settings = GpuSettings(
            path=str(checkpoint.path.resolve()),
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            rendezvous=None if met is None else f"{met}-nccl",
        )
        self._is_waiting = True  # the other ranks wait for sizes
        try:
            connect = partial(_connect_all_ranks, settings, trace)
            self._rank, free = self._started.comm_thread.call(connect)
        except BaseException:
            self._started.close()
            raise
        self.free_bytes, self.obstacle = min(free), self._rank.obstacle

    def start(
        self, sizes: StepSizes, manager: BlockManager, max_num_batched_tokens: int
    ) -> DriverRunner:
        """Load the model on all ranks, and return rank 0's runner."""
        load = partial(_load_all_ranks, self._rank, self._checkpoint, sizes)
        self._is_waiting = False
        try:
            runner = self._started.comm_thread.call(load)
        except BaseException:
            self._started.close()
            raise
        close = partial(_release_and_close, runner, self._started.close)
        thread = self._started.comm_thread
        self._driver = DriverRunner(
            runner, thread, manager, max_num_batched_tokens, close, self._trace
        )
        return self._driver

    def close(self) -> None:
        """End the other ranks, whether the model is loaded or not; may be called twice."""
        if self._driver is not None:
            self._driver.close()
        if self._is_waiting:
            self._is_waiting = False
            with suppress(WorkerError):  # they may have ended
                self._started.comm_thread.call(partial(send_settings, {}))
            _abort(self._rank.data)
            self._started.comm_thread.end()
            self._started.close()


def _connect_all_ranks(
    settings: GpuSettings, trace: Trace, control: Comm
) -> tuple[GpuRank, list[int]]:
    send_settings(asdict(settings), control)
    rank = connect_rank(control, settings)
    free = free_memory(rank)
    if rank.data is not control:
        rank = GpuRank(
            control, TracedComm(rank.data, trace), rank.device, rank.dtype, rank.obstacle
        )
    return rank, free


def _load_all_ranks(
    rank: GpuRank, checkpoint: Checkpoint, sizes: StepSizes, control: Comm
) -> GpuRankRunner:
    send_settings(asdict(sizes), control)
    return load_share(rank, checkpoint, sizes)


def _release_and_close(runner: GpuRankRunner, close: Callable[[], None]) -> None:
    runner.release()
    close()
