"""Messages between the ranks of one model: collective and point-to-point, four implementations.

A rank is one of several workers that do the same work at the same time, each on its own shard;
ranks are numbered from 0. In a collective operation all ranks call it, in the same order, with
tensors of the same shape, and it returns after all ranks have contributed. A point-to-point message
goes from one rank to another: one calls `send`, the other `receive`. Sources: MPI's operations;
Patarasuk and Yuan 2009 for ring all-reduce and its cost.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from minigen.errors import WorkerError
from minigen.trace.events import Event, EventKind, Trace

Numbers = Shaped[Tensor, "*axes"]
Part = Shaped[Tensor, "*axes part"]
Whole = Shaped[Tensor, "*axes whole"]
Result = TypeVar("Result")
TIMEOUT = timedelta(days=1)  # of waiting for other ranks; a rank that ends is noticed at once


@runtime_checkable
class Collectives(Protocol):
    """The collective operations of a rank. The input may be overwritten with the result."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: Numbers) -> Numbers:
        """Return the sum of all ranks' tensors, on every rank."""
        ...

    def all_gather(self, x: Part) -> Whole:
        """Return all ranks' tensors, concatenated in order along the last axis, on every rank."""
        ...

    def broadcast(self, x: Numbers) -> Numbers:
        """Return the tensor of rank 0, on every rank."""
        ...


@runtime_checkable
class Comm(Collectives, Protocol):
    """All operations of a rank."""

    def shift(self, x: Numbers) -> Numbers:
        """Return the tensor of rank - 1: every rank sends its own to rank + 1, the last to 0."""
        ...

    def send(self, x: Numbers, to: int) -> None:
        """Send a tensor to another rank; may wait until that rank calls `receive`."""
        ...

    def receive(self, x: Numbers, source: int) -> Numbers:
        """Return the next tensor that rank `source` sent here, which has `x`'s shape and dtype."""
        ...

    def subgroup(self, ranks: SequenceOf[int]) -> "Comm":
        """Return the messages among some ranks, numbered from 0 in this order.

        All of these ranks call it, this rank among them.
        """
        ...


@dataclass(frozen=True)
class SoloComm:
    """A single rank: every operation returns its input."""

    rank: int = 0
    num_ranks: int = 1

    def all_reduce(self, x: Numbers) -> Numbers:
        return x

    def all_gather(self, x: Part) -> Whole:
        return x

    def broadcast(self, x: Numbers) -> Numbers:
        return x

    def shift(self, x: Numbers) -> Numbers:
        return x

    def send(self, x: Numbers, to: int) -> None:
        raise WorkerError(f"There is one rank, so none can send to rank {to}.")

    def receive(self, x: Numbers, source: int) -> Numbers:
        raise WorkerError(f"There is one rank, so none can receive from rank {source}.")

    def subgroup(self, ranks: SequenceOf[int]) -> "SoloComm":
        return self


class _Exchange:
    """The shared state of the ranks of one process: their tensors, a barrier, and their mail.

    `mail[source, to]` are the tensors that one rank has sent to another; None says that a rank
    failed.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.tensors: list[Tensor | None] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=timeout)
        pairs = [(source, to) for source in range(num_ranks) for to in range(num_ranks)]
        self.mail: dict[tuple[int, int], SimpleQueue[Tensor | None]]
        self.mail = {pair: SimpleQueue() for pair in pairs}
        self._subgroups: dict[tuple[int, ...], _Exchange] = {}
        self._lock = threading.Lock()

    def subgroup(self, ranks: tuple[int, ...]) -> "_Exchange":
        """Return the state that these ranks share, the same object for all of them."""
        with self._lock:
            if ranks not in self._subgroups:
                self._subgroups[ranks] = _Exchange(len(ranks), self.timeout)
                if self.barrier.broken:
                    self._subgroups[ranks].abort()
            return self._subgroups[ranks]

    def abort(self) -> None:
        """Let all ranks that wait raise an error, also in subgroups."""
        with self._lock:
            self.barrier.abort()
            for queue in self.mail.values():
                queue.put(None)
            for each in self._subgroups.values():
                each.abort()


@dataclass(frozen=True)
class ThreadComm:
    """A rank among the threads of one process; created by `thread_comms`, for tests and lessons.

    Raises `WorkerError` if another rank fails or times out.
    """

    rank: int
    num_ranks: int
    _shared: _Exchange

    def all_reduce(self, x: Numbers) -> Numbers:
        return torch.stack(self._all_tensors(x)).sum(dim=0, dtype=x.dtype)

    def all_gather(self, x: Part) -> Whole:
        return torch.cat(self._all_tensors(x), dim=-1)

    def broadcast(self, x: Numbers) -> Numbers:
        return self._all_tensors(x)[0]

    def shift(self, x: Numbers) -> Numbers:
        return self._all_tensors(x)[(self.rank - 1) % self.num_ranks]

    def send(self, x: Numbers, to: int) -> None:
        self._shared.mail[self.rank, to].put(x.clone())

    def receive(self, x: Numbers, source: int) -> Numbers:
        mail = self._shared.mail[source, self.rank]
        try:
            found = mail.get(timeout=self._shared.timeout)
        except Empty:
            found = None
        if found is None:
            raise self._missing()
        return x.copy_(found)

    def subgroup(self, ranks: SequenceOf[int]) -> "ThreadComm":
        shared = self._shared.subgroup(tuple(ranks))
        return ThreadComm(list(ranks).index(self.rank), len(ranks), shared)

    def abort(self) -> None:
        """Let the ranks that wait for this one raise an error."""
        self._shared.abort()

    def _all_tensors(self, x: Numbers) -> list[Numbers]:
        """Publish `x`, and return a copy of every rank's tensor."""
        try:
            self._shared.tensors[self.rank] = x
            self._shared.barrier.wait()
            copies = [each.clone() for each in self._shared.tensors if each is not None]
            self._shared.barrier.wait()  # all ranks must have read before the next write
        except threading.BrokenBarrierError:
            raise self._missing() from None
        return copies

    def _missing(self) -> WorkerError:
        return WorkerError(f"Rank {self.rank} waited for a rank that did not arrive.")


def thread_comms(num_ranks: int, timeout: float = 30.0) -> list[ThreadComm]:
    """Create the ranks of a group of threads, which wait at most `timeout` seconds per message."""
    shared = _Exchange(num_ranks, timeout)
    return [ThreadComm(rank, num_ranks, shared) for rank in range(num_ranks)]


def run_ranks(
    num_ranks: int, work: Callable[[ThreadComm], Result], timeout: float = 30.0
) -> list[Result]:
    """Run `work(comm)` in one thread per rank, and return the ranks' results in order.

    Ranks wait at most `timeout` seconds for each other. Raises the error of the first rank that
    failed, and not those of the ranks that waited for it.
    """
    comms = thread_comms(num_ranks, timeout)
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = work(comm)
        except Exception as error:
            errors.append(error)
            comm.abort()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]


def _no_subgroup(ranks: SequenceOf[int]) -> "GroupComm":
    raise WorkerError(f"This group cannot be divided into ranks {list(ranks)} and others.")


@dataclass(frozen=True)
class _Both:
    """Two messages that are under way."""

    first: Any
    second: Any

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


@dataclass(frozen=True)
class GroupComm:
    """A rank among processes: torch.distributed, with gloo on CPUs and NCCL on GPUs.

    `group` is a ProcessGroup, or one backend of it; `connect` connects some of its ranks in a group
    of their own. Raises `WorkerError` when another rank has ended.
    """

    group: Any
    connect: Callable[[SequenceOf[int]], "GroupComm"] = _no_subgroup

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def num_ranks(self) -> int:
        return int(self.group.size())

    def all_reduce(self, x: Numbers) -> Numbers:
        x = x.contiguous()
        self._wait(lambda: self.group.allreduce([x]))
        return x

    def all_gather(self, x: Part) -> Whole:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self._wait(lambda: self.group.allgather([parts], [x]))
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Numbers) -> Numbers:
        x = x.contiguous()
        self._wait(lambda: self.group.broadcast(x, 0))
        return x

    def shift(self, x: Numbers) -> Numbers:
        if self.num_ranks == 1:
            return x
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        target, source = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        send = partial(self.group.send, [x], target, 0)
        receive = partial(self.group.recv, [received], source, 0)
        # Both are under way at once. Odd ranks start to receive first, because NCCL runs the two
        # messages of a pair in the order in which they were started.
        first, second = (receive, send) if self.rank % 2 else (send, receive)
        self._wait(lambda: _Both(first(), second()))
        return received

    def send(self, x: Numbers, to: int) -> None:
        x = x.contiguous()
        self._wait(lambda: self.group.send([x], to, 0))

    def receive(self, x: Numbers, source: int) -> Numbers:
        x = x.contiguous()
        self._wait(lambda: self.group.recv([x], source, 0))
        return x

    def subgroup(self, ranks: SequenceOf[int]) -> "GroupComm":
        return self.connect(ranks)

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkerError(f"Rank {self.rank} lost another rank: {reason}.") from error


def local_comm(rank: int, num_ranks: int, rendezvous: Path) -> GroupComm:
    """Connect a rank to other processes of this machine, over gloo.

    `rendezvous` is the file through which the ranks find each other; it need not exist yet. The
    ranks listen at 127.0.0.1 only. Blocks until all ranks have connected. Raises `WorkerError` if
    the file's folder is gone: torch would wait for it for minutes while it holds Python's lock, so
    that no thread could end this process.
    """
    if not rendezvous.parent.is_dir():
        raise WorkerError(f"{rendezvous.parent} is gone: rank 0 ended before the ranks connected.")
    gloo: Any = dist.ProcessGroupGloo  # its stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    store = dist.FileStore(str(rendezvous), num_ranks)

    def connect(ranks: SequenceOf[int]) -> GroupComm:
        own = dist.PrefixStore("-".join(map(str, ranks)), store)
        return GroupComm(gloo(own, list(ranks).index(rank), len(ranks), options))

    return GroupComm(gloo(store, rank, num_ranks, options), connect)


def joined_comm(backend: str = "gloo") -> GroupComm:
    """Connect this process to the ranks that `torchrun` started, on one or several machines."""
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=TIMEOUT)

    def connect(ranks: SequenceOf[int]) -> GroupComm:
        group = dist.new_group(list(ranks), timeout=TIMEOUT, use_local_synchronization=True)
        return GroupComm(group)

    return GroupComm(dist.group.WORLD, connect)


@dataclass(frozen=True)
class TracedComm:
    """A comm that emits a trace event per message, with its bytes on this rank and its time."""

    comm: Comm
    trace: Trace

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def all_reduce(self, x: Numbers) -> Numbers:
        return self._traced(EventKind.ALL_REDUCED, self.comm.all_reduce, x)

    def all_gather(self, x: Part) -> Whole:
        return self._traced(EventKind.ALL_GATHERED, self.comm.all_gather, x)

    def broadcast(self, x: Numbers) -> Numbers:
        return self._traced(EventKind.BROADCAST, self.comm.broadcast, x)

    def shift(self, x: Numbers) -> Numbers:
        return self._traced(EventKind.SHIFTED, self.comm.shift, x)

    def send(self, x: Numbers, to: int) -> None:
        def send(x: Tensor) -> Tensor:
            self.comm.send(x, to)
            return x

        self._traced(EventKind.SENT, send, x)

    def receive(self, x: Numbers, source: int) -> Numbers:
        return self._traced(EventKind.RECEIVED, lambda x: self.comm.receive(x, source), x)

    def subgroup(self, ranks: SequenceOf[int]) -> "TracedComm":
        return TracedComm(self.comm.subgroup(ranks), self.trace)

    def _traced(self, kind: EventKind, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.trace.active:
            return operation(x)
        started_ns, num_bytes = time.perf_counter_ns(), x.nbytes
        result = operation(x)
        self.trace.emit(kind, bytes=num_bytes, duration_ns=time.perf_counter_ns() - started_ns)
        return result


@dataclass(eq=False)
class MessageCounters:
    """Number, bytes and seconds of the messages of each kind: `Timeline(on_message=counters)`.

    Bytes are the size of this rank's input tensors, not the traffic on the network.
    """

    num_messages: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, message: Event) -> None:
        name = message.kind.value
        self.num_messages[name] = self.num_messages.get(name, 0) + 1
        self.num_bytes[name] = self.num_bytes.get(name, 0) + message.counts["bytes"]
        self.seconds[name] = self.seconds.get(name, 0.0) + message.counts["duration_ns"] / 1e9
