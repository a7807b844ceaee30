"""Continuous batching: everyone moves on in fair order, within limits, and as if alone.

The model is a fake whose next token depends on all tokens before it, so that whatever is computed
anew must come out the same; its memory keeps tokens in place of keys and values, so that a block
that was shared, copied or reused wrongly is found out by its content.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minigen import SamplingParams
from minigen.cache.blocks import BlockAllocator
from minigen.cache.manager import BlockManager
from minigen.cache.prefix import Node, RadixPrefixCache
from minigen.engine.scheduler import ContinuousScheduler
from minigen.sequence import Chunk, SampledToken, Sequence
from minigen.trace import Event, EventKind, Recorder, Trace

END = 3
NO_TOKEN = -1


def next_token(sequence: Sequence) -> int:
    """What the fake model says next; the choices of one prompt part ways."""
    return (sum(sequence.token_ids) * 7 + len(sequence) + sequence.choice) % 50 % 13


def build(
    sequence_id: int,
    prompt_ids: list[int],
    max_output: int = 4,
    n: int = 1,
    priority: int = 0,
    end_ids: frozenset[int] = frozenset(),
) -> list[Sequence]:
    """The n choices of one prompt; the first leads its siblings."""
    family = [
        Sequence(
            sequence_id=sequence_id + choice,
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(),
            seed=0,
            max_output=max_output,
            end_ids=end_ids,
            choice=choice,
            priority=priority,
        )
        for choice in range(n)
    ]
    family[0].siblings = family[1:]
    return family


def alone(sequence: Sequence) -> tuple[list[int], str | None]:
    """The answer and its finish reason, without any engine."""
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


class Bench:
    """A scheduler over real blocks, and a fake model that checks what it is given."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_sequences: int = 8,
        max_batch_tokens: int = 64,
        prefix_cache: bool = False,
    ):
        self.trace, self.recorder = Trace(), Recorder()
        self.trace.subscribe(self.recorder)
        self.trace.subscribe(self._count)
        allocator = BlockAllocator(num_blocks)
        cache = RadixPrefixCache(allocator, block_size) if prefix_cache else None
        self.manager = BlockManager(
            allocator, cache, block_size, max_sequences, num_blocks, self.trace
        )
        self.scheduler = ContinuousScheduler(
            self.manager, max_sequences, max_batch_tokens, self.trace
        )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.memory = [[NO_TOKEN] * block_size for _ in range(num_blocks + 1)]
        self.known: Counter[int] = Counter()  # tokens that need no computing, by sequence id

    def add(self, family: list[Sequence]) -> None:
        self.scheduler.add(family[0])

    def step(self) -> list[Chunk]:
        """One step; returns its chunks as they were before it."""
        were_running = dict(self.scheduler.running)
        num_events = len(self.recorder.events)
        chunks = self.scheduler.next_batch()
        preempted = self._ids(EventKind.PREEMPTED, num_events)
        went_on = [
            chunk
            for chunk in chunks
            if chunk.sequence in were_running and chunk.sequence.sequence_id not in preempted
        ]
        self._check_limits(chunks)
        assert chunks[: len(went_on)] == went_on, "who runs goes before who comes in"
        is_decode = [len(each.sequence) - each.sequence.num_computed == 1 for each in went_on]
        assert is_decode == sorted(is_decode, reverse=True), "decodes go before prompts"
        self._compute(chunks)
        samples = [sample for chunk in chunks for sample in chunk.samples]
        tokens = [SampledToken(next_token(sample)) for sample in samples]
        assert self.scheduler.commit(chunks, tokens) == list(zip(samples, tokens, strict=True))
        self.check_blocks()
        running = {sequence.sequence_id for sequence in self.scheduler.running}
        self.known = Counter({key: num for key, num in self.known.items() if key in running})
        return chunks

    def drain(self, max_steps: int) -> None:
        """Step until nobody is left, in so many steps at most."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            assert self.step(), "somebody can always run"
        assert not self.scheduler.has_work()
        self.check_idle()

    def check_idle(self) -> None:
        assert self.scheduler.num_waiting == 0
        assert not self.scheduler.running
        assert not self.manager.rows
        assert self.manager.num_available == self.num_blocks
        assert self.scheduler.next_batch() == []

    def check_blocks(self) -> None:
        """Every owner of every block is known, and tables say what sequences say."""
        assert set(self.manager.rows) == set(self.scheduler.running)
        owners = Counter(_kept_blocks(self.manager.prefix_cache))
        for sequence, row in self.manager.rows.items():
            owners.update(sequence.block_ids)
            table = self.manager.tables[row, : len(sequence.block_ids)]
            assert table.tolist() == sequence.block_ids
        counted = {block: self.manager.allocator.num_owners(block) for block in self._blocks()}
        assert counted == {block: owners[block] for block in self._blocks()}
        assert self.manager.allocator.num_free == list(counted.values()).count(0)

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in self.recorder.events if event.kind is kind]

    def _ids(self, kind: EventKind, start: int) -> set[int | None]:
        events = self.recorder.events[start:]
        return {event.sequence_id for event in events if event.kind is kind}

    def _blocks(self) -> range:
        return range(1, self.num_blocks + 1)

    def _check_limits(self, chunks: list[Chunk]) -> None:
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.max_batch_tokens
        seats = sum(1 + len(sequence.siblings) for sequence in self.scheduler.running)
        assert seats <= self.scheduler.max_sequences
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.num_tokens > 0
            assert sequence in self.scheduler.running
            num_slots = len(sequence.block_ids) * self.block_size
            assert num_slots >= sequence.num_computed + chunk.num_tokens

    def _compute(self, chunks: list[Chunk]) -> None:
        """Copy blocks, write the new tokens, then read each context back."""
        for source, target in self.manager.take_copies():
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
        """Every token is computed once, but for what was shared or given up."""
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


def _kept_blocks(cache: object) -> list[int]:
    """The blocks that the prefix cache owns, found by walking its tree."""
    if not isinstance(cache, RadixPrefixCache):
        return []
    nodes: list[Node] = [each for root in cache.roots.values() for each in root.children.values()]
    for node in nodes:
        nodes.extend(node.children.values())
    return [node.block_id for node in nodes]


class CrowdMachine(RuleBasedStateMachine):
    """Anybody comes and goes at any time, where memory, seats and tokens are always short."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        max_sequences=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        prefix_cache=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_batch_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.bench = Bench(num_blocks, block_size, max_sequences, max_batch_tokens, prefix_cache)
        self.bench.trace.subscribe(self.check_order)
        self.sequences: list[Sequence] = []
        self.begun: set[int] = set()  # whose order of coming in is settled
        self.last_begun: dict[int, int] = {}

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_output=st.integers(1, 10),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
    )
    def add(self, shared: int, own: list[int], max_output: int, n: int, priority: int) -> None:
        capacity = self.bench.num_blocks * self.bench.block_size
        prompt_ids = [*([5, 6] * shared)[:shared], *own][: capacity - 1]
        family = build(
            len(self.sequences),
            prompt_ids,
            min(max_output, capacity - len(prompt_ids)),
            min(n, self.bench.scheduler.max_sequences),
            priority,
            frozenset({END}),
        )
        self.sequences += family
        self.bench.add(family)

    @precondition(lambda self: self.live())
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            assert self.bench.step() or not self.live()

    @precondition(lambda self: self.live())
    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        live = self.live()
        sequence = live[index % len(live)]
        self.begun |= {sibling.sequence_id for sibling in sequence.siblings}
        self.bench.scheduler.abort(sequence)
        assert sequence.finish_reason == "abort"
        assert not sequence.block_ids
        assert sequence not in self.bench.scheduler.running

    @invariant()
    def blocks_add_up(self) -> None:
        self.bench.check_blocks()
        assert self.bench.scheduler.has_work() == bool(self.live())
        num_running = len(self.bench.scheduler.running)
        assert self.bench.scheduler.num_waiting == len(self.live()) - num_running

    def live(self) -> list[Sequence]:
        return [each for each in self.sequences if each.finish_reason is None]

    def check_order(self, event: Event) -> None:
        """First come first served among equals; forks and heirs come in with their first."""
        if event.sequence_id is None or event.sequence_id in self.begun:
            return
        if event.kind in (EventKind.FORKED, EventKind.SCHEDULED):
            self.begun.add(event.sequence_id)
        if event.kind is EventKind.SCHEDULED:
            priority = self.sequences[event.sequence_id].priority
            assert event.sequence_id > self.last_begun.get(priority, -1)
            self.last_begun[priority] = event.sequence_id

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.drain(2 * sum(len(each.prompt_ids) + each.max_output for each in self.live()))
        for sequence in self.sequences:
            output_ids, finish_reason = alone(sequence)
            if sequence.finish_reason == "abort":
                assert sequence.output_ids == output_ids[: len(sequence.output_ids)]
            else:
                assert (sequence.output_ids, sequence.finish_reason) == (output_ids, finish_reason)


CrowdMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
test_a_crowd_is_served_in_order_within_limits_and_as_if_alone = CrowdMachine.TestCase


def sizes(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.sequence.sequence_id, chunk.num_tokens) for chunk in chunks]


def test_a_step_with_nobody_is_empty() -> None:
    bench = Bench()
    assert bench.step() == []
    bench.check_idle()


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add(build(0, [1] * 4, max_output=6))
    assert sizes(bench.step()) == [(0, 4)]
    bench.add(build(1, [2] * 17, max_output=2))
    assert [sizes(bench.step()) for _ in range(4)] == [
        [(0, 1), (1, 7)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 3)],
        [(0, 1), (1, 1)],
    ]


def test_the_youngest_is_preempted_first_and_comes_back_before_later_arrivals() -> None:
    bench = Bench(num_blocks=6, block_size=2, max_sequences=3)
    families = [build(index, [index] * 4, max_output=6) for index in range(3)]
    for family in families:
        bench.add(family)
    bench.step()  # each has two full blocks, which is all there is
    bench.add(build(3, [3], max_output=1))
    assert sizes(bench.step()) == [(0, 1), (1, 1)]
    assert [event.sequence_id for event in bench.events(EventKind.PREEMPTED)] == [2]
    assert bench.events(EventKind.PREEMPTED)[0].counts["computed"] == 4
    bench.drain(40)
    order = [event.sequence_id for event in bench.events(EventKind.SCHEDULED)]
    came_back = order.index(2, order.index(2) + 1)
    assert came_back < order.index(3)
    assert families[2][0].output_ids == alone(families[2][0])[0]


def test_a_lower_priority_number_goes_first_and_equals_go_as_they_came() -> None:
    bench = Bench(max_sequences=1)
    for index, priority in enumerate([1, 0, 1, 0, -1]):
        bench.add(build(index, [index], max_output=1, priority=priority))
    assert [sizes(bench.step())[0][0] for _ in range(5)] == [4, 1, 3, 0, 2]


def test_siblings_fork_after_the_whole_prompt_and_copy_its_last_block_only() -> None:
    bench = Bench(max_batch_tokens=6, block_size=4)
    family = build(0, [1] * 10, n=3)
    bench.add(family)
    bench.step()
    assert bench.scheduler.num_waiting == 2
    assert not bench.events(EventKind.FORKED)
    bench.step()
    assert [event.sequence_id for event in bench.events(EventKind.FORKED)] == [1, 2]
    assert [len(each.output_ids) for each in family] == [1, 1, 1]
    assert family[0].block_ids == family[1].block_ids == family[2].block_ids
    assert sizes(bench.step()) == [(0, 1), (1, 1), (2, 1)]
    first_two = {tuple(each.block_ids[:2]) for each in family}
    assert len(first_two) == 1
    assert len({each.block_ids[2] for each in family}) == 3
    assert len(bench.events(EventKind.BLOCK_COPIED)) == 2, "the last owner writes in place"
    bench.drain(10)
    assert [each.output_ids for each in family] == [alone(each)[0] for each in family]


def test_siblings_have_their_seats_from_the_start() -> None:
    bench = Bench(max_sequences=4, max_batch_tokens=8)
    bench.add(build(0, [1] * 16, n=3))
    bench.add(build(3, [2], n=2))
    assert sizes(bench.step()) == [(0, 8)]
    assert sizes(bench.step()) == [(0, 8)]
    assert {each.sequence_id for each in bench.scheduler.running} == {0, 1, 2}
    bench.drain(20)


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_leader_aborted_before_its_fork_hands_over(num_steps: int, prefix_cache: bool) -> None:
    bench = Bench(max_batch_tokens=6, prefix_cache=prefix_cache)
    family = build(0, [1] * 10, n=3)
    bench.add(family)
    bench.add(build(3, [2] * 3))
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.abort(family[0])
    assert sizes(bench.step())[0][0] == 1, "in its leader's place"
    bench.drain(20)
    assert family[0].output_ids == []
    assert [each.output_ids for each in family[1:]] == [alone(each)[0] for each in family[1:]]


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_a_sibling_aborted_before_its_fork_is_left_out(num_steps: int) -> None:
    bench = Bench(max_batch_tokens=6)
    family = build(0, [1] * 10, n=3)
    bench.add(family)
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.abort(family[1])
    bench.drain(20)
    assert [len(each.output_ids) for each in family] == [4, 0, 4]
    assert [each.finish_reason for each in family] == ["length", "abort", "length"]


def test_anyone_may_be_aborted_waiting_running_or_finished() -> None:
    bench = Bench(max_sequences=1)
    running, waiting, last = (build(index, [index], max_output=2) for index in range(3))
    for family in (running, waiting, last):
        bench.add(family)
    bench.step()
    bench.scheduler.abort(running[0])
    assert not bench.manager.rows
    bench.scheduler.abort(waiting[0])
    assert sizes(bench.step()) == [(2, 1)]
    bench.drain(5)
    bench.scheduler.abort(last[0])
    assert last[0].finish_reason == "length"
    assert [event.sequence_id for event in bench.events(EventKind.ABORTED)] == [0, 1]


def test_an_answer_stops_at_an_end_token_or_at_its_length() -> None:
    bench = Bench()
    family = build(0, [4, 1], max_output=50)
    stopping = build(1, [4, 1], max_output=50, end_ids=frozenset({alone(family[0])[0][5]}))
    bench.add(family)
    bench.add(stopping)
    bench.drain(60)
    assert (family[0].finish_reason, len(family[0].output_ids)) == ("length", 50)
    assert stopping[0].finish_reason == "stop"
    assert stopping[0].output_ids[-1] in stopping[0].end_ids
    assert (stopping[0].output_ids, "stop") == alone(stopping[0])


def test_a_known_beginning_is_not_computed_again() -> None:
    bench = Bench(prefix_cache=True, block_size=4)
    bench.add(build(0, [1] * 9, max_output=1))
    bench.drain(2)
    bench.add(build(1, [1] * 9, max_output=1))
    assert sizes(bench.step()) == [(1, 1)]
    bench.check_idle()


def test_a_wrong_number_of_tokens_is_refused_before_anything_changes() -> None:
    bench = Bench()
    family = build(0, [1] * 3, n=2)
    bench.add(family)
    chunks = bench.scheduler.next_batch()
    with pytest.raises(ValueError, match="zip"):
        bench.scheduler.commit(chunks, [SampledToken(1)])
    assert family[0].num_computed == 0
    assert family[0].siblings == family[1:]
    for sequence in family:
        bench.scheduler.abort(sequence)
    bench.check_idle()
