"""Starts a model split over ranks: rank 0 is the driver, the other ranks are worker processes.

The driver starts the workers, or finds them started by `torchrun`, and a first broadcast names the
model to load. From then on the workers compute the driver's steps. Each worker is a new process,
`python -m minigen.parallel.worker`, never a fork or a copy of the caller's `__main__`. Its stdin is
a pipe without data: the pipe closes when the driver ends for any reason, and then the worker ends.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minigen.assembly.cpu import DTYPES, linears
from minigen.assembly.torch_layers import memory_for, one_thread
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.child_process import start_module
from minigen.errors import OptionError, WorkerError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import KVPool
from minigen.model.transformer import build_transformer
from minigen.parallel.comm import Comm, SoloComm, TracedComm, joined_comm, local_comm
from minigen.parallel.context_runner import ContextRunner
from minigen.parallel.pipeline import Clock, Place, StageRunner, build_stage, stage_layers
from minigen.parallel.runner import CommThread, DriverRunner, RankRunner, StepRunner, run_steps
from minigen.parallel.sharding import build_share, local_config
from minigen.parallel.stopped import LATER_SECONDS, Siblings, StoppedProcesses, describe_stop
from minigen.trace.events import Trace

_JOINED: set[str] = set()  # the run of torchrun whose ranks have a model, if there is one
LOST_ANOTHER = 3  # the exit status of a worker that ended because another rank ended
_GRACE_SECONDS = 1.0  # time until the end of a process is visible


class Workers:
    """The processes of ranks 1 to `num_ranks - 1`; the ranks connect through a rendezvous file."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="minigen-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = StoppedProcesses()
        try:
            for rank in range(1, num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.close()
            raise

    @property
    def rendezvous(self) -> Path:
        """The file through which the ranks find each other."""
        return self._folder / "rendezvous"

    @property
    def process_ids(self) -> list[int]:
        """The process ids of ranks 1 and up, in order."""
        return [process.pid for process in self._processes]

    def check(self, error: WorkerError | None = None) -> None:
        """Raise `WorkerError` if a worker has ended or is stopped, and end all workers.

        `error` is an error of rank 0. In that case, wait up to a second for the end of a worker
        that may have caused it. If no worker ends, the error is rank 0's own; end all workers.
        """
        deadline = time.monotonic() + (0.0 if error is None else _GRACE_SECONDS)
        ended = self._ended()
        if ended and set(ended.values()) == {LOST_ANOTHER}:  # the end of the other comes to light
            deadline = time.monotonic() + _GRACE_SECONDS
        while set(ended.values()) <= {LOST_ANOTHER} and time.monotonic() < deadline:
            time.sleep(0.01)
            ended = self._ended()
        stopped = self._stopped.look(self.process_ids)
        if ended:
            rank = min(ended, key=lambda rank: (ended[rank] == LOST_ANOTHER, rank))
            what, log_line = _describe_exit(ended[rank]), self._last_log_line(rank)
        elif stopped is not None:
            rank, what, log_line = self.process_ids.index(stopped) + 1, describe_stop(), ""
        else:
            if error is not None:
                self.close()
            return
        process_id = self.process_ids[rank - 1]
        self.close()
        raise WorkerError(
            f"Rank {rank} of {self.num_ranks} (process {process_id}) {what}, so the model is "
            f"incomplete and all ranks have been stopped; load it again.{log_line}"
        )

    def close(self) -> None:
        """End all workers, and delete their files."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        with self._log(rank).open("wb") as log:
            return start_module(
                "minigen.parallel.worker",
                *(str(rank), str(self.num_ranks), str(self.rendezvous)),
                stdout=log,
                stderr=log,
            )

    def _ended(self) -> dict[int, int]:
        polls = {rank: process.poll() for rank, process in enumerate(self._processes, start=1)}
        return {rank: status for rank, status in polls.items() if status is not None}

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _last_log_line(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        lines = text.strip().splitlines()
        return f" The last line of its log: {lines[-1].strip()}" if lines else ""


def _describe_exit(status: int) -> str:
    if status < 0:
        known = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        return f"was killed by {known.get(-status, f'signal {-status}')}"
    return f"ended with status {status}"


@dataclass(frozen=True)
class Settings:
    """The settings that rank 0 sends to every rank."""

    path: str
    form: str
    block_size: int
    num_blocks: int
    num_threads: int
    num_stages: int = 1
    max_micro_batches: int = 1
    cut: str = "tensor"  # a shard of the weights on each rank; "context": a part of the tokens
    dealt: SequenceOf[int] | None = None  # the layers of each stage; equal numbers if None


def start_driver(
    checkpoint: Checkpoint,
    settings: Settings,
    num_ranks: int,
    manager: BlockManager,
    max_num_batched_tokens: int,
    trace: Trace,
) -> DriverRunner:
    """Start all ranks, load the model on them, and return rank 0's runner.

    Under `torchrun` this never returns on any other rank. Raises `WorkerError` if another rank does
    not start.
    """
    started = start_ranks(checkpoint, num_ranks, trace, _asked(settings, num_ranks))
    try:
        load = partial(_load_all_ranks, checkpoint, settings, trace)
        runner = started.comm_thread.call(load)
    except BaseException:
        started.close()
        raise
    return DriverRunner(
        runner, started.comm_thread, manager, max_num_batched_tokens, started.close, trace
    )


def _asked(settings: Settings, num_ranks: int) -> str:
    """Return the options that ask for this number of ranks, as the part of a sentence."""
    if settings.num_stages == 1:
        return f"{settings.cut}_parallel_size is {num_ranks}"
    per_stage = num_ranks // settings.num_stages
    return (
        f"pipeline_parallel_size {settings.num_stages} times tensor_parallel_size {per_stage} "
        f"is {num_ranks}"
    )


@dataclass(frozen=True)
class StartedRanks:
    """The connected ranks, as rank 0 sees them: its communication thread, and what ends them.

    `rendezvous` is the file through which they met; None under `torchrun`.
    """

    comm_thread: CommThread
    close: Callable[[], None]
    rendezvous: Path | None


def start_ranks(checkpoint: Checkpoint, num_ranks: int, trace: Trace, asked: str) -> StartedRanks:
    """Start all ranks, or join those of `torchrun`, and connect them; nothing is loaded yet.

    Under `torchrun` this never returns on any other rank: that process runs as a worker with this
    checkpoint, and ends with rank 0. Raises `WorkerError` if another rank does not start, and
    `OptionError` if `torchrun` started another number of ranks than was `asked` for.
    """
    connect: Callable[[], Comm]
    watch: Callable[[WorkerError | None], None]
    close: Callable[[], None]
    rendezvous = None
    if torchrun_rank() is None:
        workers = Workers(num_ranks)
        rendezvous = workers.rendezvous
        connect = partial(local_comm, 0, num_ranks, rendezvous)
        watch, close = workers.check, workers.close
    else:
        torchrun = _torchrun_comm(num_ranks, asked)
        if torchrun.rank > 0:
            Siblings(LATER_SECONDS).watch()
            run_worker(torchrun, checkpoint)
            exit_process()
        watch = Siblings().check
        connect, close = partial(_return_comm, torchrun), dist.destroy_process_group
    try:
        comm_thread = CommThread(lambda: TracedComm(connect(), trace), watch)
    except BaseException:
        close()
        raise
    return StartedRanks(comm_thread, close, rendezvous)


def run_worker(comm: Comm, checkpoint: Checkpoint | None = None) -> None:
    """Receive the settings, load this rank's shard, and run steps until rank 0 stops.

    `checkpoint` replaces the path in the settings, for a rank on another machine. Raises
    `WorkerError` if rank 0 ends unexpectedly.
    """
    values = receive_settings(comm)
    if "device" in values:
        from minigen.parallel.gpu import run_gpu_worker

        run_gpu_worker(comm, values, checkpoint)
        return
    settings = Settings(**values)
    runner = _load(checkpoint or open_checkpoint(Path(settings.path)), settings, comm, None)
    _wait_for_all(comm)
    run_steps(runner, comm)


def exit_process() -> NoReturn:
    """Exit a worker after rank 0 has ended, without stopping gloo's threads.

    Those may be in the middle of an operation, and stopping them would abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def torchrun_rank() -> int | None:
    """Return this process's rank if `torchrun` started it, otherwise None."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def num_local_ranks(num_ranks: int) -> int:
    """Return how many of the ranks are on this machine: all of them, unless `torchrun` says."""
    here = os.environ.get("LOCAL_WORLD_SIZE") if torchrun_rank() is not None else None
    return num_ranks if here is None else int(here)


def _torchrun_comm(num_ranks: int, asked: str) -> Comm:
    started, run = int(os.environ["WORLD_SIZE"]), os.environ["TORCHELASTIC_RUN_ID"]
    if started != num_ranks:
        raise OptionError(f"torchrun started {started} ranks, but {asked}; they must be equal.")
    if run in _JOINED:
        raise OptionError(
            "The ranks that torchrun started run one model until they end; load only one."
        )
    _JOINED.add(run)
    return joined_comm()


def _return_comm(comm: Comm) -> Comm:
    return comm


def _load_all_ranks(
    checkpoint: Checkpoint, settings: Settings, trace: Trace, comm: TracedComm
) -> StepRunner:
    send_settings(asdict(settings), comm)
    runner = _load(checkpoint, settings, comm, trace)
    _wait_for_all(comm)
    return runner


def _load(
    checkpoint: Checkpoint, settings: Settings, comm: Comm, trace: Trace | None
) -> StepRunner:
    if settings.num_stages > 1:
        return load_stage(checkpoint, settings, comm, trace)
    if settings.cut == "context":
        return _load_part_of_context(checkpoint, settings, comm)
    return _load_shard(checkpoint, settings, comm)


def _load_part_of_context(checkpoint: Checkpoint, settings: Settings, comm: Comm) -> ContextRunner:
    """Load all weights, with memory for this rank's slice of every block."""
    config, dtype = checkpoint.config, DTYPES[settings.form]
    sizes = (config.kv_heads, settings.block_size // comm.num_ranks, config.head_dim)
    with memory_for(settings.num_blocks, settings.block_size):
        pool = KVPool(config.num_layers, settings.num_blocks, *sizes, dtype)
    with one_thread():
        parts = (checkpoint.tensors, dtype, *linears(settings.form, settings.num_threads))
        model = build_transformer(config, *parts)
    return ContextRunner(model, pool, config.sliding_windows, comm, settings.num_threads)


def _load_shard(checkpoint: Checkpoint, settings: Settings, comm: Comm) -> RankRunner:
    dtype = DTYPES[settings.form]
    smaller = local_config(checkpoint.config, comm.rank, comm.num_ranks)
    sizes = (smaller.kv_heads, settings.block_size, smaller.head_dim)
    with memory_for(settings.num_blocks, settings.block_size):
        pool = KVPool(smaller.num_layers, settings.num_blocks, *sizes, dtype)
    make_linear, finish_head = linears(settings.form, settings.num_threads)
    with one_thread():
        model = build_share(
            checkpoint.config, checkpoint.tensors, dtype, make_linear, comm, finish_head
        )
    return RankRunner(model, pool, smaller.sliding_windows, settings.num_threads)


def load_stage(
    checkpoint: Checkpoint, settings: Settings, comm: Comm, trace: Trace | None
) -> StageRunner:
    """Load a rank's share of its stage; the `trace` is that of rank 0."""
    dtype, config = DTYPES[settings.form], checkpoint.config
    place = Place(comm.rank, comm.num_ranks, settings.num_stages)
    of_stage = comm.subgroup(place.of_stage) if place.ranks_per_stage > 1 else SoloComm()
    layers = stage_layers(config.num_layers, settings.num_stages, settings.dealt)[place.stage]
    smaller = local_config(config, of_stage.rank, of_stage.num_ranks)
    sizes = (smaller.kv_heads, settings.block_size, smaller.head_dim)
    with memory_for(settings.num_blocks, settings.block_size):
        pool = KVPool(len(layers), settings.num_blocks, *sizes, dtype)
    make_linear, finish_head = linears(settings.form, settings.num_threads)
    with one_thread():
        stage = build_stage(
            config, checkpoint.tensors, dtype, make_linear, layers, of_stage, finish_head
        )
    untraced = comm.comm if isinstance(comm, TracedComm) else comm
    return StageRunner(
        stage,
        pool,
        config.sliding_windows[layers.start : layers.stop],
        settings.num_threads,
        comm,
        Clock(untraced, place, trace),
        config.vocab_size,
        config.hidden,
        dtype,
        settings.max_micro_batches,
    )


def send_settings(settings: dict[str, Any], comm: Comm) -> None:
    """Broadcast settings, which JSON can hold, to all ranks."""
    text = json.dumps(settings).encode()
    comm.broadcast(torch.tensor([len(text)]))
    comm.broadcast(torch.tensor(list(text)))


def receive_settings(comm: Comm) -> dict[str, Any]:
    """Receive the settings that rank 0 sends."""
    (length,) = comm.broadcast(torch.zeros(1, dtype=torch.int64)).tolist()
    text = bytes(comm.broadcast(torch.zeros(length, dtype=torch.int64)).tolist())
    found: dict[str, Any] = json.loads(text)
    return found


def _wait_for_all(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(1))
