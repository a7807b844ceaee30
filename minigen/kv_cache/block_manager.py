"""Which blocks belong to which sequence: the page tables, kept up to date.

Puts the allocator and the prefix cache together. All or nothing: a sequence that cannot get every
slot that it asks for keeps what it had.
"""

import numpy as np

from minigen.errors import RequestError
from minigen.kv_cache.block_allocator import blocks_needed, copy_on_write
from minigen.protocols import BlockAllocator, PrefixCache
from minigen.sequence import Sequence
from minigen.trace.events import EventKind, Trace


class BlockManager:
    """Gives sequences slots for their tokens, shares equal beginnings, and takes blocks back.

    `prefix_cache` is None where nothing is shared but forks. `tables` has a row of block ids for
    each sequence that owns any, updated in place; `rows` says which.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        prefix_cache: PrefixCache | None,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        trace: Trace,
    ):
        self.allocator, self.prefix_cache = allocator, prefix_cache
        self.block_size, self.trace = block_size, trace
        self.tables = np.zeros((max_num_seqs, max_blocks), np.int64)
        self.rows: dict[Sequence, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._copies: list[tuple[int, int]] = []

    def pop_pending_copies(self) -> list[tuple[int, int]]:
        """The (source, target) blocks to copy before anything is written, handed over once."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds, and so the longest sequence that can ever run."""
        return self.tables.shape[1] * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be after eviction."""
        evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return self.allocator.num_free + evictable

    def allocate(self, sequence: Sequence, max_tokens: int) -> int:
        """Give the sequence a table, what is known of its beginning, and slots for what comes next.

        Returns how many tokens those slots are for: all that are not known, `max_tokens` at most.
        Returns 0, and nothing has changed, if there is no row left, or no room for all of its
        tokens so far. Raises `RequestError` for a sequence that has begun already.
        """
        if sequence in self.rows:
            raise RequestError(
                f"Sequence {sequence.sequence_id} has begun already: begin it once, and again only "
                "when it was released."
            )
        if not self._free_rows:
            return 0
        matched: list[int] = []
        if (
            self.prefix_cache is not None and sequence.num_pending_prompt_logprobs == 0
        ):  # else all is computed
            matched = self.prefix_cache.match(sequence.token_ids, sequence.cache_salt)
        num_missing = blocks_needed(len(sequence), self.block_size) - len(matched)
        if num_missing > self.num_available:
            self._release_matched(matched)
            return 0
        self.rows[sequence] = self._free_rows.pop()
        self._extend(sequence, matched)
        sequence.num_computed = len(matched) * self.block_size
        sequence.num_cached_blocks = len(matched)
        if sequence.num_cached is None:  # and not again after a preemption
            sequence.num_cached = sequence.num_computed
        self._emit_hit(sequence)
        num_tokens = min(sequence.num_wanted, max_tokens)
        reserved = self.allocate_slots(sequence, num_tokens)
        assert reserved, "there is room for all of the sequence"
        return num_tokens

    def allocate_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make slots for the next `num_tokens` that the sequence will write; False if they lack.

        The block that is written next becomes the sequence's own, if it is shared. Raises
        `RequestError` for a sequence that has not begun.
        """
        self._check_begun(sequence)
        wanted = blocks_needed(sequence.num_computed + num_tokens, self.block_size)
        missing = max(wanted - len(sequence.block_ids), 0)
        copied = self._is_shared_tail(sequence)
        if missing + copied == 0:
            return True
        if not self._make_room(missing + copied):
            return False
        if copied:
            self._copy_tail(sequence)
        new = self.allocator.allocate(missing)
        self._extend(sequence, new)
        if self.trace.active:
            for block_id in new:
                self.trace.emit(EventKind.BLOCK_ALLOCATED, sequence.sequence_id, block=block_id)
        return True

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the next `num_tokens` as computed, and offer what is full to others.

        Raises `RequestError` for tokens that have no slots.
        """
        self._check_begun(sequence)
        num_slots = len(sequence.block_ids) * self.block_size
        if sequence.num_computed + num_tokens > num_slots:
            raise RequestError(
                f"Sequence {sequence.sequence_id} has {num_slots} slots, {sequence.num_computed} "
                f"of them computed: it cannot advance by {num_tokens}."
            )
        sequence.num_computed += num_tokens
        self.cache_full_blocks(sequence)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Offer blocks that have become full and computed to whoever begins alike."""
        num_full = sequence.num_computed // self.block_size
        if self.prefix_cache is None or num_full <= sequence.num_cached_blocks:
            return
        exchanged = self.prefix_cache.insert(
            sequence.token_ids[: num_full * self.block_size],
            sequence.block_ids,
            sequence.num_cached_blocks,
            sequence.cache_salt,
        )
        if self.trace.active:
            self._emit_cached(sequence, num_full, dict(exchanged))
        for index, known in exchanged:
            self._replace(sequence, index, known)
        sequence.num_cached_blocks = num_full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` own those of `parent`'s blocks too that hold computed tokens.

        Both must have the same tokens so far, and no copies may be pending. Full blocks are kept
        first, since the prefix cache must know of every user of what it counts as evictable.
        """
        self.cache_full_blocks(parent)
        self.rows[child] = self._free_rows.pop()
        num_shared = blocks_needed(parent.num_computed, self.block_size)
        self._extend(child, parent.block_ids[:num_shared])
        child.num_computed = parent.num_computed
        child.num_cached_blocks = parent.num_cached_blocks
        self.allocator.share(child.block_ids)
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(child.block_ids[: child.num_cached_blocks])
        if self.trace.active:
            self.trace.emit(
                EventKind.FORKED,
                child.sequence_id,
                parent=parent.sequence_id,
                blocks=len(child.block_ids),
            )
            self._emit_shared(child)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks back; what is known of them stays in the prefix cache.

        A sequence that is not finished is thereby preempted: it must begin anew.
        """
        row = self.rows.pop(sequence, None)
        if row is None:
            return
        self._free_rows.append(row)
        if self.trace.active and sequence.finish_reason is None:
            self.trace.emit(
                EventKind.PREEMPTED, sequence.sequence_id, computed=sequence.num_computed
            )
        if self.prefix_cache is not None:
            self.prefix_cache.release(sequence.block_ids[: sequence.num_cached_blocks])
        self._release(sequence.block_ids, sequence)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_cached_blocks = 0

    def _check_begun(self, sequence: Sequence) -> None:
        if sequence not in self.rows:
            raise RequestError(
                f"Sequence {sequence.sequence_id} has no table: begin it first, and go on only if "
                "that did not return 0."
            )

    def _copy_tail(self, sequence: Sequence) -> None:
        """Make the shared block that is written next the sequence's own."""
        index = sequence.num_computed // self.block_size
        pair = copy_on_write(self.allocator, sequence.block_ids, index)
        assert pair is not None, "the block has other owners"
        source, target = pair
        self.tables[self.rows[sequence], index] = target
        self._copies.append(pair)
        if self.trace.active:
            self.trace.emit(
                EventKind.BLOCK_COPIED, sequence.sequence_id, source=source, block=target
            )

    def _extend(self, sequence: Sequence, block_ids: list[int]) -> None:
        num_before = len(sequence.block_ids)
        sequence.block_ids.extend(block_ids)
        self.tables[self.rows[sequence], num_before : len(sequence.block_ids)] = block_ids

    def _replace(self, sequence: Sequence, index: int, block_id: int) -> None:
        sequence.block_ids[index] = block_id
        self.tables[self.rows[sequence], index] = block_id

    def _is_shared_tail(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others own too."""
        if sequence.num_computed % self.block_size == 0:
            return False
        last = sequence.block_ids[sequence.num_computed // self.block_size]
        return self.allocator.num_owners(last) > 1

    def _make_room(self, count: int) -> bool:
        lacking = count - self.allocator.num_free
        if lacking <= 0:
            return True
        if self.prefix_cache is None or self.prefix_cache.num_evictable < lacking:
            return False
        for block_id in self.prefix_cache.evict(lacking):
            if self.trace.active:
                self.trace.emit(EventKind.BLOCK_EVICTED, block=block_id)
        return True

    def _release(self, block_ids: list[int], sequence: Sequence) -> None:
        freed = self.allocator.release(block_ids)
        if self._copies:  # a block that is nobody's now may become another copy's target
            self._copies = [copy for copy in self._copies if copy[1] not in freed]
        if self.trace.active:
            for block_id in freed:
                self.trace.emit(EventKind.BLOCK_FREED, sequence.sequence_id, block=block_id)

    def _release_matched(self, matched: list[int]) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.release(matched)
            self.allocator.release(matched)

    def _emit_hit(self, sequence: Sequence) -> None:
        if self.trace.active and sequence.block_ids:
            self.trace.emit(
                EventKind.PREFIX_HIT,
                sequence.sequence_id,
                tokens=sequence.num_computed,
                blocks=len(sequence.block_ids),
            )
            self._emit_shared(sequence)

    def _emit_shared(self, sequence: Sequence) -> None:
        for block_id in sequence.block_ids:
            self.trace.emit(EventKind.BLOCK_SHARED, sequence.sequence_id, block=block_id)

    def _emit_cached(self, sequence: Sequence, num_full: int, exchanged: dict[int, int]) -> None:
        for index in range(sequence.num_cached_blocks, num_full):
            own, sequence_id = sequence.block_ids[index], sequence.sequence_id
            if index not in exchanged:
                self.trace.emit(EventKind.BLOCK_CACHED, sequence_id, block=own)
                continue
            known = exchanged[index]
            self.trace.emit(EventKind.BLOCK_DEDUPLICATED, sequence_id, source=own, block=known)
            if self.allocator.num_owners(own) == 0:
                self.trace.emit(EventKind.BLOCK_FREED, sequence_id, block=own)
