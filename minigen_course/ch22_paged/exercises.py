"""Checks of chapter 22: where a token's slot is, and a pool that stores and gathers by slots."""

from typing import Any

import torch
from torch import Tensor

from minigen.kv_cache.paged import KVPool, slots_of
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_close, expect_equal

AXES = ("slot", "head", "dimension")
ROWS = ("row", "slot", "head", "dimension")
LAYERS, BLOCKS, HEADS, DIM = 2, 6, 3, 4


def one_block_is_offsets(part: Any) -> None:
    """a table of one block, of 4 slots:"""
    expect_equal(part([5], range(4), 4), [20, 21, 22, 23], "the slots of positions 0 to 3")


def blocks_need_not_be_neighbours(part: Any) -> None:
    """the table [7, 3, 9], blocks of 4:"""
    expected = [*range(28, 32), *range(12, 16), 36, 37]
    expect_equal(part([7, 3, 9], range(10), 4), expected, "the slots of positions 0 to 9")


def positions_may_begin_anywhere(part: Any) -> None:
    """the next token of a sequence of 7, and a chunk in its middle:"""
    expect_equal(part([7, 3, 9], range(7, 8), 4), [15], "the slot of position 7")
    expect_equal(part([7, 3, 9], range(8, 9), 4), [36], "the slot of position 8")
    expect_equal(part([7, 3, 9], range(3, 6), 4), [31, 12, 13], "the slots of positions 3 to 5")
    expect_equal(part([7, 3, 9], range(5, 5), 4), [], "the slots of no positions")


def any_block_size_will_do(part: Any) -> None:
    """blocks of 1, 3 and 16:"""
    expect_equal(part([4, 2, 8], range(3), 1), [4, 2, 8], "slots in blocks of 1")
    expect_equal(part([4, 2], range(1, 6), 3), [13, 14, 6, 7, 8], "slots in blocks of 3")
    expect_equal(part([1, 9], range(15, 18), 16), [31, 144, 145], "slots in blocks of 16")


def _pool(part: type[KVPool], block_size: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    return part(LAYERS, BLOCKS, HEADS, block_size, DIM, dtype)


def _new(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, HEADS, DIM, generator=generator)
    return k, v


def _slots(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def _expect_gathered(
    pool: Any, layer_id: int, table: list[int], kept: tuple[Tensor, Tensor], what: str
) -> None:
    """The first tokens that are gathered through the table are those that were stored."""
    found = pool.gather(layer_id, _slots(*table))
    expect(found is not None, "gather returned None; return the keys and the values.")
    expect_equal(len(found), 2, "what gather returns, keys and values: its length")
    for name, mine, right in zip(("keys", "values"), found, kept, strict=True):
        where = f"the {name} of {what}, gathered through the table {table} of layer {layer_id}"
        num_slots = len(table) * pool.block_size
        expect_equal(list(mine.shape), [num_slots, HEADS, DIM], f"the shape of {where}")
        expect_close(mine[: len(right)], right, where, AXES)


def what_is_stored_is_gathered_in_the_tables_order(part: type[KVPool]) -> None:
    """ten tokens in the blocks 5, 2 and 6:"""
    pool, (k, v) = _pool(part), _new(10, 1)
    expect_equal(pool.block_size, 4, "block_size")
    expect_equal(pool.store(0, k, v, _slots(*slots_of([5, 2, 6], range(10), 4))), None, "store")
    _expect_gathered(pool, 0, [5, 2, 6], (k, v), "ten tokens")
    _expect_gathered(pool, 0, [2], (k[4:8], v[4:8]), "the tokens 4 to 7")


def the_last_block_and_block_0_are_there(part: type[KVPool]) -> None:
    """a pool of 6 blocks holds block 6, and block 0, where padding writes:"""
    pool = _pool(part)
    first, last = _new(4, 1), _new(4, 2)
    pool.store(1, *first, _slots(*range(4)))
    pool.store(1, *last, _slots(*range(24, 28)))
    _expect_gathered(pool, 1, [6], last, "the last block")
    _expect_gathered(pool, 1, [0], first, "block 0")


def tokens_come_one_by_one(part: type[KVPool]) -> None:
    """a prompt of 6 tokens, then three more, beside another sequence:"""
    pool, (k, v), other = _pool(part), _new(9, 1), _new(5, 2)
    pool.store(0, k[:6], v[:6], _slots(*slots_of([3, 1, 4], range(6), 4)))
    pool.store(0, *other, _slots(*slots_of([2, 5], range(5), 4)))
    for position in range(6, 9):
        new = slice(position, position + 1)
        pool.store(0, k[new], v[new], _slots(*slots_of([3, 1, 4], [position], 4)))
    _expect_gathered(pool, 0, [3, 1, 4], (k, v), "nine tokens")
    _expect_gathered(pool, 0, [2, 5], other, "the other sequence's five")


def a_batch_is_stored_at_once_in_any_order(part: type[KVPool]) -> None:
    """the new tokens of three sequences, whose slots lie apart:"""
    pool, (k, v) = _pool(part), _new(3, 1)
    pool.store(0, k, v, _slots(21, 6, 8))
    _expect_gathered(pool, 0, [2], (k[2:], v[2:]), "the third sequence's token")
    keys, values = pool.gather(0, _slots(5))
    expect_close(keys[1], k[0], "the first sequence's key, in slot 21", AXES[1:])
    expect_close(values[1], v[0], "the first sequence's value, in slot 21", AXES[1:])
    keys, _ = pool.gather(0, _slots(1))
    expect_close(keys[2], k[1], "the second sequence's key, in slot 6", AXES[1:])


def several_tables_are_gathered_at_once(part: type[KVPool]) -> None:
    """the tables of two sequences, one below the other:"""
    pool, first, second = _pool(part), _new(8, 1), _new(8, 2)
    pool.store(0, *first, _slots(*slots_of([3, 1], range(8), 4)))
    pool.store(0, *second, _slots(*slots_of([2, 6], range(8), 4)))
    tables = torch.tensor([[3, 1], [2, 6]])
    found = pool.gather(0, tables)
    for name, mine, rights in zip(
        ("keys", "values"), found, zip(first, second, strict=True), strict=True
    ):
        expect_close(mine, torch.stack(rights), f"the {name} of two tables", ROWS)


def layers_are_apart(part: type[KVPool]) -> None:
    """two layers store other tokens in the same slots:"""
    pool, first, second = _pool(part), _new(4, 1), _new(4, 2)
    slots = _slots(*range(8, 12))
    pool.store(0, *first, slots)
    pool.store(1, *second, slots)
    _expect_gathered(pool, 0, [2], first, "the first layer's")
    _expect_gathered(pool, 1, [2], second, "the second layer's")


def what_was_not_written_is_no_nan(part: type[KVPool]) -> None:
    """a new pool, in bfloat16:"""
    pool = _pool(part, block_size=3, dtype=torch.bfloat16)
    keys, values = pool.gather(0, _slots(1, 4))
    expect_equal(keys.dtype, torch.bfloat16, "the type of the keys")
    zeros = torch.zeros(6, HEADS, DIM)
    expect_close(keys.float(), zeros, "keys of a new pool, masked later but read", AXES)
    expect_close(values.float(), zeros, "values of a new pool, masked later but read", AXES)


def what_is_gathered_is_a_copy(part: type[KVPool]) -> None:
    """what was gathered is changed, and what was stored:"""
    pool, (k, v) = _pool(part), _new(4, 1)
    before = k.clone(), v.clone()
    pool.store(0, k, v, _slots(*range(4, 8)))
    k.zero_()
    v.zero_()
    for each in pool.gather(0, _slots(1)):
        each.zero_()
    _expect_gathered(pool, 0, [1], before, "four tokens")


def whole_blocks_are_copied_in_all_layers(part: type[KVPool]) -> None:
    """block 2 is copied to 4 and to 5, and then written:"""
    pool = _pool(part)
    stored = [_new(4, 1), _new(4, 2)]
    for layer_id, each in enumerate(stored):
        pool.store(layer_id, *each, _slots(*range(8, 12)))
    pool.copy_blocks([])
    pool.copy_blocks([(2, 4), (2, 5)])
    new = _new(4, 3)
    pool.store(0, *new, _slots(*range(16, 20)))
    _expect_gathered(pool, 0, [4], new, "block 4, written after it was copied")
    for layer_id, each in enumerate(stored):
        _expect_gathered(pool, layer_id, [5], each, "block 5, a copy")
        _expect_gathered(pool, layer_id, [2], each, "block 2, which was copied")
    _expect_gathered(pool, 1, [4], stored[1], "block 4, a copy")


SLOTS_USE = """from minigen import LLM, SamplingParams

llm = LLM.load(num_blocks=64)
with using(22, slots_of=mine):
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)"""

POOL_USE = """from minigen import LLM, SamplingParams

with using(22, KVPool=mine):  # what runs layer by layer keeps its keys and values in it
    llm = LLM.load(weights="float32", num_blocks=64)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)"""

EXERCISES = (
    Exercise(
        "slots_of",
        slots_of,
        (
            one_block_is_offsets,
            blocks_need_not_be_neighbours,
            positions_may_begin_anywhere,
            any_block_size_will_do,
        ),
        (
            "position // block_size says which entry of the table it is, position % block_size "
            "where in the block.",
            "Block b begins at slot b * block_size.",
        ),
        "Write the slot mapping: for each position of a sequence, the slot where its key and "
        "value are. `block_ids` is the sequence's block table.",
        SLOTS_USE,
        "The engine calls it for every sequence in every step, with one position each. Write it "
        "for a whole batch of decodes at once, with NumPy and without a loop. From how many "
        "sequences on is it faster?",
    ),
    Exercise(
        "KVPool",
        KVPool,
        (
            what_is_stored_is_gathered_in_the_tables_order,
            the_last_block_and_block_0_are_there,
            tokens_come_one_by_one,
            a_batch_is_stored_at_once_in_any_order,
            several_tables_are_gathered_at_once,
            layers_are_apart,
            what_was_not_written_is_no_nan,
            what_is_gathered_is_a_copy,
            whole_blocks_are_copied_in_all_layers,
        ),
        (
            "One tensor of zeros will do: [layers, 2, num_blocks + 1, block_size, kv_heads, "
            "head_dim], keys first, values second.",
            "store: seen as [blocks * block_size, kv_heads, head_dim], a layer's keys are indexed "
            "by slot.",
            "gather: index the blocks by the table, then let the axes of blocks and block_size "
            "become one. The table may have several rows.",
        ),
        "Write the pool. `store` puts each token's key and value into its slot; `gather` returns "
        "the keys and values of a table's blocks, in the table's order, as if they were "
        "contiguous; `copy_blocks` copies whole blocks, in all layers. Block 0 is there too, "
        "for padding.",
        POOL_USE,
        "Attention over a gathered copy reads every key twice and writes it once. Write attention "
        "that goes over the table block by block without a copy. What must it carry from block "
        "to block for the softmax to come out right?",
    ),
)
