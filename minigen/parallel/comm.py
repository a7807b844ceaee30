"""Messages between the ranks of one model: three operations, four ways to carry them.

A rank is one of several workers that do the same at the same time, each on its own share; they are
numbered from 0. Every operation is a collective: all ranks call it, in the same order, with tensors
of the same shape, and none returns before all have given their part. Sources: MPI's collective
operations; Patarasuk and Yuan 2009 for the ring, and for what it costs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from minigen.errors import WorkerError
from minigen.trace.events import Event, EventKind, Trace

Result = TypeVar("Result")
MESSAGES = (EventKind.ALL_REDUCED, EventKind.ALL_GATHERED, EventKind.BROADCAST)
PATIENCE = timedelta(days=1)  # of a rank for the others; one that ends is noticed at once


@runtime_checkable
class Comm(Protocol):
    """What a rank needs of the others. What is passed in may be overwritten with the result."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, for every rank."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors side by side along the last axis, in order, for every rank."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, for every rank."""
        ...


@dataclass(frozen=True)
class SoloComm:
    """One rank alone: each message is to itself, and costs nothing."""

    rank: int = 0
    num_ranks: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class _Table:
    """Where the ranks of one process lay down their tensors, and wait for each other."""

    tensors: list[Tensor | None]
    barrier: threading.Barrier


@dataclass(frozen=True)
class ThreadComm:
    """A rank among the threads of one process; made by `thread_comms`, for tests and lessons.

    Raises `WorkerError` if another rank fails, or comes too late.
    """

    rank: int
    num_ranks: int
    _table: _Table

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(dim=0, dtype=x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0]

    def leave(self) -> None:
        """End the group: whoever waits for this rank gets an error instead of waiting."""
        self._table.barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Lay `x` down, and take a copy of what everybody laid down."""
        try:
            self._table.tensors[self.rank] = x
            self._table.barrier.wait()
            laid = [each.clone() for each in self._table.tensors if each is not None]
            self._table.barrier.wait()  # nobody may write the next before all have read this one
        except threading.BrokenBarrierError:
            raise WorkerError(f"Rank {self.rank} waited for a rank that did not come.") from None
        return laid


def thread_comms(num_ranks: int, timeout: float = 30.0) -> list[ThreadComm]:
    """The ranks of a group of threads, who wait `timeout` seconds for each other at most."""
    table = _Table([None] * num_ranks, threading.Barrier(num_ranks, timeout=timeout))
    return [ThreadComm(rank, num_ranks, table) for rank in range(num_ranks)]


def run_ranks(
    num_ranks: int, work: Callable[[ThreadComm], Result], timeout: float = 30.0
) -> list[Result]:
    """`work(comm)` in one thread a rank; returns each rank's result, in order.

    They wait `timeout` seconds for each other at most. Raises what the first rank raised that
    failed by itself, not by waiting for another.
    """
    comms = thread_comms(num_ranks, timeout)
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = work(comm)
        except Exception as error:
            errors.append(error)
            comm.leave()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]


@dataclass(frozen=True)
class GroupComm:
    """A rank among processes: torch.distributed, with gloo on CPUs and NCCL on GPUs.

    Raises `WorkerError` when another rank has gone.
    """

    group: Any  # a ProcessGroup, or one backend of it

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def num_ranks(self) -> int:
        return int(self.group.size())

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(lambda: self.group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self._wait(lambda: self.group.allgather([parts], [x]))
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(lambda: self.group.broadcast(x, 0))
        return x

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkerError(f"Rank {self.rank} lost another rank: {reason}.") from error


def local_comm(rank: int, num_ranks: int, meeting: Path) -> GroupComm:
    """A rank among processes of this machine, over gloo; they find each other through a file.

    `meeting` is that file, which need not exist. They listen at 127.0.0.1 only. Blocks until all
    ranks have come. Raises `WorkerError` if the file's folder is gone: torch would wait for it for
    minutes, and hold Python's lock, so that no thread could end this process.
    """
    if not meeting.parent.is_dir():
        raise WorkerError(f"{meeting.parent} is gone: rank 0 ended before the ranks had met.")
    gloo: Any = dist.ProcessGroupGloo  # its stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    return GroupComm(gloo(dist.FileStore(str(meeting), num_ranks), rank, num_ranks, options))


def joined_comm(backend: str = "gloo") -> GroupComm:
    """This process's rank among those that `torchrun` started, on one or several machines."""
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=PATIENCE)
    return GroupComm(dist.group.WORLD)


@dataclass(frozen=True)
class TracedComm:
    """Another comm, with every message told to a trace: its bytes on this rank, and its time."""

    comm: Comm
    trace: Trace

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._told(EventKind.ALL_REDUCED, self.comm.all_reduce, x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._told(EventKind.ALL_GATHERED, self.comm.all_gather, x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._told(EventKind.BROADCAST, self.comm.broadcast, x)

    def _told(self, kind: EventKind, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.trace.active:
            return operation(x)
        started_ns, num_bytes = time.perf_counter_ns(), x.nbytes
        made = operation(x)
        self.trace.emit(kind, bytes=num_bytes, duration_ns=time.perf_counter_ns() - started_ns)
        return made


@dataclass(eq=False)
class MessageCounters:
    """How many messages of each kind, their bytes, and the time in them; subscribe it to a trace.

    Bytes are those of the tensor that each rank puts in, however many of them the network carries.
    """

    num_messages: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if event.kind not in MESSAGES:
            return
        name = event.kind.value
        self.num_messages[name] = self.num_messages.get(name, 0) + 1
        self.num_bytes[name] = self.num_bytes.get(name, 0) + event.counts["bytes"]
        self.seconds[name] = self.seconds.get(name, 0.0) + event.counts["duration_ns"] / 1e9
