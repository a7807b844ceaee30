"""A step on all ranks at once: rank 0 broadcasts the batch, and every rank computes its shard.

Only rank 0 has the scheduler, the block tables and the sampler. It sends the data of a step to all
ranks as integers, in two messages. Each rank then runs the same layers on its own shard of the
weights, keys and values. Block b of a sequence is block b on every rank.
"""

import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from itertools import takewhile
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import Packer, batch_of
from minigen.errors import WorkerError
from minigen.hardware import set_torch_threads
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.parallel.comm import Comm
from minigen.parallel.sharding import ShardedTransformer
from minigen.sequence import ScheduledChunk
from minigen.trace.events import Trace

_STOP, _KEEPALIVE, _STEP = range(3)
_HEADER = 8  # numbers in the first message of a step
POLL_SECONDS = 0.2  # time between two checks of the other processes during a step
_FAILURE_SECONDS = 1.0  # time until a message to an ended rank has failed
_RELEASE_SECONDS = 1.5  # time until gloo has released a message
KEEPALIVE_SECONDS = 3600.0  # time without work after which rank 0 sends a keepalive message

# Commands for rank 0's communication thread, each with a unique ticket, and their outcomes.
Commands = SimpleQueue[tuple[object, Callable[[Comm], Any]] | None]
Outcomes = SimpleQueue[tuple[object, Any, Exception | None]]


class Step(NamedTuple):
    """One step of all ranks: copy blocks, each (source, target), then compute the batch.

    If `is_timed`, the stages of a pipeline tell rank 0 when they computed.
    """

    copies: list[tuple[int, int]]
    batch: Batch
    is_timed: bool = False


def send_step(comm: Comm, step: Step) -> None:
    """Broadcast a step to all ranks: a header of sizes, then all tensors in one message."""
    batch, copies = step.batch, torch.tensor(step.copies, dtype=torch.int64)
    parts = [
        batch.token_ids,
        batch.positions,
        batch.slots,
        torch.tensor(batch.query_starts),
        batch.context_lens,
        batch.logits_rows,
        batch.block_tables.flatten(),
        copies.flatten(),
    ]
    sizes = [len(batch.token_ids), len(batch.context_lens), len(batch.logits_rows)]
    sizes += [batch.block_tables.shape[1], len(step.copies), batch.num_decodes]
    comm.broadcast(torch.tensor([_STEP, *sizes, int(step.is_timed)]))
    comm.broadcast(torch.cat(parts))


def receive_step(comm: Comm) -> Step | None:
    """Receive the next step from rank 0; return None when rank 0 stops."""
    kind = _KEEPALIVE
    while kind == _KEEPALIVE:
        header = comm.broadcast(torch.zeros(_HEADER, dtype=torch.int64)).tolist()
        kind = header[0]
    if kind == _STOP:
        return None
    tokens, sequences, rows, width, num_copies, num_decodes = header[1:7]
    sizes = [tokens, tokens, tokens, sequences + 1, sequences, rows]
    sizes += [sequences * width, 2 * num_copies]
    parts = comm.broadcast(torch.zeros(sum(sizes), dtype=torch.int64)).split(sizes)
    batch = Batch(
        token_ids=parts[0],
        positions=parts[1],
        slots=parts[2],
        query_starts=parts[3].tolist(),
        context_lens=parts[4],
        logits_rows=parts[5],
        block_tables=parts[6].unflatten(0, (sequences, width)),
        num_decodes=num_decodes,
    )
    copies = [(source, target) for source, target in parts[7].unflatten(0, (-1, 2)).tolist()]
    return Step(copies, batch, is_timed=bool(header[7]))


def send_keepalive(comm: Comm) -> None:
    """Broadcast a message without a step. Raises `WorkerError` if a rank is found to have ended."""
    comm.broadcast(torch.full((_HEADER,), _KEEPALIVE))


@runtime_checkable
class StepRunner(Protocol):
    """What runs a rank's share of every step."""

    @property
    def block_size(self) -> int:
        """The tokens of a block of the KV cache."""

    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """Return the logits, at least on rank 0; all ranks must call this with the same step."""


class RankRunner:
    """Runs one rank's shard of every step: its heads, its slice of the ffn, its KV cache."""

    def __init__(
        self,
        model: ShardedTransformer,
        pool: KVPool,
        windows: SequenceOf[int | None],
        num_threads: int,
    ):
        self.model, self.pool, self.windows = model, pool, windows
        self.block_size = pool.block_size
        self.num_threads = num_threads

    @torch.inference_mode()
    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """Return the logits, equal on every rank; all ranks must call this with the same step."""
        set_torch_threads(self.num_threads)
        self.pool.copy_blocks(step.copies)
        attend = attend_paged(self.pool, step.batch, self.windows)
        hidden = self.model(step.batch.token_ids, step.batch.positions, attend)
        return self.model.logits(hidden[step.batch.logits_rows])


def run_steps(runner: StepRunner, comm: Comm) -> None:
    """Run rank 0's steps until it stops. Raises `WorkerError` if it ends unexpectedly."""
    while (step := receive_step(comm)) is not None:
        runner.run(step)


class DriverRunner:
    """The `Runner` of rank 0. After a `WorkerError`, every further step raises it again.

    `close` runs once: when it is called, when this object is deleted, or at exit.
    """

    def __init__(
        self,
        runner: StepRunner,
        comm_thread: "CommThread",
        manager: BlockManager,
        max_num_batched_tokens: int,
        close: Callable[[], None],
        trace: Trace,
    ):
        self._trace = trace
        self.manager, self._runner, self._comm_thread = manager, runner, comm_thread
        self._packer = Packer(manager, runner.block_size, max_num_batched_tokens)
        self.close = weakref.finalize(self, _end, comm_thread, close)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """Return the raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        self._comm_thread.drain()  # an interrupted step may still read the packer's memory
        decodes = takewhile(lambda chunk: chunk.num_tokens == 1, chunks)
        batch = batch_of(self._packer.pack(chunks), sum(1 for _ in decodes))
        step = Step(self.manager.pop_pending_copies(), batch, self._trace.active)
        logits: Tensor = self._comm_thread.call(partial(_run_on_all_ranks, self._runner, step))
        return logits


def _run_on_all_ranks(runner: StepRunner, step: Step, comm: Comm) -> Float[Tensor, "rows vocab"]:
    send_step(comm, step)
    try:
        return runner.run(step)
    except WorkerError:
        raise
    except Exception as error:  # the other ranks wait for a message that will never arrive
        raise WorkerError(f"Rank 0 failed in the middle of a step: {error!r}.") from error


def _end(comm_thread: "CommThread", close: Callable[[], None]) -> None:
    comm_thread.end()
    close()
    comm_thread.wait_for_failure()


class CommThread:
    """Rank 0's communication thread, which runs commands one after another.

    Ctrl-C during `call` interrupts only the waiting: all ranks still finish the current step, so
    they stay synchronised. While the caller waits, it calls `watch` repeatedly, which raises a
    `WorkerError` if another rank has ended. The constructor returns when all ranks have connected.
    """

    def __init__(self, connect: Callable[[], Comm], watch: Callable[[WorkerError | None], None]):
        self._watch = watch
        self._commands: Commands = SimpleQueue()
        self._outcomes: Outcomes = SimpleQueue()
        self._is_drained = False
        self._broken: WorkerError | None = None
        started = object()
        what = (connect, started, self._commands, self._outcomes)
        self._thread = Thread(target=_run_commands, args=what, daemon=True, name="minigen-comm")
        self._thread.start()
        self._outcome(started)

    def call(self, command: Callable[[Comm], Any]) -> Any:
        """Run `command(comm)`, and return or raise its outcome; `WorkerError` if a rank ended."""
        self.drain()
        return self._submit(command)

    def drain(self) -> None:
        """Wait until commands whose callers were interrupted have finished."""
        if self._broken is not None:
            raise WorkerError(str(self._broken)) from self._broken
        if not self._is_drained:
            self._submit(_no_op)

    def end(self) -> None:
        """Stop the other ranks, unless a command is running, and end the thread."""
        busy = self._broken is not None or not self._is_drained
        self._broken = self._broken or WorkerError("The model's ranks were stopped by `close`.")
        self._commands.put(None)
        self._thread.join(timeout=0.0 if busy else 2.0)

    def wait_for_failure(self) -> None:
        """Wait a moment for the message to fail that waits for ranks which have been ended.

        gloo aborts the whole process if Python exits while its message is just failing.
        """
        self._thread.join(timeout=_FAILURE_SECONDS)

    def _submit(self, command: Callable[[Comm], Any]) -> Any:
        """Queue a command; after an interrupt between any two lines, the next call drains."""
        ticket = object()
        self._is_drained = False
        self._commands.put((ticket, command))
        return self._outcome(ticket)

    def _outcome(self, ticket: object) -> Any:
        """Return or raise the outcome of the ticket's command; drop outcomes of earlier ones."""
        while True:
            alive = self._thread.is_alive()
            try:
                found, result, error = self._outcomes.get(timeout=POLL_SECONDS)
            except Empty:
                ended = WorkerError("Rank 0's communication thread has ended.")
                self._check_ranks(None if alive else ended)
                continue
            if isinstance(error, WorkerError):
                self._check_ranks(error)
            if found is ticket:
                self._is_drained = True
                if error is not None:
                    raise error
                return result

    def _check_ranks(self, error: WorkerError | None) -> None:
        """Raise if another rank has ended, otherwise raise `error` if there is one."""
        try:
            self._watch(error)
            if error is not None:
                raise error
        except WorkerError as found:
            closed, self._broken = self._broken, self._broken or found
            self.wait_for_failure()
            if closed is not None:
                raise closed from found
            raise


def _no_op(comm: Comm) -> None:
    """Do nothing; its outcome shows that all earlier commands have finished."""


def _run_commands(
    connect: Callable[[], Comm], started: object, commands: Commands, outcomes: Outcomes
) -> None:
    try:
        comm = connect()
    except Exception as error:
        outcomes.put((started, None, error))
        return
    outcomes.put((started, None, None))
    while True:
        try:
            item = commands.get(timeout=KEEPALIVE_SECONDS)
        except Empty:
            try:
                send_keepalive(comm)
            except WorkerError:  # the next command reports it
                return
            continue
        if item is None:
            break
        ticket, command = item
        try:
            outcomes.put((ticket, command(comm), None))
        except Exception as error:
            outcomes.put((ticket, None, error))
            if isinstance(error, WorkerError):
                return
        del item, command  # the command may reference objects that should be freed
    stop = torch.full((_HEADER,), _STOP)
    with suppress(WorkerError):  # ranks that have ended need not be stopped
        comm.broadcast(stop)
    _wait_until_released(stop)


def _wait_until_released(message: Tensor) -> None:
    """Wait a moment until only this thread holds a message that is complete.

    A thread of gloo drops it last, needs Python's lock for that, and aborts the whole process if
    Python exits meanwhile.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    holders: Callable[[], int] = getattr(message, "_use_count", lambda: 1)  # private, not in stubs
    while holders() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
