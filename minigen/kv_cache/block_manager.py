"""The block tables of all sequences, and the allocator and prefix cache behind them.

Every allocation is all or nothing: if a sequence cannot get all the slots it requests, nothing
changes.
"""

import numpy as np

from minigen.errors import RequestError
from minigen.kv_cache.block_allocator import blocks_needed, copy_on_write
from minigen.protocols import BlockAllocator, PrefixCache
from minigen.sequence import Sequence
from minigen.trace.events import EventKind, Trace


class BlockManager:
    """Allocates slots for the tokens of sequences, shares prefixes, and frees blocks.

    With `prefix_cache=None`, only forks share blocks. `tables` has one row of block ids per
    sequence that owns blocks, and is updated in place; `rows` maps a sequence to its row.
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
        """Return and clear the (source, target) blocks to copy before the next write."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def num_tokens(self) -> int:
        """Tokens that a block table has slots for: the length of the longest possible sequence."""
        return self.tables.shape[1] * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be after eviction."""
        evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return self.allocator.num_free + evictable

    def filling(self) -> list[int]:
        """Return the blocks that hold computed tokens of a sequence, and are not full."""
        return [
            sequence.block_ids[sequence.num_computed // self.block_size]
            for sequence in self.rows
            if sequence.num_computed % self.block_size
        ]

    def allocate(self, sequence: Sequence, max_tokens: int) -> int:
        """Give a sequence a block table: the cached blocks of its prefix, and slots after them.

        Returns how many tokens the next step can compute: `sequence.num_wanted`, but at most
        `max_tokens`. Returns 0, and changes nothing, if there is no free row, or not enough blocks
        for all of its tokens so far. Raises `RequestError` if it already has a block table.
        """
        if sequence in self.rows:
            raise RequestError(
                f"Sequence {sequence.sequence_id} already has a block table: call allocate once, "
                "and again only after free."
            )
        if not self._free_rows:
            return 0
        matched: list[int] = []
        # A sequence with pending prompt logprobs needs the logits of its whole prompt: no cache.
        if self.prefix_cache is not None and sequence.num_pending_prompt_logprobs == 0:
            matched = self.prefix_cache.match(sequence.token_ids, sequence.cache_salt)
        num_missing = blocks_needed(len(sequence), self.block_size) - len(matched)
        if num_missing > self.num_available:
            self._release_matched(matched)
            return 0
        self.rows[sequence] = self._free_rows.pop()
        self._extend(sequence, matched)
        sequence.num_computed = len(matched) * self.block_size
        sequence.num_cached_blocks = len(matched)
        if sequence.num_cached is None:  # otherwise it was preempted
            sequence.num_cached = sequence.num_computed
        self._emit_hit(sequence)
        num_tokens = min(sequence.num_wanted, max_tokens)
        reserved = self.allocate_slots(sequence, num_tokens)
        assert reserved, "there are blocks for the whole sequence"
        return num_tokens

    def allocate_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate slots for a sequence's next `num_tokens` tokens.

        Returns False, and changes nothing, if there are not enough blocks. If the next write goes
        into a shared block, the sequence gets its own copy, which `pop_pending_copies` reports.
        Raises `RequestError` if the sequence has no block table.
        """
        self._check_allocated(sequence)
        wanted = blocks_needed(sequence.num_computed + num_tokens, self.block_size)
        missing = max(wanted - len(sequence.block_ids), 0)
        copied = self._is_shared_tail(sequence)
        if missing + copied == 0:
            return True
        if not self._ensure_free(missing + copied):
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
        """Mark the next `num_tokens` tokens as computed, and store full blocks in the prefix cache.

        Raises `RequestError` if the tokens have no slots.
        """
        self._check_allocated(sequence)
        num_slots = len(sequence.block_ids) * self.block_size
        if sequence.num_computed + num_tokens > num_slots:
            raise RequestError(
                f"Sequence {sequence.sequence_id} has {num_slots} slots, {sequence.num_computed} "
                f"of them computed: {num_tokens} more cannot be marked as computed; call "
                "allocate_slots first."
            )
        sequence.num_computed += num_tokens
        self.cache_full_blocks(sequence)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Store the sequence's newly full blocks in the prefix cache.

        Where the cache already has an equal block, the sequence uses that one instead of its own.
        """
        num_full = sequence.num_computed // self.block_size
        if self.prefix_cache is None or num_full <= sequence.num_cached_blocks:
            return
        replaced = self.prefix_cache.insert(
            sequence.token_ids[: num_full * self.block_size],
            sequence.block_ids,
            sequence.num_cached_blocks,
            sequence.cache_salt,
        )
        if self.trace.active:
            self._emit_cached(sequence, num_full, dict(replaced))
        for index, known in replaced:
            self._replace(sequence, index, known)
        sequence.num_cached_blocks = num_full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share those blocks of `parent` that hold computed tokens with `child`.

        Both must have the same tokens so far, and no copies may be pending. The parent's full
        blocks are stored in the prefix cache first, because the cache must know every user of a
        block to tell whether it is evictable.
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
        """Free all blocks of a sequence; those in the prefix cache stay cached there.

        This preempts an unfinished sequence, which can only continue by `allocate` again.
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

    def _check_allocated(self, sequence: Sequence) -> None:
        if sequence not in self.rows:
            raise RequestError(
                f"Sequence {sequence.sequence_id} has no block table: call allocate first, and "
                "continue only if it does not return 0."
            )

    def _copy_tail(self, sequence: Sequence) -> None:
        """Replace the shared block that is written next by a copy that only this sequence owns."""
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
        """Return whether the next token goes into a block with other owners."""
        if sequence.num_computed % self.block_size == 0:
            return False
        last = sequence.block_ids[sequence.num_computed // self.block_size]
        return self.allocator.num_owners(last) > 1

    def _ensure_free(self, count: int) -> bool:
        """Evict cached blocks until `count` blocks are free; return False if there are too few."""
        missing = count - self.allocator.num_free
        if missing <= 0:
            return True
        if self.prefix_cache is None or self.prefix_cache.num_evictable < missing:
            return False
        for block_id in self.prefix_cache.evict(missing):
            if self.trace.active:
                self.trace.emit(EventKind.BLOCK_EVICTED, block=block_id)
        return True

    def _release(self, block_ids: list[int], sequence: Sequence) -> None:
        freed = self.allocator.release(block_ids)
        if self._copies:  # a freed block may become the target of another copy
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

    def _emit_cached(self, sequence: Sequence, num_full: int, replaced: dict[int, int]) -> None:
        for index in range(sequence.num_cached_blocks, num_full):
            own, sequence_id = sequence.block_ids[index], sequence.sequence_id
            if index not in replaced:
                self.trace.emit(EventKind.BLOCK_CACHED, sequence_id, block=own)
                continue
            known = replaced[index]
            self.trace.emit(EventKind.BLOCK_DEDUPLICATED, sequence_id, source=own, block=known)
            if self.allocator.num_owners(own) == 0:
                self.trace.emit(EventKind.BLOCK_FREED, sequence_id, block=own)
