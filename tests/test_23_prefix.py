"""Sharing prefixes: cached prefixes are found and evicted in order; sequences stay separate.

Two machines of random steps: the prefix cache against a dict of everything that it should know, and
the block manager with a pool of fake keys and values, so that a wrong block is a wrong reading.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.protocols import PrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.trace.events import Event, EventKind, Recorder, Trace
from tests.bench import kept_blocks

MANY_STEPS = settings(max_examples=120, stateful_step_count=50, deadline=None)

Path = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens up to the end of a block

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9)
salts = st.sampled_from([None, None, "a", "b"])


def make_sequence(token_ids: list[int], salt: str | None = None, sequence_id: int = 0) -> Sequence:
    params = SamplingParams(ignore_eos=True)
    return Sequence(sequence_id, tuple(token_ids), params, 0, 1000, frozenset(), cache_salt=salt)


def make_manager(
    num_blocks: int, block_size: int, trace: Trace | None = None, shares: bool = True
) -> BlockManager:
    allocator = BlockAllocator(num_blocks)
    prefix_cache = RadixPrefixCache(allocator, block_size) if shares else None
    return BlockManager(
        allocator, prefix_cache, block_size, 6, num_blocks, Trace() if trace is None else trace
    )


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Allocate slots, pretend to run, and cache: by default all tokens."""
    num_tokens = len(sequence.new_ids) if num_tokens is None else num_tokens
    assert manager.allocate_slots(sequence, num_tokens)
    manager.mark_computed(sequence, num_tokens)


def enter(manager: BlockManager, *sequences: Sequence) -> None:
    """Allocate a sequence with slots for all tokens."""
    for sequence in sequences:
        num_tokens = manager.allocate(sequence, len(sequence))
        assert num_tokens == len(sequence.new_ids) > 0


def filled_cache(num_blocks: int, block_size: int, *beginnings: list[int]) -> RadixPrefixCache:
    """Return a cache of these prefixes, all unused; the first has been unused the longest."""
    cache = RadixPrefixCache(BlockAllocator(num_blocks), block_size)
    for token_ids in beginnings:
        matched = cache.match([*token_ids, 0])
        new = cache.allocator.allocate(len(token_ids) // block_size - len(matched))
        block_ids = [*matched, *new]
        assert cache.insert(token_ids, block_ids, len(matched)) == []
        cache.release(block_ids)
        cache.allocator.release(block_ids)
    return cache


def test_the_prefix_cache_fits_its_socket() -> None:
    assert isinstance(RadixPrefixCache(BlockAllocator(1), 1), PrefixCache)


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    cache = filled_cache(8, 2, [1, 2, 3, 4])
    for token_ids, num_blocks in [([], 0), ([1], 0), ([1, 2], 0), ([1, 2, 3], 1)]:
        assert len(cache.match(token_ids)) == num_blocks
    assert len(cache.match([1, 2, 3, 4])) == 1
    assert len(cache.match([1, 2, 3, 4, 5])) == 2
    assert len(cache.match([1, 2, 9, 4, 5])) == 1
    assert len(cache.match([9, 2, 3, 4, 5])) == 0


def test_an_equal_block_after_a_different_prefix_is_another_block() -> None:
    cache = filled_cache(8, 2, [1, 2, 7, 7], [3, 4, 7, 7])
    one, other = cache.match([1, 2, 7, 7, 0]), cache.match([3, 4, 7, 7, 0])
    assert len({*one, *other}) == 4


def test_a_different_salt_shares_nothing() -> None:
    cache = filled_cache(8, 2, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5], "mine") == []


def test_salts_without_cached_blocks_take_no_memory() -> None:
    cache = RadixPrefixCache(BlockAllocator(2), 1)
    for number in range(50):
        block_ids = cache.allocator.allocate(1)
        cache.insert([1], block_ids, 0, f"user {number}")
        cache.release(block_ids)
        cache.allocator.release(block_ids)
        assert cache.evict(1) == block_ids
    assert not cache.roots
    assert cache.allocator.num_free == 2


def test_of_two_equal_blocks_the_first_is_cached_and_the_second_freed() -> None:
    cache = RadixPrefixCache(BlockAllocator(8), 2)
    mine, yours = cache.allocator.allocate(2), cache.allocator.allocate(2)
    assert cache.insert([1, 2, 3, 4], mine, 0) == []
    assert cache.insert([1, 2, 9, 9], yours, 0) == [(0, mine[0])]
    owners = [cache.allocator.num_owners(block_id) for block_id in (*mine, *yours)]
    assert owners == [3, 2, 0, 2]  # one of them is the cache


def test_the_least_recently_used_is_evicted_first_and_leaves_before_parents() -> None:
    cache = filled_cache(9, 1, [1, 2, 3], [1, 5], [6])
    one, two, three = cache.match([1, 2, 3, 0])
    cache.release([one, two, three])
    cache.allocator.release([one, two, three])
    (_, five), (six,) = cache.match([1, 5, 0]), cache.match([6, 0])
    cache.release([one, five])
    cache.release([six])
    cache.allocator.release([one, five, six])
    assert [cache.evict(1) for _ in range(5)] == [[three], [two], [five], [one], [six]]
    assert cache.evict(1) == []
    assert cache.allocator.num_free == 9


def test_blocks_in_use_are_never_evicted() -> None:
    cache = filled_cache(9, 1, [1, 2, 3])
    used = cache.match([1, 2, 0])
    assert cache.num_evictable == 1
    assert len(cache.evict(5)) == 1
    assert cache.match([1, 2, 3, 0]) == used


@dataclass(eq=False)
class Client:
    """A user of the cache: its tokens, and blocks for all that are full."""

    token_ids: list[int]
    salt: str | None
    block_ids: list[int]
    num_kept: int


class PrefixMachine(RuleBasedStateMachine):
    """The prefix cache, and a dict from every known path to its block."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = RadixPrefixCache(self.allocator, block_size)
        self.known: dict[Path, int] = {}
        self.unused_since: dict[Path, int] = {}
        self.clients: list[Client] = []
        self.clock = count()

    def paths(self, client: Client) -> list[Path]:
        ends = range(self.block_size, len(client.token_ids) + 1, self.block_size)
        return [(client.salt, tuple(client.token_ids[:end])) for end in ends]

    def use(self, path: Path) -> None:
        self.unused_since.pop(path, None)

    @precondition(lambda self: len(self.clients) < 6)
    @rule(token_ids=token_lists, salt=salts)
    def arrive(self, token_ids: list[int], salt: str | None) -> None:
        client = Client(token_ids, salt, [], 0)
        expected: list[Path] = []
        for path in self.paths(client):
            if path not in self.known or len(path[1]) == len(token_ids):
                break
            expected.append(path)
        matched = self.cache.match(token_ids, salt)
        assert matched == [self.known[path] for path in expected]
        for path in expected:
            self.use(path)
        client.block_ids, client.num_kept = matched, len(matched)
        self.clients.append(client)
        lacking = len(self.paths(client)) - len(matched)
        if lacking > self.allocator.num_free:
            self.evict(lacking - self.allocator.num_free)
        if lacking > self.allocator.num_free:
            self.depart(client)
        else:
            client.block_ids.extend(self.allocator.allocate(lacking))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        paths = self.paths(client)
        end = data.draw(st.integers(client.num_kept, len(paths)))
        expected = []
        for index in range(client.num_kept, end):
            own = client.block_ids[index]
            known = self.known.setdefault(paths[index], own)
            self.use(paths[index])
            if known != own:
                expected.append((index, known))
        spare = data.draw(st.integers(0, self.block_size - 1))  # tokens that do not fill a block
        exchanged = self.cache.insert(
            client.token_ids[: end * self.block_size + spare],
            client.block_ids,
            client.num_kept,
            client.salt,
        )
        assert exchanged == expected
        for index, block_id in exchanged:
            client.block_ids[index] = block_id
        client.num_kept = end

    @precondition(lambda self: self.clients and len(self.clients) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.clients))
        child = Client(parent.token_ids, parent.salt, [*parent.block_ids], parent.num_kept)
        self.allocator.share(child.block_ids)
        self.cache.acquire(child.block_ids[: child.num_kept])
        self.clients.append(child)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.depart(data.draw(st.sampled_from(self.clients)))

    def depart(self, client: Client) -> None:
        self.clients.remove(client)
        self.cache.release(client.block_ids[: client.num_kept])
        self.allocator.release(client.block_ids)
        used = {path for other in self.clients for path in self.paths(other)[: other.num_kept]}
        for path in reversed(self.paths(client)[: client.num_kept]):
            if path not in used:
                self.unused_since[path] = next(self.clock)

    @rule(wanted=st.integers(0, 5))
    def evict(self, wanted: int) -> None:
        expected = sorted(self.unused_since, key=self.unused_since.__getitem__)[:wanted]
        assert self.cache.evict(wanted) == [self.known.pop(path) for path in expected]
        for path in expected:
            del self.unused_since[path]
        for salt, token_ids in self.known:
            above = token_ids[: -self.block_size]
            assert not above or (salt, above) in self.known

    @invariant()
    def counts_are_true(self) -> None:
        owners = Counter(self.known.values())
        for client in self.clients:
            owners.update(client.block_ids)
        for block_id in range(1, self.num_blocks + 1):
            assert self.allocator.num_owners(block_id) == owners[block_id]
        assert self.allocator.num_free == self.num_blocks - len(+owners)
        assert self.cache.num_blocks == len(self.known)
        assert self.cache.num_evictable == len(self.unused_since)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for client in [*self.clients]:
                self.depart(client)
            assert self.cache.num_evictable == len(self.known)
            self.evict(self.num_blocks)
            assert self.allocator.num_free == self.num_blocks


def test_after_any_steps_the_cache_holds_what_a_dict_of_prefixes_holds() -> None:
    run_state_machine_as_test(PrefixMachine, settings=MANY_STEPS)


def test_a_second_prompt_takes_the_blocks_of_the_first_and_computes_the_rest() -> None:
    manager = make_manager(8, 2)
    first = make_sequence([1, 2, 3, 4, 5])
    enter(manager, first)
    assert first.num_computed == 0
    compute(manager, first)
    second = make_sequence([1, 2, 3, 4, 9])
    enter(manager, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.new_ids == [9]


def test_without_a_prefix_cache_equal_prompts_share_nothing() -> None:
    manager = make_manager(8, 2, shares=False)
    first, second = make_sequence([1, 2, 3]), make_sequence([1, 2, 3])
    for sequence in (first, second):
        enter(manager, sequence)
        compute(manager, sequence)
    assert not {*first.block_ids} & {*second.block_ids}
    manager.free(first)
    assert manager.num_available == 6


def test_slots_that_exist_already_cost_no_block() -> None:
    manager = make_manager(4, 4)
    sequence = make_sequence([1] * 9)
    assert manager.allocate(sequence, 9) == 9
    block_ids = [*sequence.block_ids]
    for num_tokens in (0, 1, 4, 9):
        assert manager.allocate_slots(sequence, num_tokens)
        assert sequence.block_ids == block_ids
    assert manager.num_available == 1


def test_a_fork_shares_blocks_until_one_of_the_two_writes() -> None:
    manager = make_manager(8, 2)
    parent, child = make_sequence([1, 2, 3]), make_sequence([1, 2, 3])
    enter(manager, parent)
    compute(manager, parent)
    manager.fork(parent, child)
    assert child.block_ids == parent.block_ids
    full, shared = parent.block_ids
    assert manager.pop_pending_copies() == []
    assert manager.allocate_slots(child, 1)
    ((source, target),) = manager.pop_pending_copies()
    assert (source, [full, target]) == (shared, child.block_ids)
    assert parent.block_ids == [full, shared]
    assert manager.allocate_slots(parent, 1)  # now its own block, so there is no copy
    assert manager.pop_pending_copies() == []
    assert parent.block_ids == [full, shared]


def test_a_fork_does_not_share_slots_that_only_the_parent_allocated() -> None:
    manager = make_manager(8, 2, shares=False)
    parent, child = make_sequence([1, 2, 3, 4, 5, 6]), make_sequence([1, 2, 3, 9, 9, 9])
    enter(manager, parent)
    compute(manager, parent, 3)
    manager.fork(parent, child)
    assert child.block_ids == parent.block_ids[:2]
    shared, ahead = parent.block_ids[1:]
    assert manager.allocate_slots(parent, 3)
    ((source, target),) = manager.pop_pending_copies()
    assert source == shared
    assert parent.block_ids[1:] == [target, ahead]
    assert child.block_ids[1] == shared


def test_a_fork_of_blocks_that_were_not_cached_yet_is_counted_as_their_user() -> None:
    manager = make_manager(4, 2)
    parent, child = make_sequence([1, 2, 3]), make_sequence([1, 2, 4])
    assert manager.allocate(parent, 2) == 2
    parent.num_computed = 2  # and not offered to the cache, as a scheduler may forget
    manager.fork(parent, child)
    manager.cache_full_blocks(parent)
    manager.free(parent)
    assert child.block_ids == [1]
    assert manager.num_available == 3


def test_the_pending_copy_of_a_freed_sequence_is_dropped() -> None:
    manager = make_manager(3, 2, shares=False)
    parent = make_sequence([1])
    children = [make_sequence([1]), make_sequence([1])]
    enter(manager, parent)
    compute(manager, parent)
    for child in children:
        manager.fork(parent, child)
    assert manager.allocate_slots(children[0], 1)
    manager.free(children[0])
    assert manager.allocate_slots(children[1], 1)  # into the block that was the target a moment ago
    assert manager.pop_pending_copies() == [(parent.block_ids[0], children[1].block_ids[0])]


def test_a_sequence_that_never_started_has_nothing_to_free() -> None:
    manager = make_manager(4, 2)
    manager.free(make_sequence([1]))
    assert manager.num_available == 4


def test_a_sequence_starts_with_slots_for_uncached_tokens_or_for_the_requested_number() -> None:
    manager = make_manager(8, 2)
    first, second, third = (make_sequence([1, 2, 3, 4, 5], sequence_id=each) for each in range(3))
    assert manager.allocate(first, 3) == 3
    assert len(first.block_ids) == 2
    manager.mark_computed(first, 3)
    assert manager.allocate(second, 9) == 3, "two of five are known"
    assert (second.num_computed, len(second.block_ids)) == (2, 3)
    assert manager.allocate(third, 1) == 1
    assert (third.num_computed, len(third.block_ids)) == (2, 2)


def test_a_sequence_that_does_not_fit_as_a_whole_does_not_start() -> None:
    manager = make_manager(4, 2)
    first, second = make_sequence([1, 2, 3, 4, 5]), make_sequence([1, 2, 9, 9, 9])
    enter(manager, first)
    compute(manager, first)
    free = make_sequence([7])
    enter(manager, free)
    assert manager.allocate(second, 1) == 0, "one of three blocks is known, and none is free"
    assert second not in manager.rows
    assert (second.block_ids, second.num_computed) == ([], 0)
    manager.free(first)
    assert manager.allocate(second, 1) == 1
    assert second.num_computed == 2


def test_no_sequence_starts_when_every_row_is_taken() -> None:
    manager = make_manager(20, 2)
    crowd = [make_sequence([each]) for each in range(6)]
    enter(manager, *crowd)
    late = make_sequence([1])
    assert manager.allocate(late, 1) == 0
    manager.free(crowd[3])
    assert manager.allocate(late, 1) == 1


class ManagerMachine(RuleBasedStateMachine):
    """A block manager with a pool of fake memory; a slot's content names all tokens before it."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 3), shares=st.booleans())
    def start(self, num_blocks: int, block_size: int, shares: bool) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.trace = Trace()
        self.trace.subscribe(self.listen)
        self.manager = make_manager(num_blocks, block_size, self.trace, shares)
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.batch: dict[Sequence, int] = {}
        self.copies_pend = False
        self.num_free = num_blocks  # this and the next two are built from events
        self.owned: dict[int, set[int]] = defaultdict(set)
        self.kept: set[int] = set()
        self.memory: dict[int, Path] = {}
        self.ids: Iterator[int] = count()

    def listen(self, event: Event) -> None:
        """Rebuild free blocks, owners and cached blocks from the events alone."""
        kind, sequence_id, counts = event.kind, event.sequence_id, event.counts
        if kind in (EventKind.BLOCK_ALLOCATED, EventKind.BLOCK_COPIED):
            self.num_free -= 1
        elif kind in (EventKind.BLOCK_FREED, EventKind.BLOCK_EVICTED):
            self.num_free += 1
        if kind is EventKind.BLOCK_CACHED:
            assert counts["block"] not in self.kept
            self.kept.add(counts["block"])
        elif kind is EventKind.BLOCK_EVICTED:
            self.kept.remove(counts["block"])
        if sequence_id is None:
            return
        if kind is EventKind.PREEMPTED:
            self.owned.pop(sequence_id, None)  # it may own none so far
        if kind in (EventKind.BLOCK_COPIED, EventKind.BLOCK_DEDUPLICATED):
            self.owned[sequence_id].remove(counts["source"])
        if kind in (
            EventKind.BLOCK_ALLOCATED,
            EventKind.BLOCK_SHARED,
            EventKind.BLOCK_COPIED,
            EventKind.BLOCK_DEDUPLICATED,
        ):
            assert counts["block"] not in self.owned[sequence_id]
            self.owned[sequence_id].add(counts["block"])

    def contents(self, sequence: Sequence, position: int) -> Path:
        return sequence.cache_salt, tuple(sequence.token_ids[: position + 1])

    def slot(self, sequence: Sequence, position: int) -> int:
        block_id = sequence.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def state(self) -> object:
        owners = [self.manager.allocator.num_owners(each) for each in range(self.num_blocks + 1)]
        sequences = [
            (each.num_computed, each.num_cached_blocks, tuple(each.block_ids)) for each in self.live
        ]
        kept = {*kept_blocks(self.manager.prefix_cache)}
        return owners, sequences, kept, self.manager.tables.tolist(), self.manager.num_available

    @rule(token_ids=token_lists, salt=salts, max_tokens=st.integers(1, 9))
    def begin(self, token_ids: list[int], salt: str | None, max_tokens: int) -> None:
        self.enter(make_sequence(token_ids, salt, next(self.ids)), max_tokens)

    @precondition(lambda self: self.waiting)
    @rule(max_tokens=st.integers(1, 9))
    def begin_again(self, max_tokens: int) -> None:
        sequence = self.waiting.pop(0)
        if not self.enter(sequence, max_tokens):
            self.waiting.append(sequence)

    def enter(self, sequence: Sequence, max_tokens: int) -> bool:
        before, num_available = self.state(), self.manager.num_available
        num_tokens = self.manager.allocate(sequence, max_tokens)
        if num_tokens == 0:
            assert self.state() == before
            assert (sequence.block_ids, sequence.num_computed) == ([], 0)
            wanted = blocks_needed(len(sequence), self.block_size)
            assert len(self.live) == 6 or wanted > num_available
            return False
        self.live.append(sequence)
        self.batch[sequence] = num_tokens
        assert num_tokens == min(len(sequence.new_ids), max_tokens)
        assert sequence.num_computed == sequence.num_cached_blocks * self.block_size
        self.check_slots(sequence, num_tokens)
        return True

    def check_slots(self, sequence: Sequence, num_tokens: int) -> None:
        """Check that each of the next tokens has a slot, in blocks without other owners."""
        for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
            block_id = sequence.block_ids[position // self.block_size]
            assert self.manager.allocator.num_owners(block_id) == 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(1, len(sequence.new_ids)))
        before = self.state()
        end = sequence.num_computed + num_tokens
        missing = blocks_needed(end, self.block_size) - len(sequence.block_ids)
        if self.manager.allocate_slots(sequence, num_tokens):
            self.batch[sequence] = num_tokens
            self.copies_pend = True
            self.check_slots(sequence, num_tokens)
        else:
            assert self.state() == before
            # At most one block, for a copy, is needed on top of the missing ones.
            assert max(missing, 0) + 1 > self.manager.num_available

    @precondition(lambda self: self.batch)
    @rule(data=st.data(), keeps=st.booleans())
    def step(self, data: st.DataObject, keeps: bool) -> None:
        """Run the allocated tokens as the runner does: copy, then write."""
        self.copy()
        for sequence, num_tokens in self.batch.items():
            for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
                self.memory[self.slot(sequence, position)] = self.contents(sequence, position)
        for sequence, num_tokens in self.batch.items():
            if keeps:
                self.manager.mark_computed(sequence, num_tokens)
                self.check_kept(sequence)
            else:
                sequence.num_computed += num_tokens
            if not sequence.new_ids:
                sequence.append(data.draw(st.integers(0, 1)))
        self.batch = {}

    @precondition(lambda self: self.batch)
    @rule()
    def run_nothing(self) -> None:
        """Do not run the allocated tokens: their slots wait for the next step."""
        self.copy()
        self.batch = {}

    def copy(self) -> None:
        copies = self.manager.pop_pending_copies()
        self.copies_pend = False
        assert len({target for _, target in copies}) == len(copies)
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            for offset in range(self.block_size):
                found = self.memory.get(source * self.block_size + offset, (None, ()))
                self.memory[target * self.block_size + offset] = found

    @precondition(lambda self: self.live and not self.batch)
    @rule(data=st.data())
    def keep_late(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.manager.cache_full_blocks(sequence)
        self.check_kept(sequence)

    def check_kept(self, sequence: Sequence) -> None:
        if self.manager.prefix_cache is not None:
            assert sequence.num_cached_blocks == sequence.num_computed // self.block_size
        kept = kept_blocks(self.manager.prefix_cache)
        assert {*sequence.block_ids[: sequence.num_cached_blocks]} <= {*kept}

    @precondition(lambda self: self.live and len(self.live) < 6 and not self.copies_pend)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def fork(self, data: st.DataObject, token_id: int) -> None:
        parent = data.draw(st.sampled_from(self.live))
        token_ids = [*parent.token_ids[: parent.num_computed], token_id]
        child = make_sequence(token_ids, parent.cache_salt, next(self.ids))
        self.manager.fork(parent, child)
        assert child.num_computed == parent.num_computed
        self.check_kept(parent)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.batch.pop(sequence, None)
        sequence.finish_reason = None if again else "abort"
        self.manager.free(sequence)
        if not again:  # the engine emits this event
            self.owned.pop(sequence.sequence_id, None)
        assert (sequence.block_ids, sequence.num_computed) == ([], 0)
        if again:
            self.waiting.append(sequence)

    @invariant()
    def tables_are_what_the_sequences_own(self) -> None:
        rows = self.manager.rows
        assert {*rows} == {*self.live}
        assert len({*rows.values()}) == len(rows)
        for sequence, row in rows.items():
            table = self.manager.tables[row, : len(sequence.block_ids)]
            assert table.tolist() == sequence.block_ids

    @invariant()
    def owners_are_the_sequences_and_the_cache(self) -> None:
        owned = Counter(block_id for each in self.live for block_id in each.block_ids)
        kept = kept_blocks(self.manager.prefix_cache)
        for block_id in range(self.num_blocks + 1):
            owners = owned[block_id] + (block_id in kept)
            assert self.manager.allocator.num_owners(block_id) == owners
        assert self.manager.num_available == self.num_blocks - len(owned)

    @invariant()
    def events_alone_give_free_owned_and_cached_blocks(self) -> None:
        assert self.num_free == self.manager.allocator.num_free
        seen = {sequence_id: owned for sequence_id, owned in self.owned.items() if owned}
        assert seen == {each.sequence_id: {*each.block_ids} for each in self.live if each.block_ids}
        assert sorted(self.kept) == sorted(kept_blocks(self.manager.prefix_cache))

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        if self.copies_pend:
            return
        for sequence in self.live:
            for position in range(sequence.num_computed):
                found = self.memory[self.slot(sequence, position)]
                assert found == self.contents(sequence, position)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.live:
                self.manager.free(sequence)
            assert not self.manager.rows
            assert self.manager.num_available == self.num_blocks


def test_after_any_steps_every_sequence_reads_its_own_tokens_and_no_block_is_lost() -> None:
    run_state_machine_as_test(ManagerMachine, settings=MANY_STEPS)


def share_fork_and_evict(trace: Trace) -> BlockManager:
    """Run a few steps in which each kind of block event occurs."""
    manager = make_manager(5, 2, trace)
    parent, child = make_sequence([1, 2, 3], sequence_id=1), make_sequence([1, 2, 3], sequence_id=2)
    enter(manager, parent)
    compute(manager, parent)
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 1)
    manager.free(parent)
    child.finish_reason = "stop"
    manager.free(child)
    again = make_sequence([1, 2, 9], sequence_id=3)
    enter(manager, again)
    manager.free(again)
    enter(manager, make_sequence([7] * 10, sequence_id=4))
    return manager


def test_events_record_what_happened_to_which_block_in_order() -> None:
    trace, recorder = Trace(), Recorder()
    trace.subscribe(recorder)
    share_fork_and_evict(trace)
    seen = [(event.kind.value, event.sequence_id) for event in recorder.events]
    assert seen == [
        ("block_allocated", 1),
        ("block_allocated", 1),
        ("block_cached", 1),
        ("forked", 2),
        ("block_shared", 2),
        ("block_shared", 2),
        ("block_copied", 2),
        ("preempted", 1),
        ("block_freed", 1),
        ("block_freed", 2),
        ("prefix_hit", 3),
        ("block_shared", 3),
        ("block_allocated", 3),
        ("preempted", 3),
        ("block_freed", 3),
        ("block_evicted", None),
        *[("block_allocated", 4)] * 5,
    ]
    by_kind = {event.kind: dict(event.counts) for event in recorder.events}
    assert by_kind[EventKind.PREFIX_HIT] == {"tokens": 2, "blocks": 1}
    assert by_kind[EventKind.FORKED] == {"parent": 1, "blocks": 2}
    assert {*by_kind[EventKind.BLOCK_COPIED]} == {"source", "block"}


def test_with_no_subscriber_nothing_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an event costs more than one branch")

    monkeypatch.setattr(Trace, "emit", refuse)
    share_fork_and_evict(Trace())
    unsubscribed = Trace()
    unsubscribed.subscribe(refuse)
    unsubscribed.unsubscribe(refuse)
    share_fork_and_evict(unsubscribed)


def test_a_recorder_keeps_the_last_events_and_counts_the_dropped_ones() -> None:
    trace, recorder = Trace(), Recorder(capacity=3)
    trace.subscribe(recorder)
    for number in range(5):
        trace.emit(EventKind.NEW_TOKEN, 1, token=number)
    assert [event.counts["token"] for event in recorder.events] == [2, 3, 4]
    assert recorder.num_dropped == 2


def test_a_parents_block_is_deduplicated_before_its_fork_shares_it() -> None:
    trace, recorder = Trace(), Recorder()
    manager = make_manager(8, 2, trace)
    first, second, fork = (make_sequence([1, 2, 3], sequence_id=each) for each in range(3))
    for sequence in (first, second):
        assert manager.allocate(sequence, 2) == 2
    (own,) = second.block_ids
    trace.subscribe(recorder)
    manager.mark_computed(first, 2)
    second.num_computed = 2  # and not offered to the cache, as a scheduler may forget
    manager.fork(second, fork)
    assert first.block_ids == second.block_ids == fork.block_ids
    (kept,) = first.block_ids
    seen = [(event.kind.value, event.sequence_id, dict(event.counts)) for event in recorder.events]
    assert seen == [
        ("block_cached", 0, {"block": kept}),
        ("block_deduplicated", 1, {"source": own, "block": kept}),
        ("block_freed", 1, {"block": own}),
        ("forked", 2, {"parent": 1, "blocks": 1}),
        ("block_shared", 2, {"block": kept}),
    ]
