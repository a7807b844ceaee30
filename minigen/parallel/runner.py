"""A step on all ranks at once: rank 0 says what to compute, and every rank computes its share.

The scheduler, the block tables and the sampler are rank 0's alone. What a step needs of them goes
to all ranks as whole numbers, in two messages; each then runs the same layers on its own share of
weights, keys and values. Block b of a sequence is block b on every rank.
"""

import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import takewhile
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import Packer, batch_of
from minigen.errors import WorkerError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.parallel.comm import Comm
from minigen.parallel.sharding import ShardedTransformer
from minigen.sequence import ScheduledChunk

_STOP, _IDLE, _STEP = range(3)
_HEADER = 8  # numbers in the first message of a step
LOOK = 0.2  # seconds between two looks at the other processes while a step is awaited
REMIND = 3600.0  # seconds without work after which rank 0 says that it is still there

# What is asked of rank 0's thread, each by a ticket of its own, and what came of it.
Commands = SimpleQueue[tuple[object, Callable[[Comm], Any]] | None]
Outcomes = SimpleQueue[tuple[object, Any, Exception | None]]


class Step(NamedTuple):
    """What all ranks do next: copy blocks, each (source, target), then compute the batch."""

    copies: list[tuple[int, int]]
    batch: Batch


def send_step(comm: Comm, step: Step) -> None:
    """Tell all ranks what comes: a header of sizes, then everything else."""
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
    comm.broadcast(torch.tensor([_STEP, *sizes, 0]))
    comm.broadcast(torch.cat(parts))


def receive_step(comm: Comm) -> Step | None:
    """What rank 0 sends next; None when there is nothing more to come."""
    kind = _IDLE
    while kind == _IDLE:
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
    return Step(copies, batch)


class RankRunner:
    """One rank's share of every step: its heads, its slice of the ffn, its keys and values."""

    def __init__(
        self,
        model: ShardedTransformer,
        pool: KVPool,
        windows: SequenceOf[int | None],
        num_threads: int,
    ):
        self.model, self.pool, self.windows = model, pool, windows
        self.num_threads = num_threads

    @torch.inference_mode()
    def run(self, step: Step) -> Float[Tensor, "rows vocab"]:
        """The logits, the same on every rank; all ranks call it with the same step."""
        torch.set_num_threads(self.num_threads)
        self.pool.copy_blocks(step.copies)
        attend = attend_paged(self.pool, step.batch, self.windows)
        hidden = self.model(step.batch.token_ids, step.batch.positions, attend)
        return self.model.logits(hidden[step.batch.logits_rows])


def follow(runner: RankRunner, comm: Comm) -> None:
    """Do what rank 0 says until it says that it was all. Raises `WorkerError` if it goes."""
    while (step := receive_step(comm)) is not None:
        runner.run(step)


class LeadRunner:
    """The `Runner` of rank 0; `close` is called once, when it is closed, let go of or at exit.

    After a `WorkerError` every further step raises it, too.
    """

    def __init__(
        self,
        runner: RankRunner,
        hand: "CommThread",
        manager: BlockManager,
        max_num_batched_tokens: int,
        close: Callable[[], None],
    ):
        self.manager, self._runner, self._hand = manager, runner, hand
        self._packer = Packer(manager, runner.pool.block_size, max_num_batched_tokens)
        self.close = weakref.finalize(self, _end, hand, close)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """The raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        self._hand.settle()  # an interrupted step reads the packer's memory still
        decodes = takewhile(lambda chunk: chunk.num_tokens == 1, chunks)
        batch = batch_of(self._packer.pack(chunks), sum(1 for _ in decodes))
        step = Step(self.manager.pop_pending_copies(), batch)
        made: Tensor = self._hand.call(partial(_run_together, self._runner, step))
        return made


def _run_together(runner: RankRunner, step: Step, comm: Comm) -> Tensor:
    send_step(comm, step)
    try:
        return runner.run(step)
    except WorkerError:
        raise
    except Exception as error:  # the others wait for a message that will not come
        raise WorkerError(f"Rank 0 failed in the middle of a step: {error!r}.") from error


def _end(hand: "CommThread", close: Callable[[], None]) -> None:
    hand.end()
    close()


class CommThread:
    """Rank 0's thread that sends and receives: does what it is given, one after another.

    Whoever is interrupted while they wait for it has interrupted the waiting only: the ranks finish
    what is under way together, and stay together. Meanwhile `watch` is called again and again,
    which raises a `WorkerError` if another rank has ended. Made when all ranks have met.
    """

    def __init__(self, connect: Callable[[], Comm], watch: Callable[[WorkerError | None], None]):
        self._watch = watch
        self._commands: Commands = SimpleQueue()
        self._outcomes: Outcomes = SimpleQueue()
        self._is_settled = False
        self._broken: WorkerError | None = None
        started = object()
        what = (connect, started, self._commands, self._outcomes)
        self._thread = Thread(target=_work, args=what, daemon=True, name="minigen-comm")
        self._thread.start()
        self._outcome(started)

    def call(self, wish: Callable[[Comm], Any]) -> Any:
        """What `wish(comm)` returns, or raises. Raises `WorkerError` if another rank ended."""
        self.settle()
        return self._ask(wish)

    def settle(self) -> None:
        """Wait for calls that were interrupted while they were awaited."""
        if self._broken is not None:
            raise WorkerError(str(self._broken)) from self._broken
        if not self._is_settled:
            self._ask(_nothing)

    def end(self) -> None:
        """Let the other ranks go, if nothing is under way, and end the thread."""
        busy = self._broken is not None or not self._is_settled
        self._broken = self._broken or WorkerError("The model's ranks were ended by `close`.")
        self._commands.put(None)
        self._thread.join(timeout=0.0 if busy else 2.0)

    def _ask(self, wish: Callable[[Comm], Any]) -> Any:
        """An interrupt may come between any two of these lines: then the next call settles."""
        ticket = object()
        self._is_settled = False
        self._commands.put((ticket, wish))
        return self._outcome(ticket)

    def _outcome(self, ticket: object) -> Any:
        """What the ticket's wish returned, or raises it; what came of others before is dropped."""
        while True:
            alive = self._thread.is_alive()
            try:
                found, made, error = self._outcomes.get(timeout=LOOK)
            except Empty:
                self._look(None if alive else WorkerError("Rank 0's thread for messages ended."))
                continue
            if isinstance(error, WorkerError):
                self._look(error)
            if found is ticket:
                self._is_settled = True
                if error is not None:
                    raise error
                return made

    def _look(self, error: WorkerError | None) -> None:
        """Raises if another rank has ended, which is the end of all; `error` may be due to that."""
        try:
            self._watch(error)
            if error is not None:
                raise error
        except WorkerError as found:
            self._broken = found
            raise


def _nothing(comm: Comm) -> None:
    """Done as soon as all that was asked before is done."""


def _work(
    connect: Callable[[], Comm], started: object, wishes: Commands, outcomes: Outcomes
) -> None:
    try:
        comm = connect()
    except Exception as error:
        outcomes.put((started, None, error))
        return
    outcomes.put((started, None, None))
    while True:
        try:
            asked = wishes.get(timeout=REMIND)
        except Empty:
            comm.broadcast(torch.full((_HEADER,), _IDLE))
            continue
        if asked is None:
            break
        ticket, wish = asked
        try:
            outcomes.put((ticket, wish(comm), None))
        except Exception as error:
            outcomes.put((ticket, None, error))
            if isinstance(error, WorkerError):
                return
        del asked, wish  # it may hold what should be let go
    comm.broadcast(torch.full((_HEADER,), _STOP))
