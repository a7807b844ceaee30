"""An engine over real blocks and a fake model that checks its inputs.

The model's next token depends on all tokens before it, so that recomputation must give the same
tokens. Its memory holds tokens in place of keys and values, so that a block that was shared, copied
or reused wrongly is detected by its content.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from minigen import SamplingParams
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import Node, RadixPrefixCache
from minigen.sequence import SampledToken, ScheduledChunk, Sequence
from minigen.trace.events import Event, EventKind, Recorder, Trace

AnyScheduler = ContinuousScheduler | StaticScheduler | DynamicScheduler

END = 3
VOCAB = 13
NO_TOKEN = -1


def next_token(sequence: Sequence) -> int:
    """Return the fake model's next token; the choices of one prompt diverge."""
    return (sum(sequence.token_ids) * 7 + len(sequence) + sequence.choice) % 50 % VOCAB


def build(
    sequence_id: int,
    prompt_ids: list[int],
    max_output: int = 4,
    n: int = 1,
    priority: int = 0,
    end_ids: frozenset[int] = frozenset(),
) -> list[Sequence]:
    """Return the n choices of one prompt; the first leads its siblings."""
    create = partial(
        Sequence,
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(),
        seed=0,
        max_output=max_output,
        end_ids=end_ids,
        priority=priority,
    )
    others = [create(sequence_id + choice, choice=choice) for choice in range(1, n)]
    return [create(sequence_id, siblings=tuple(others)), *others]


def alone(sequence: Sequence) -> tuple[list[int], str | None]:
    """Return the answer and its finish reason, computed without any engine."""
    twin = Sequence(
        sequence_id=0,
        prompt_ids=sequence.prompt_ids,
        params=sequence.params,
        seed=0,
        max_output=sequence.max_output,
        end_ids=sequence.end_ids,
        choice=sequence.choice,
    )
    while twin.finish_reason is None:
        twin.append(next_token(twin))
    return twin.output_ids, twin.finish_reason


def sizes(chunks: list[ScheduledChunk]) -> list[tuple[int, int]]:
    """Return the ids of the scheduled sequences, with their numbers of tokens."""
    return [(chunk.sequence.sequence_id, chunk.num_tokens) for chunk in chunks]


def likeliest(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Sample greedily; check that there is a row for each sequence."""
    assert len(logits) == len(sequences)
    return [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]


class Bench:
    """An engine with the scheduler under test; the bench itself is the engine's runner.

    `scheduler` is constructed with (manager, max_num_seqs, max_num_batched_tokens).
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        enable_prefix_caching: bool = False,
        scheduler: Callable[[BlockManager, int, int], AnyScheduler] = ContinuousScheduler,
    ):
        self.trace, self.recorder = Trace(), Recorder()
        self.trace.subscribe(self.recorder)
        self.trace.subscribe(self._count)
        allocator = BlockAllocator(num_blocks)
        cache = RadixPrefixCache(allocator, block_size) if enable_prefix_caching else None
        self.manager = BlockManager(
            allocator, cache, block_size, max_num_seqs, num_blocks, self.trace
        )
        self.scheduler = scheduler(self.manager, max_num_seqs, max_num_batched_tokens)
        self.engine = Engine(self.scheduler, self, likeliest, self.trace)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.memory = [[NO_TOKEN] * block_size for _ in range(num_blocks + 1)]
        self.known: Counter[int] = Counter()  # tokens that need no computing, by sequence id
        # The chunks of the last step, and the sequences that got a token from them.
        self.chunks: list[ScheduledChunk] = []
        self.expected: list[tuple[Sequence, SampledToken]] = []
        self._were_running: list[Sequence] = []  # before the last step; and the events up to then
        self._num_events = 0

    @property
    def running(self) -> list[Sequence]:
        """The sequences that are neither waiting nor finished."""
        own = self.scheduler
        return list((own.batches if isinstance(own, DynamicScheduler) else own).running)

    def waiting_siblings(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Return the siblings that have not forked from a sequence yet."""
        own = self.scheduler
        return own._siblings.get(sequence, ()) if isinstance(own, ContinuousScheduler) else ()

    def add(self, family: list[Sequence]) -> None:
        self.engine.add(family[0])

    def abort(self, sequence: Sequence) -> None:
        self.engine.abort(sequence.sequence_id)

    def step(self) -> list[ScheduledChunk]:
        """Run one step and return its chunks."""
        self._were_running, self._num_events = self.running, len(self.recorder.events)
        self.chunks, self.expected = [], []
        assert self.engine.step() == self.expected
        self.check_blocks()
        running = {sequence.sequence_id for sequence in self.running}
        self.known = Counter({key: num for key, num in self.known.items() if key in running})
        return self.chunks

    def logits(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """Act as the runner: check the batch, write it to the fake memory, and return logits."""
        self._check_limits(chunks)
        self._check_order(chunks)
        self._compute(chunks)
        samples = [sample for chunk in chunks for sample in chunk.samples]
        token_ids = [next_token(sample) for sample in samples]
        self.chunks = list(chunks)
        self.expected = [
            (sample, SampledToken(token_id))
            for sample, token_id in zip(samples, token_ids, strict=True)
        ]
        return torch.eye(VOCAB)[token_ids]

    def drain(self, max_steps: int) -> None:
        """Step until no sequence is left, at most `max_steps` times."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            assert self.step(), "some sequence can always run"
        assert not self.engine.has_work()
        self.check_idle()

    def check_idle(self) -> None:
        assert not self.engine.live
        assert not self.running
        assert not self.manager.rows
        assert self.manager.num_available == self.num_blocks
        assert self.scheduler.schedule() == []
        if isinstance(self.scheduler, ContinuousScheduler):
            assert not self.scheduler.has_work()
            assert self.scheduler.num_waiting == 0

    def check_blocks(self) -> None:
        """Check the owners of every block, and the block tables of all sequences."""
        assert set(self.manager.rows) == set(self.running)
        owners = Counter(kept_blocks(self.manager.prefix_cache))
        for sequence, row in self.manager.rows.items():
            owners.update(sequence.block_ids)
            table = self.manager.tables[row, : len(sequence.block_ids)]
            assert table.tolist() == sequence.block_ids
        counted = {block: self.manager.allocator.num_owners(block) for block in self._blocks()}
        assert counted == {block: owners[block] for block in self._blocks()}
        assert self.manager.allocator.num_free == list(counted.values()).count(0)

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in self.recorder.events if event.kind is kind]

    def _blocks(self) -> range:
        return range(1, self.num_blocks + 1)

    def _check_limits(self, chunks: list[ScheduledChunk]) -> None:
        assert sum(chunk.num_tokens for chunk in chunks) <= self.max_num_batched_tokens
        seats = sum(1 + len(self.waiting_siblings(sequence)) for sequence in self.running)
        assert seats <= self.max_num_seqs
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert 0 < chunk.num_tokens <= len(sequence) - sequence.num_computed
            assert sequence in self.running
            num_slots = len(sequence.block_ids) * self.block_size
            assert num_slots >= sequence.num_computed + chunk.num_tokens

    def _check_order(self, chunks: list[ScheduledChunk]) -> None:
        events = self.recorder.events[self._num_events :]
        preempted = {each.sequence_id for each in events if each.kind is EventKind.PREEMPTED}
        went_on = [
            chunk
            for chunk in chunks
            if chunk.sequence in self._were_running and chunk.sequence.sequence_id not in preempted
        ]
        assert chunks[: len(went_on)] == went_on, "running sequences go before new ones"
        is_decode = [len(each.sequence) - each.sequence.num_computed == 1 for each in went_on]
        assert is_decode == sorted(is_decode, reverse=True), "decodes go before prompts"

    def _compute(self, chunks: list[ScheduledChunk]) -> None:
        """Copy blocks, write the new tokens, then read each context back."""
        for source, target in self.manager.pop_pending_copies():
            self.memory[target] = self.memory[source].copy()
        for chunk in chunks:
            for new_id in range(chunk.num_tokens):
                position = chunk.sequence.num_computed + new_id
                block_id, offset = self._slot(chunk.sequence, position)
                assert self.manager.allocator.num_owners(block_id) == 1, "written when shared"
                self.memory[block_id][offset] = chunk.sequence.token_ids[position]
        for chunk in chunks:
            num_tokens = chunk.sequence.num_computed + chunk.num_tokens
            slots = [self._slot(chunk.sequence, position) for position in range(num_tokens)]
            read = [self.memory[block_id][offset] for block_id, offset in slots]
            assert read == chunk.sequence.token_ids[:num_tokens]

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // self.block_size], position % self.block_size

    def _count(self, event: Event) -> None:
        """Count that every token is computed once, except shared and preempted ones."""
        if event.sequence_id is None:
            return
        if event.kind is EventKind.PREFIX_HIT:
            self.known[event.sequence_id] = event.counts["tokens"]
        elif event.kind is EventKind.PREEMPTED:
            self.known[event.sequence_id] = 0
        elif event.kind is EventKind.FORKED:
            self.known[event.sequence_id] = self.known[event.counts["parent"]]
        elif event.kind is EventKind.SCHEDULED:
            assert event.counts["computed"] == self.known[event.sequence_id]
            self.known[event.sequence_id] += event.counts["tokens"]


def kept_blocks(cache: object) -> list[int]:
    """Return the blocks that the prefix cache owns, found by walking its tree."""
    if not isinstance(cache, RadixPrefixCache):
        return []
    nodes: list[Node] = [each for root in cache.roots.values() for each in root.children.values()]
    for node in nodes:
        nodes.extend(node.children.values())
    return [node.block_id for node in nodes]
