"""Exercises of chapter 22: slots, a KV pool that stores by slots, attention block by block."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigen.kv_cache.paged import KVPool, slots_of
from minigen.model.attention import attention
from minigen_course.grading.exercise import (
    expect,
    expect_close,
    expect_equal,
    num_steps,
    of_pure_part,
)

AXES = ("slot", "head", "dimension")
ROWS = ("row", "slot", "head", "dimension")
LAYERS, BLOCKS, HEADS, DIM = 2, 6, 3, 4


def one_block_gives_its_offsets(part: Any) -> None:
    """a block table with one block of 4 slots:"""
    expect_equal(part([5], range(4), 4), [20, 21, 22, 23], "the slots of positions 0 to 3")


def blocks_need_not_be_adjacent(part: Any) -> None:
    """the block table [7, 3, 9], with blocks of 4 slots:"""
    expected = [*range(28, 32), *range(12, 16), 36, 37]
    expect_equal(part([7, 3, 9], range(10), 4), expected, "the slots of positions 0 to 9")


def positions_may_start_anywhere(part: Any) -> None:
    """the next token of a sequence of 7 tokens, and a chunk in the middle of a sequence:"""
    expect_equal(part([7, 3, 9], range(7, 8), 4), [15], "the slot of position 7")
    expect_equal(part([7, 3, 9], range(8, 9), 4), [36], "the slot of position 8")
    expect_equal(part([7, 3, 9], range(3, 6), 4), [31, 12, 13], "the slots of positions 3 to 5")
    expect_equal(part([7, 3, 9], range(5, 5), 4), [], "the slots of an empty range")


def every_block_size_works(part: Any) -> None:
    """blocks of 1, 3 and 16 slots:"""
    expect_equal(part([4, 2, 8], range(3), 1), [4, 2, 8], "slots in blocks of 1")
    expect_equal(part([4, 2], range(1, 6), 3), [13, 14, 6, 7, 8], "slots in blocks of 3")
    expect_equal(part([1, 9], range(15, 18), 16), [31, 144, 145], "slots in blocks of 16")


def _batch_of(*rows: list[int], context_lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables padded with 0, and context lengths, as arrays."""
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]
    return np.array(padded, np.int64), np.array(context_lens, np.int64)


def _expect_slots(part: Any, batch: tuple[np.ndarray, np.ndarray], size: int, what: str) -> None:
    tables, lens = (each.copy() for each in batch)
    found = part(tables, lens, size)
    expect(
        isinstance(found, np.ndarray),
        f"{what}: got {type(found).__name__}; it should return an array.",
    )
    right = [
        slots_of(row, [length - 1], size)[0]
        for row, length in zip(batch[0].tolist(), batch[1].tolist(), strict=True)
    ]
    expect_equal(found.tolist(), right, what)
    same = np.array_equal(tables, batch[0]) and np.array_equal(lens, batch[1])
    expect(same, f"{what}: it changed its arguments; it must leave them as they are.")


def each_sequence_has_the_slot_of_its_last_token(part: Any) -> None:
    """three sequences of 6, 9 and 3 tokens, in blocks of 4:"""
    batch = _batch_of([7, 3], [5, 2, 9], [1], context_lens=[6, 9, 3])
    _expect_slots(part, batch, 4, "the slots of positions 5, 8 and 2")


def a_full_block_ends_at_its_last_slot(part: Any) -> None:
    """sequences whose last block is exactly full, or holds one token:"""
    batch = _batch_of([7, 3], [5, 2], [4], [8], context_lens=[8, 5, 4, 1])
    _expect_slots(part, batch, 4, "the slots of positions 7, 4, 3 and 0")
    _expect_slots(part, _batch_of([6, 2, 4], context_lens=[3]), 1, "the slot in blocks of 1")
    _expect_slots(part, _batch_of([6, 2], context_lens=[32]), 16, "the slot in blocks of 16")


def no_sequences_have_no_slots(part: Any) -> None:
    """a batch without decodes:"""
    empty = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
    _expect_slots(part, empty, 4, "the slots of no sequences")


def the_batch_is_computed_without_a_loop(part: Any) -> None:
    """the work for 4 sequences, and for 1,024:"""
    counts = []
    for num_sequences in (4, 1024):
        lens = np.arange(num_sequences, dtype=np.int64) % 12 + 1
        tables = np.arange(3 * num_sequences, dtype=np.int64).reshape(-1, 3)
        _expect_slots(part, (tables, lens), 4, f"the slots of {num_sequences} sequences")
        counts.append(num_steps(partial(part, tables, lens, 4)))
    small, large = counts
    expect(
        large <= 2 * small,
        f"it ran {small} steps of Python for 4 sequences and {large} for 1,024; it should "
        "run the same number, so let NumPy work on all sequences at once.",
    )


def _pool(part: type[KVPool], block_size: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    return part(LAYERS, BLOCKS, HEADS, block_size, DIM, dtype)


def _new(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, HEADS, DIM, generator=generator)
    return k, v


def _slots(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def _expect_gathered(
    pool: Any, layer_id: int, table: list[int], stored: tuple[Tensor, Tensor], what: str
) -> None:
    """Expect that the first tokens gathered through the table are the stored ones."""
    found = pool.gather(layer_id, _slots(*table))
    expect(found is not None, "gather returned None; it should return the keys and the values.")
    expect_equal(len(found), 2, "the length of what gather returns (keys and values)")
    for name, mine, right in zip(("keys", "values"), found, stored, strict=True):
        where = f"the {name} of {what}, gathered through the table {table} of layer {layer_id}"
        num_slots = len(table) * pool.block_size
        expect_equal(list(mine.shape), [num_slots, HEADS, DIM], f"the shape of {where}")
        expect_close(mine[: len(right)], right, where, AXES)


def tokens_are_gathered_in_the_order_of_the_table(part: type[KVPool]) -> None:
    """ten tokens in the blocks 5, 2 and 6:"""
    pool, (k, v) = _pool(part), _new(10, 1)
    expect_equal(pool.block_size, 4, "block_size")
    expect_equal(
        pool.store(0, k, v, _slots(*slots_of([5, 2, 6], range(10), 4))), None, "what store returns"
    )
    _expect_gathered(pool, 0, [5, 2, 6], (k, v), "ten tokens")
    _expect_gathered(pool, 0, [2], (k[4:8], v[4:8]), "tokens 4 to 7")


def the_last_block_and_block_0_exist(part: type[KVPool]) -> None:
    """a pool of 6 blocks has block 6, and block 0 for padding:"""
    pool = _pool(part)
    first, last = _new(4, 1), _new(4, 2)
    pool.store(1, *first, _slots(*range(4)))
    pool.store(1, *last, _slots(*range(24, 28)))
    _expect_gathered(pool, 1, [6], last, "the last block")
    _expect_gathered(pool, 1, [0], first, "block 0")


def tokens_can_be_stored_one_by_one(part: type[KVPool]) -> None:
    """a prompt of 6 tokens, then three more tokens, next to another sequence:"""
    pool, (k, v), other = _pool(part), _new(9, 1), _new(5, 2)
    pool.store(0, k[:6], v[:6], _slots(*slots_of([3, 1, 4], range(6), 4)))
    pool.store(0, *other, _slots(*slots_of([2, 5], range(5), 4)))
    for position in range(6, 9):
        new = slice(position, position + 1)
        pool.store(0, k[new], v[new], _slots(*slots_of([3, 1, 4], [position], 4)))
    _expect_gathered(pool, 0, [3, 1, 4], (k, v), "nine tokens")
    _expect_gathered(pool, 0, [2, 5], other, "the five tokens of the other sequence")


def a_batch_is_stored_at_once_in_any_order(part: type[KVPool]) -> None:
    """one new token of each of three sequences, in slots that are not adjacent:"""
    pool, (k, v) = _pool(part), _new(3, 1)
    pool.store(0, k, v, _slots(21, 6, 8))
    _expect_gathered(pool, 0, [2], (k[2:], v[2:]), "the third sequence's token")
    keys, values = pool.gather(0, _slots(5))
    expect_close(keys[1], k[0], "the first sequence's key, in slot 21", AXES[1:])
    expect_close(values[1], v[0], "the first sequence's value, in slot 21", AXES[1:])
    keys, _ = pool.gather(0, _slots(1))
    expect_close(keys[2], k[1], "the second sequence's key, in slot 6", AXES[1:])


def several_tables_are_gathered_at_once(part: type[KVPool]) -> None:
    """the block tables of two sequences, as the rows of one tensor:"""
    pool, first, second = _pool(part), _new(8, 1), _new(8, 2)
    pool.store(0, *first, _slots(*slots_of([3, 1], range(8), 4)))
    pool.store(0, *second, _slots(*slots_of([2, 6], range(8), 4)))
    tables = torch.tensor([[3, 1], [2, 6]])
    found = pool.gather(0, tables)
    for name, mine, rights in zip(
        ("keys", "values"), found, zip(first, second, strict=True), strict=True
    ):
        expect_close(mine, torch.stack(rights), f"the {name} of two tables", ROWS)


def layers_are_separate(part: type[KVPool]) -> None:
    """two layers store different tokens in the same slots:"""
    pool, first, second = _pool(part), _new(4, 1), _new(4, 2)
    slots = _slots(*range(8, 12))
    pool.store(0, *first, slots)
    pool.store(1, *second, slots)
    _expect_gathered(pool, 0, [2], first, "the tokens of the first layer")
    _expect_gathered(pool, 1, [2], second, "the tokens of the second layer")


def a_new_pool_holds_zeros(part: type[KVPool]) -> None:
    """a new pool in bfloat16 (unwritten slots are masked, but they are read, so no NaN):"""
    pool = _pool(part, block_size=3, dtype=torch.bfloat16)
    keys, values = pool.gather(0, _slots(1, 4))
    expect_equal(keys.dtype, torch.bfloat16, "the dtype of the keys")
    zeros = torch.zeros(6, HEADS, DIM)
    expect_close(keys.float(), zeros, "keys of a new pool", AXES)
    expect_close(values.float(), zeros, "values of a new pool", AXES)


def gather_returns_a_copy(part: type[KVPool]) -> None:
    """the caller changes the tensors that it passed to store, and those that gather returned:"""
    pool, (k, v) = _pool(part), _new(4, 1)
    before = k.clone(), v.clone()
    pool.store(0, k, v, _slots(*range(4, 8)))
    k.zero_()
    v.zero_()
    for each in pool.gather(0, _slots(1)):
        each.zero_()
    _expect_gathered(pool, 0, [1], before, "four tokens")


def whole_blocks_are_copied_in_all_layers(part: type[KVPool]) -> None:
    """block 2 is copied to blocks 4 and 5, and then block 4 is written:"""
    pool = _pool(part)
    stored = [_new(4, 1), _new(4, 2)]
    for layer_id, each in enumerate(stored):
        pool.store(layer_id, *each, _slots(*range(8, 12)))
    pool.copy_blocks([])
    pool.copy_blocks([(2, 4), (2, 5)])
    new = _new(4, 3)
    pool.store(0, *new, _slots(*range(16, 20)))
    _expect_gathered(pool, 0, [4], new, "block 4, written after the copy")
    for layer_id, each in enumerate(stored):
        _expect_gathered(pool, layer_id, [5], each, "block 5, a copy of block 2")
        _expect_gathered(pool, layer_id, [2], each, "block 2, after it was copied")
    _expect_gathered(pool, 1, [4], stored[1], "block 4, a copy of block 2")


class WatchedPool(KVPool):
    """A pool that is read through `gather` only, and counts the blocks of each call."""

    def __init__(self, head_dim: int = DIM):
        self.inner = KVPool(LAYERS, BLOCKS, HEADS, 4, head_dim, torch.float32)
        self.block_size = self.inner.block_size
        self.most_blocks, self.read = 0, list[int]()

    def fill(self, seed: int, scale: float = 1.0) -> None:
        """Fill all slots with random numbers."""
        generator = torch.Generator().manual_seed(seed)
        self.inner.kv.copy_(scale * torch.randn(self.inner.kv.shape, generator=generator))

    def gather(self, layer_id: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        self.most_blocks = max(self.most_blocks, block_table.numel())
        self.read += block_table.flatten().tolist()
        return self.inner.gather(layer_id, block_table)


def _expect_attended(
    part: Any, pool: WatchedPool, table: list[int], num_tokens: int, q: Tensor, what: str
) -> None:
    keys, values = (each[:num_tokens] for each in pool.gather(1, torch.tensor(table)))
    right = attention(q[None], keys, values)[0]
    pool.most_blocks, pool.read = 0, []
    found = part(q, pool, 1, list(table), num_tokens)
    expect_close(found, right, what, ("head", "dimension"))
    expect(
        pool.most_blocks == 1,
        f"{what}: gather was called with {pool.most_blocks} blocks at once; it should be called "
        "with one, because the point is to store no copy of the whole context.",
    )
    needed = table[: -(-num_tokens // pool.block_size)]
    expect_equal(sorted(pool.read), sorted(needed), f"{what}: the blocks that were read, sorted")


def _query(heads: int, dim: int, seed: int) -> Tensor:
    return torch.randn(heads, dim, generator=torch.Generator().manual_seed(seed))


def blocks_are_attended_one_after_another(part: Any) -> None:
    """10 tokens in the blocks 5, 2 and 6, for 6 query heads over 3 KV heads:"""
    pool = WatchedPool(head_dim=16)
    pool.fill(1)
    _expect_attended(part, pool, [5, 2, 6], 10, _query(6, 16, 2), "attention over 10 tokens")


def only_the_sequences_own_tokens_count(part: Any) -> None:
    """one token, full blocks, and a table with a block that is not used yet:"""
    pool = WatchedPool()
    pool.fill(3)
    for num_tokens, table in ((1, [4]), (4, [3]), (8, [6, 1]), (5, [6, 1]), (4, [2, 5, 1])):
        what = f"attention over {num_tokens} tokens in the blocks {table}"
        _expect_attended(part, pool, table, num_tokens, _query(3, DIM, num_tokens), what)


def large_scores_do_not_overflow(part: Any) -> None:
    """scores of several hundreds, whose exponentials are infinite in float32:"""
    for seed in range(4):
        pool = WatchedPool(head_dim=16)
        pool.fill(seed, scale=30)
        q = 20 * _query(3, 16, seed + 9)
        _expect_attended(part, pool, [5, 2, 6, 1], 15, q, "attention with large scores")
        pool.inner.kv.abs_()
        what = "attention with scores far below 0"
        _expect_attended(part, pool, [5, 2, 6, 1], 15, -q.abs(), what)


CHECKS = {
    "slots_of": of_pure_part(
        one_block_gives_its_offsets,
        blocks_need_not_be_adjacent,
        positions_may_start_anywhere,
        every_block_size_works,
    ),
    "decode_slots": (
        each_sequence_has_the_slot_of_its_last_token,
        a_full_block_ends_at_its_last_slot,
        no_sequences_have_no_slots,
        the_batch_is_computed_without_a_loop,
    ),
    "KVPool": (
        tokens_are_gathered_in_the_order_of_the_table,
        the_last_block_and_block_0_exist,
        tokens_can_be_stored_one_by_one,
        a_batch_is_stored_at_once_in_any_order,
        several_tables_are_gathered_at_once,
        layers_are_separate,
        a_new_pool_holds_zeros,
        gather_returns_a_copy,
        whole_blocks_are_copied_in_all_layers,
    ),
    "attend_by_block": of_pure_part(
        blocks_are_attended_one_after_another,
        only_the_sequences_own_tokens_count,
        large_scores_do_not_overflow,
    ),
}
