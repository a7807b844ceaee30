"""A model split over ranks: rank 0's runner, and the processes of the other ranks on this machine.

Rank 0 starts the other ranks, or finds them started by `torchrun`, and tells them by a first
broadcast what to load. From then on they follow it. Each is `python -m minigen.parallel.worker`,
never a fork or a copy of the caller's `__main__`. A worker's stdin is a pipe without data: when
rank 0 ends, in whatever way, it closes, and the worker ends, too.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from minigen.assembly.cpu import DTYPES, linears, memory_for, one_thread
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.child_process import start_module
from minigen.errors import OptionError, WorkerError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import KVPool
from minigen.parallel.comm import Comm, TracedComm, joined_comm, local_comm
from minigen.parallel.runner import CommThread, LeadRunner, RankRunner, follow
from minigen.parallel.sharding import build_share, local_config
from minigen.trace.events import Trace

LOST_ANOTHER = 3  # the exit status of a worker that ended because another did
_GRACE = 1.0  # seconds in which a process that has ended is seen to have done so


class Workers:
    """Processes for the ranks 1 to `num_ranks - 1`, who meet rank 0 at the file `meeting`."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="minigen-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.close()
            raise

    @property
    def meeting(self) -> Path:
        """Where the ranks find each other."""
        return self._folder / "meeting"

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up, in order."""
        return [process.pid for process in self._processes]

    def check(self, error: WorkerError | None = None) -> None:
        """Raises `WorkerError` if a worker has ended, and ends the others.

        With an `error` that rank 0 had, wait a moment for the one that ended and caused it; if
        none did, it is rank 0's own, and the end of all as well.
        """
        deadline = time.monotonic() + (0.0 if error is None else _GRACE)
        ended = self._ended()
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended = self._ended()
        if not ended:
            if error is not None:
                self.close()
            return
        rank = min(ended, key=lambda rank: (ended[rank] == LOST_ANOTHER, rank))
        message = (
            f"Rank {rank} of {self.num_ranks} (process {self.process_ids[rank - 1]}) "
            f"{_how(ended[rank])}, so the model is not whole any more and all ranks have been "
            f"ended; load it again.{self._last_words(rank)}"
        )
        self.close()
        raise WorkerError(message)

    def close(self) -> None:
        """End all of them, and forget their files."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + _GRACE
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
                *(str(rank), str(self.num_ranks), str(self.meeting)),
                stdout=log,
                stderr=log,
            )

    def _ended(self) -> dict[int, int]:
        polls = {rank: process.poll() for rank, process in enumerate(self._processes, start=1)}
        return {rank: status for rank, status in polls.items() if status is not None}

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _last_words(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        lines = text.strip().splitlines()
        return f" Its last words: {lines[-1].strip()}" if lines else ""


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@dataclass(frozen=True)
class Settings:
    """What every rank must know, as rank 0 has decided it."""

    path: str
    form: str
    block_size: int
    num_blocks: int
    num_threads: int


def lead(
    checkpoint: Checkpoint,
    settings: Settings,
    num_ranks: int,
    manager: BlockManager,
    max_num_batched_tokens: int,
    trace: Trace,
) -> LeadRunner:
    """The runner of rank 0, with all other ranks loaded and waiting.

    Under `torchrun` on any other rank it never returns: the process follows rank 0, and ends with
    it. Raises `WorkerError` if another rank does not come up.
    """
    connect: Callable[[], Comm]
    watch: Callable[[WorkerError | None], None] = _nobody_to_watch
    close: Callable[[], None]
    if torchrun_rank() is None:
        workers = Workers(num_ranks)
        connect = partial(local_comm, 0, num_ranks, workers.meeting)
        watch, close = workers.check, workers.close
    else:
        joined = _joined(num_ranks)
        if joined.rank > 0:
            follow_lead(joined, checkpoint)
            leave()
        connect, close = partial(_itself, joined), dist.destroy_process_group
    try:
        hand = CommThread(lambda: TracedComm(connect(), trace), watch)
        runner = hand.call(partial(_load_together, checkpoint, settings))
    except BaseException:
        close()
        raise
    return LeadRunner(runner, hand, manager, max_num_batched_tokens, close)


def follow_lead(comm: Comm, checkpoint: Checkpoint | None = None) -> None:
    """Load this rank's share of what rank 0 says, and follow it to the end.

    `checkpoint` is for another machine's files. Raises `WorkerError` if rank 0 goes before.
    """
    settings = _receive(comm)
    runner = _load(checkpoint or open_checkpoint(Path(settings.path)), settings, comm)
    _wait_for_all(comm)
    follow(runner, comm)


def leave() -> NoReturn:
    """End this process, whose rank 0 has ended, without taking gloo's threads apart: those may
    be in the middle of something, and would abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def torchrun_rank() -> int | None:
    """This process's rank if `torchrun` started it, otherwise None."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _joined(num_ranks: int) -> Comm:
    started = int(os.environ["WORLD_SIZE"])
    if started != num_ranks:
        raise OptionError(
            f"torchrun started {started} ranks, but tensor_parallel_size is {num_ranks}: they must be "
            "the same."
        )
    return joined_comm()


def _itself(comm: Comm) -> Comm:
    return comm


def _load_together(checkpoint: Checkpoint, settings: Settings, comm: Comm) -> RankRunner:
    _send(settings, comm)
    runner = _load(checkpoint, settings, comm)
    _wait_for_all(comm)
    return runner


def _load(checkpoint: Checkpoint, settings: Settings, comm: Comm) -> RankRunner:
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


def _send(settings: Settings, comm: Comm) -> None:
    text = json.dumps(asdict(settings)).encode()
    comm.broadcast(torch.tensor([len(text)]))
    comm.broadcast(torch.tensor(list(text)))


def _receive(comm: Comm) -> Settings:
    (length,) = comm.broadcast(torch.zeros(1, dtype=torch.int64)).tolist()
    text = bytes(comm.broadcast(torch.zeros(length, dtype=torch.int64)).tolist())
    return Settings(**json.loads(text))


def _wait_for_all(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(1))


def _nobody_to_watch(error: WorkerError | None) -> None:
    """`torchrun` watches the ranks that it started."""
