"""Static and dynamic batching: a batch starts together, and the next waits for its last answer."""

from collections.abc import Callable
from functools import partial

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

from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import Sequence
from minigen.trace.events import Event, EventKind
from tests.bench import END, AnyScheduler, Bench, alone, build, sizes

MAX_WAIT = 5.0


class FakeClock:
    """A simulated clock; its time is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def dynamic(clock: FakeClock) -> Callable[[BlockManager, int, int], AnyScheduler]:
    return partial(DynamicScheduler, max_wait=MAX_WAIT, clock=clock)


class BatchMachine(RuleBasedStateMachine):
    """Sequences come and go at any time, at a static or a dynamic scheduler."""

    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 12),
        prefix_cache=st.booleans(),
        waits=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_tokens: int,
        prefix_cache: bool,
        waits: bool,
    ) -> None:
        self.clock, self.waits = FakeClock(), waits
        self.bench = Bench(
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_seqs + spare_tokens,
            prefix_cache,
            dynamic(self.clock) if waits else StaticScheduler,
        )
        self.bench.trace.subscribe(self.listen)
        self.sequences: list[Sequence] = []
        self.gathering: list[Sequence] = []  # waiting for a batch to fill up; empty if it is static
        self.waiting: list[Sequence] = []  # waiting for the batch before to finish
        self.batch: list[Sequence] = []  # the running batch
        self.arrivals: dict[Sequence, float] = {}

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_output=st.integers(1, 10),
        n=st.integers(1, 3),
    )
    def add(self, shared: int, own: list[int], max_output: int, n: int) -> None:
        capacity = self.bench.num_blocks * self.bench.block_size
        prompt_ids = [*([5, 6] * shared)[:shared], *own][: capacity - 1]
        longest = min(max_output, capacity - len(prompt_ids))
        family = build(len(self.sequences), prompt_ids, longest, n, end_ids=frozenset({END}))
        self.sequences += family
        self.arrivals |= dict.fromkeys(family, self.clock.now)
        (self.gathering if self.waits else self.waiting).extend(family)
        self.bench.add(family)

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.batch:
                self.release_gathered()
                self.fill_slots()
            is_running = bool(self.batch)
            assert bool(self.bench.step()) == is_running

    def release_gathered(self) -> None:
        is_full = len(self.gathering) >= self.bench.max_num_seqs
        if is_full or (
            self.gathering and self.clock.now - self.arrivals[self.gathering[0]] >= MAX_WAIT
        ):
            self.waiting += self.gathering[: self.bench.max_num_seqs]
            del self.gathering[: self.bench.max_num_seqs]

    def fill_slots(self) -> None:
        free_blocks = self.bench.num_blocks
        while self.waiting and len(self.batch) < self.bench.max_num_seqs:
            free_blocks -= self.most_blocks(self.waiting[0])
            if free_blocks < 0:
                break
            self.batch.append(self.waiting.pop(0))

    def most_blocks(self, sequence: Sequence) -> int:
        longest = len(sequence.prompt_ids) + sequence.max_output
        return blocks_needed(longest, self.bench.block_size)

    def listen(self, event: Event) -> None:
        """Follow the running batch; no sequence is preempted or forked."""
        assert event.kind not in (EventKind.PREEMPTED, EventKind.FORKED, EventKind.BLOCK_COPIED)
        if event.kind is EventKind.SCHEDULED:
            assert self.bench.running == self.batch
        if event.kind in (EventKind.FINISHED, EventKind.ABORTED):
            (ended,) = [each for each in self.sequences if each.sequence_id == event.sequence_id]
            for place in (self.gathering, self.waiting, self.batch):
                if ended in place:
                    place.remove(ended)

    @precondition(lambda self: self.live())
    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        live = self.live()
        sequence = live[index % len(live)]
        self.bench.abort(sequence)
        assert sequence.finish_reason == "abort"
        assert not sequence.block_ids
        assert sequence not in self.bench.running

    @invariant()
    def memory_is_there_for_the_longest_answers(self) -> None:
        self.bench.check_blocks()
        assert self.bench.running == self.batch
        for sequence in self.batch:
            assert len(sequence.block_ids) == self.most_blocks(sequence)

    def live(self) -> list[Sequence]:
        return [each for each in self.sequences if each.finish_reason is None]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.clock.now += MAX_WAIT
        while self.live():
            self.step(1)
        self.bench.check_idle()
        for sequence in self.sequences:
            output_ids, finish_reason = alone(sequence)
            if sequence.finish_reason == "abort":
                assert sequence.output_ids == output_ids[: len(sequence.output_ids)]
            else:
                assert (sequence.output_ids, sequence.finish_reason) == (output_ids, finish_reason)


BatchMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
test_batches_begin_together_in_order_and_everyone_is_answered_as_if_alone = BatchMachine.TestCase

KINDS = {"static": StaticScheduler, "dynamic at once": partial(DynamicScheduler, max_wait=0)}
both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@both_kinds
def test_new_sequences_wait_for_the_last_answer_though_slots_are_free(
    kind: Callable[..., AnyScheduler],
) -> None:
    bench = Bench(max_num_seqs=2, scheduler=kind)
    for index, max_output in enumerate([1, 4, 2]):
        bench.add(build(index, [index] * 3, max_output=max_output))
    assert [sizes(bench.step()) for _ in range(5)] == [
        [(0, 3), (1, 3)],
        [(1, 1)],
        [(1, 1)],
        [(1, 1)],
        [(2, 3)],
    ]
    bench.drain(1)


def test_a_long_prompt_goes_in_chunks_beside_shorter_ones() -> None:
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=8, scheduler=StaticScheduler)
    bench.add(build(0, [1] * 17, max_output=1))
    bench.add(build(1, [2] * 3, max_output=3))
    assert [sizes(bench.step()) for _ in range(3)] == [
        [(1, 3), (0, 5)],
        [(1, 1), (0, 7)],
        [(1, 1), (0, 5)],
    ]
    bench.drain(0)


@both_kinds
def test_no_sequence_starts_without_blocks_for_its_longest_answer(
    kind: Callable[..., AnyScheduler],
) -> None:
    bench = Bench(num_blocks=6, block_size=4, scheduler=kind)
    bench.add(build(0, [1] * 4, max_output=12))  # four blocks at its longest
    bench.add(build(1, [2] * 4, max_output=8))  # three
    bench.add(build(2, [3], max_output=1))  # one, but no sequence overtakes another
    assert sizes(bench.step()) == [(0, 4)]
    assert bench.manager.num_available == 2
    for _ in range(11):
        assert sizes(bench.step()) == [(0, 1)]
    assert sizes(bench.step()) == [(2, 1), (1, 4)]
    bench.drain(20)


@both_kinds
def test_siblings_are_computed_one_by_one(kind: Callable[..., AnyScheduler]) -> None:
    bench = Bench(scheduler=kind)
    family = build(0, [1] * 5, max_output=3, n=3)
    bench.add(family)
    assert sizes(bench.step()) == [(0, 5), (1, 5), (2, 5)]
    assert len({block_id for each in family for block_id in each.block_ids}) == 6
    bench.drain(5)
    assert [each.output_ids for each in family] == [alone(each)[0] for each in family]


@both_kinds
def test_an_aborted_sequences_slot_stays_empty_until_its_batch_is_done(
    kind: Callable[..., AnyScheduler],
) -> None:
    bench = Bench(max_num_seqs=2, scheduler=kind)
    families = [build(index, [index + 1], max_output=3) for index in range(4)]
    for family in families:
        bench.add(family)
    bench.step()
    bench.abort(families[0][0])  # running
    bench.abort(families[2][0])  # waiting
    assert [sizes(bench.step()) for _ in range(3)] == [[(1, 1)], [(1, 1)], [(3, 1)]]
    bench.scheduler.abort(families[1][0])  # finished: no effect
    bench.drain(2)
    assert [family[0].finish_reason for family in families] == [
        "abort",
        "length",
        "abort",
        "length",
    ]


def test_a_dynamic_batch_starts_when_it_is_full() -> None:
    clock = FakeClock()
    bench = Bench(max_num_seqs=2, scheduler=dynamic(clock))
    bench.add(build(0, [1], max_output=1))
    assert bench.step() == []
    bench.add(build(1, [2], max_output=1))
    bench.add(build(2, [3], max_output=1))
    assert sizes(bench.step()) == [(0, 1), (1, 1)]
    assert bench.step() == [], "the third waits for a full batch"


def test_a_dynamic_batch_starts_when_its_first_has_waited_long_enough() -> None:
    clock = FakeClock()
    bench = Bench(max_num_seqs=3, scheduler=dynamic(clock))
    bench.add(build(0, [1], max_output=1))
    clock.now += MAX_WAIT - 1
    bench.add(build(1, [2], max_output=1))
    assert bench.step() == []
    clock.now += 1
    assert sizes(bench.step()) == [(0, 1), (1, 1)]


def test_the_waiting_time_of_an_aborted_first_sequence_does_not_count() -> None:
    clock = FakeClock()
    bench = Bench(max_num_seqs=3, scheduler=dynamic(clock))
    families = [build(index, [1], max_output=1) for index in range(2)]
    bench.add(families[0])
    clock.now += MAX_WAIT - 1
    bench.add(families[1])
    bench.abort(families[0][0])
    clock.now += 1
    assert bench.step() == []
    clock.now += MAX_WAIT
    assert sizes(bench.step()) == [(1, 1)]
    bench.check_idle()
