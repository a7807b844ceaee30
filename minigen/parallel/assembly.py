"""A model split over ranks, from a checkpoint and options: rank 0's runner, and everybody else's.

Rank 0 starts the other ranks as processes of this machine, or finds them started by `torchrun`,
and tells them by a first broadcast what to load. From then on they follow it.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from minigen.cache.manager import BlockManager
from minigen.cache.paged import KVPool
from minigen.checkpoint import Checkpoint, open_checkpoint
from minigen.errors import OptionError, WorkerError
from minigen.parallel.comm import Comm, TracedComm, joined_comm, local_comm
from minigen.parallel.runner import CommThread, LeadRunner, RankRunner, follow
from minigen.parallel.shard import local_config
from minigen.parallel.sharded import build_share
from minigen.parallel.workers import Workers
from minigen.runners import DTYPES, linears, memory_for, one_thread
from minigen.trace import Trace


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
    max_batch_tokens: int,
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
    return LeadRunner(runner, hand, manager, max_batch_tokens, close)


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
            f"torchrun started {started} ranks, but tensor_parallel is {num_ranks}: they must be "
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
