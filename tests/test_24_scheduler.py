"""Continuous batching: all sequences progress in fair order, within limits, and as if alone."""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

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

import minigen
from minigen.errors import RequestError
from minigen.sequence import SampledToken, Sequence
from minigen.trace.events import Event, EventKind
from tests.bench import END, Bench, alone, build, sizes

PACKAGE = str(Path(minigen.__file__).parent) + os.sep


class CrowdMachine(RuleBasedStateMachine):
    """Sequences come and go at any time; memory, running slots and tokens are always short."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 12),
        prefix_cache=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.bench = Bench(
            num_blocks, block_size, max_num_seqs, max_num_batched_tokens, prefix_cache
        )
        self.bench.trace.subscribe(self.check_order)
        self.sequences: list[Sequence] = []
        self.started: set[int] = set()  # their order is settled
        self.last_started: dict[int, int] = {}

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
            min(n, self.bench.max_num_seqs),
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
        self.started |= {each.sequence_id for each in self.bench.waiting_siblings(sequence)}
        self.bench.abort(sequence)
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
        """Check first come, first served among equals.

        Forks, and sequences that become the leader of their family, start with their first.
        """
        if event.sequence_id is None or event.sequence_id in self.started:
            return
        if event.kind in (EventKind.FORKED, EventKind.SCHEDULED):
            self.started.add(event.sequence_id)
        if event.kind is EventKind.SCHEDULED:
            priority = self.sequences[event.sequence_id].priority
            assert event.sequence_id > self.last_started.get(priority, -1)
            self.last_started[priority] = event.sequence_id

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.drain(2 * sum(len(each.prompt_ids) + each.max_output for each in self.live()))
        self.blocks_add_up()
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


def test_a_step_without_sequences_is_empty() -> None:
    bench = Bench()
    assert bench.step() == []
    bench.check_idle()


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    bench = Bench(max_num_batched_tokens=8)
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
    bench = Bench(num_blocks=6, block_size=2, max_num_seqs=3)
    families = [build(index, [index] * 4, max_output=6) for index in range(3)]
    for family in families:
        bench.add(family)
    bench.step()  # each has two full blocks, which are all blocks
    bench.add(build(3, [3], max_output=1))
    assert sizes(bench.step()) == [(0, 1), (1, 1)]
    assert [event.sequence_id for event in bench.events(EventKind.PREEMPTED)] == [2]
    assert bench.events(EventKind.PREEMPTED)[0].counts["computed"] == 4
    bench.drain(40)
    order = [event.sequence_id for event in bench.events(EventKind.SCHEDULED)]
    came_back = order.index(2, order.index(2) + 1)
    assert came_back < order.index(3)
    assert families[2][0].output_ids == alone(families[2][0])[0]


def test_a_lower_priority_number_goes_first_and_equals_go_in_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    for index, priority in enumerate([1, 0, 1, 0, -1]):
        bench.add(build(index, [index], max_output=1, priority=priority))
    assert [sizes(bench.step())[0][0] for _ in range(5)] == [4, 1, 3, 0, 2]


def test_siblings_fork_after_the_whole_prompt_and_copy_its_last_block_only() -> None:
    bench = Bench(max_num_batched_tokens=6, block_size=4)
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


def test_siblings_have_their_running_slots_from_the_start() -> None:
    bench = Bench(max_num_seqs=4, max_num_batched_tokens=8)
    bench.add(build(0, [1] * 16, n=3))
    bench.add(build(3, [2], n=2))
    assert sizes(bench.step()) == [(0, 8)]
    assert sizes(bench.step()) == [(0, 8)]
    assert {each.sequence_id for each in bench.scheduler.running} == {0, 1, 2}
    bench.drain(20)


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_leader_aborted_before_its_fork_hands_over(num_steps: int, prefix_cache: bool) -> None:
    bench = Bench(max_num_batched_tokens=6, enable_prefix_caching=prefix_cache)
    family = build(0, [1] * 10, n=3)
    bench.add(family)
    bench.add(build(3, [2] * 3))
    for _ in range(num_steps):
        bench.step()
    bench.abort(family[0])
    assert sizes(bench.step())[0][0] == 1, "in its leader's place"
    bench.drain(20)
    assert family[0].output_ids == []
    assert [each.output_ids for each in family[1:]] == [alone(each)[0] for each in family[1:]]


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_a_sibling_aborted_before_its_fork_is_left_out(num_steps: int) -> None:
    bench = Bench(max_num_batched_tokens=6)
    family = build(0, [1] * 10, n=3)
    bench.add(family)
    for _ in range(num_steps):
        bench.step()
    bench.abort(family[1])
    bench.drain(20)
    assert [len(each.output_ids) for each in family] == [4, 0, 4]
    assert [each.finish_reason for each in family] == ["length", "abort", "length"]


def test_a_sequence_may_be_aborted_waiting_running_or_finished() -> None:
    bench = Bench(max_num_seqs=1)
    running, waiting, last = (build(index, [index], max_output=2) for index in range(3))
    for family in (running, waiting, last):
        bench.add(family)
    bench.step()
    bench.abort(running[0])
    assert not bench.manager.rows
    bench.abort(waiting[0])
    assert sizes(bench.step()) == [(2, 1)]
    bench.drain(5)
    with pytest.raises(RequestError, match="No request with id 2"):
        bench.abort(last[0])
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


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench(enable_prefix_caching=True, block_size=4)
    bench.add(build(0, [1] * 9, max_output=1))
    bench.drain(2)
    bench.add(build(1, [1] * 9, max_output=1))
    assert sizes(bench.step()) == [(1, 1)]
    bench.check_idle()


def test_a_wrong_number_of_tokens_is_refused_before_anything_changes() -> None:
    bench = Bench()
    family = build(0, [1] * 3, n=2)
    bench.add(family)
    chunks = bench.scheduler.schedule()
    with pytest.raises(ValueError, match="1 tokens were sampled for 2 rows"):
        bench.scheduler.commit(chunks, [SampledToken(1)])
    assert family[0].num_computed == 0
    assert bench.waiting_siblings(family[0]) == (family[1],)
    for sequence in family:
        bench.abort(sequence)
    bench.check_idle()


def test_drafts_take_no_block_that_another_decode_needs() -> None:
    bench = Bench(num_blocks=3, block_size=4)
    (first,), (second,) = build(0, [1] * 3, max_output=9), build(1, [2] * 4, max_output=9)
    bench.add([first])
    bench.add([second])
    bench.step()
    assert (len(first), len(second)) == (4, 5)
    first.drafts, second.drafts = (7, 7), (7,)
    chunks = bench.scheduler.schedule()
    assert {chunk.sequence: chunk.num_tokens for chunk in chunks} == {first: 1, second: 2}
    assert (first.drafts, second.drafts) == ((), (7,))


@pytest.mark.parametrize("started", [True, False])
def test_drafts_take_no_block_from_a_prompt(started: bool) -> None:
    bench = Bench(num_blocks=3, block_size=4, max_num_batched_tokens=7)
    (first,), (second,) = build(0, [1] * 3, max_output=9), build(1, [2] * 8, max_output=2)
    bench.add([first])
    if started:
        bench.add([second])
    bench.step()
    if not started:
        bench.add([second])
    first.drafts = (7, 7)
    chunks = bench.scheduler.schedule()
    assert {each.sequence: each.num_tokens for each in chunks} == {
        first: 1,
        second: 4 if started else 6,
    }
    assert first.drafts == ()
    assert set(bench.scheduler.running) == {first, second}


class CountedNumber(int):
    """A number that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: object) -> bool:
        CountedNumber.num_compared += 1
        return int(self) < other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        CountedNumber.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def work_of_steps(num_waiting: int) -> tuple[int, int]:
    """Return the opcodes of Python and the comparisons in C of 40 steps with a queue this long."""
    bench = Bench(num_blocks=12, block_size=2, max_num_seqs=4, max_num_batched_tokens=8)
    for index in range(num_waiting):
        priority = CountedNumber(0)
        bench.engine.add(build(index, [index % 5] * 3, max_output=6, priority=priority)[0])
    num_opcodes = 0

    def count(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal num_opcodes
        frame.f_trace_opcodes = frame.f_code.co_filename.startswith(PACKAGE)
        num_opcodes += what == "opcode"
        return count

    CountedNumber.num_compared = 0
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 checks in settrace whether any is traced
    sys.settrace(count)
    for _ in range(40):
        bench.engine.step()
    sys.settrace(before)
    assert bench.events(EventKind.PREEMPTED)
    assert bench.events(EventKind.FINISHED)
    assert len(bench.engine.live) > num_waiting - 40
    return num_opcodes, CountedNumber.num_compared


def test_a_step_costs_the_same_whether_forty_or_two_thousand_wait() -> None:
    few_opcodes, few_comparisons = work_of_steps(40)
    many_opcodes, many_comparisons = work_of_steps(2000)
    assert few_opcodes == many_opcodes > 10_000
    assert many_comparisons - few_comparisons < 2000, "the queue is not searched even once"
