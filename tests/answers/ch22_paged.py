"""Answers to the exercises of chapter 22."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigen.model.attention import attention
from tests.answers import Answers


def by_divmod(block_ids: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Right, in a loop."""
    slots = []
    for position in positions:
        index, offset = divmod(position, block_size)
        slots.append(block_size * block_ids[index] + offset)
    return slots


def by_all_slots(block_ids: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Right: lists all slots of the table and picks the positions."""
    starts = np.array(block_ids) * block_size
    slots = (starts[:, None] + np.arange(block_size)).flatten()
    return slots[list(positions)].tolist()


def wrong_slots(name: str) -> Any:
    def one(block_ids: Sequence[int], position: int, size: int) -> int:
        match name:
            case "one slot too far":
                return block_ids[position // size] * size + position % size + 1
            case "blocks counted from one":
                return (block_ids[position // size] - 1) * size + position % size
            case "as if contiguous":
                return block_ids[0] * size + position
            case "offset forgotten":
                return block_ids[position // size] * size
            case "position for offset":
                return block_ids[position // size] * size + position
            case "always blocks of 4":
                return block_ids[position // 4] * 4 + position % 4
            case "index and offset swapped":
                return block_ids[position % size % len(block_ids)] * size + position // size
            case "block not multiplied":
                return block_ids[position // size] + position % size
            case "last block for all":
                return block_ids[-1] * size + position % size
        return block_ids[position // size] * size + position % size

    def slots_of(block_ids: Sequence[int], positions: Iterable[int], block_size: int) -> Any:
        if name == "positions from zero":
            positions = range(len(list(positions)))
        slots = [one(block_ids, each, block_size) for each in positions]
        if name == "only the last":
            return slots[-1:]
        return None if name == "returns None" else slots

    return slots_of


WRONG_SLOTS = [
    *("one slot too far", "blocks counted from one", "as if contiguous", "offset forgotten"),
    *("position for offset", "always blocks of 4", "index and offset swapped"),
    *("block not multiplied", "last block for all", "positions from zero", "only the last"),
    "returns None",
]


def taken_along(tables: np.ndarray, lens: np.ndarray, block_size: int) -> Any:
    """Right: picks the entries by take_along_axis."""
    index, offset = np.divmod(lens - 1, block_size)
    return np.take_along_axis(tables, index[:, None], axis=1)[:, 0] * block_size + offset


def from_flat_tables(tables: np.ndarray, lens: np.ndarray, block_size: int) -> Any:
    """Right: all slots of all tables on one axis."""
    slots = (tables[..., None] * block_size + np.arange(block_size)).reshape(
        len(tables), block_size * tables.shape[1]
    )
    return slots[np.arange(len(lens)), lens - 1]


def wrong_batch(name: str) -> Any:
    def decode_slots(tables: np.ndarray, lens: np.ndarray, block_size: int) -> Any:
        rows, last = np.arange(len(lens)), lens - 1
        if name == "changes the lengths":
            lens -= 1
            last = lens
        if name == "changes the tables":
            tables *= block_size
            return tables[rows, last // block_size] + last % block_size
        blocks = tables[rows, last // block_size]
        match name:
            case "one slot too far":
                padded = np.pad(tables, ((0, 0), (0, 1)))
                return padded[rows, lens // block_size] * block_size + lens % block_size
            case "tokens in the last block":
                return blocks * block_size + lens % block_size - 1
            case "last column":
                return tables[:, -1] * block_size + last % block_size
            case "first block":
                return tables[:, 0] * block_size + last % block_size
            case "as if contiguous":
                return tables[:, 0] * block_size + last
            case "blocks of 4":
                return blocks * 4 + last % 4
            case "offset forgotten":
                return blocks * block_size
            case "returns a list":
                return (blocks * block_size + last % block_size).tolist()
            case "a loop":
                slots = [
                    int(tables[row, position // block_size]) * block_size + position % block_size
                    for row, position in enumerate(last.tolist())
                ]
                return np.array(slots, np.int64)
            case "a loop inside a function":
                pick = np.vectorize(lambda block, at: block * block_size + at % block_size)
                return pick(blocks, last) if len(last) else last
        return blocks * block_size + last % block_size

    return decode_slots


WRONG_BATCHES = [
    *("changes the lengths", "changes the tables", "one slot too far", "tokens in the last block"),
    *("last column", "first block", "as if contiguous", "blocks of 4", "offset forgotten"),
    *("returns a list", "a loop", "a loop inside a function"),
]


class ListOfBlocks:
    """Right: separate tensors for keys and values of each layer, token by token."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        self.block_size = block_size
        shape = (num_blocks + 1, block_size, kv_heads, head_dim)
        self.halves = [[torch.zeros(shape, dtype=dtype) for _ in "kv"] for _ in range(layers)]

    def store(self, layer_id: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        for half, new in zip(self.halves[layer_id], (k, v), strict=True):
            for token, slot in enumerate(slots.tolist()):
                half[slot // self.block_size, slot % self.block_size] = new[token]

    def gather(self, layer_id: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (half[block_table].flatten(-4, -3) for half in self.halves[layer_id])
        return keys, values

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for half in (half for halves in self.halves for half in halves):
                half[target] = half[source]


class BySlots:
    """Right: one long axis of slots; blocks exist only as numbers."""

    def __init__(self, layers: int, num_blocks: int, kv_heads: int, *sizes: Any):
        self.block_size, head_dim, dtype = sizes
        num_slots = (num_blocks + 1) * self.block_size
        self.memory = torch.zeros(layers, num_slots, 2, kv_heads, head_dim, dtype=dtype)

    def _slots(self, block_table: Tensor) -> Tensor:
        first = block_table[..., None] * self.block_size
        return (first + torch.arange(self.block_size)).flatten(-2)

    def store(self, layer_id: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.memory[layer_id, slots] = torch.stack([k, v], 1).to(self.memory.dtype)

    def gather(self, layer_id: int, block_table: Tensor) -> Any:
        return self.memory[layer_id, self._slots(block_table)].unbind(-3)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            old, new = (self._slots(torch.tensor([each])) for each in (source, target))
            self.memory[:, new] = self.memory[:, old]


def wrong_pool(name: str) -> type:
    class Pool:
        def __init__(
            self, layers: int, num_blocks: int, heads: int, block_size: int, dim: int, dtype: Any
        ):
            blocks = num_blocks if name == "no block 0" else num_blocks + 1
            make = torch.zeros
            if name == "not cleared":
                make = lambda *shape, dtype: torch.full(shape, torch.nan, dtype=dtype)  # noqa: E731
            self.kv = make(layers, 2, blocks, block_size, heads, dim, dtype=dtype)
            if name == "always float32":
                self.kv = self.kv.float()
            self.block_size = 16 if name == "always blocks of 16" else block_size

        def store(self, layer_id: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
            if name == "one layer for all":
                layer_id = 0
            if name == "one slot too far":
                slots = slots + 1
            if name == "from the first slot on":
                slots = slots[0] + torch.arange(len(slots))
            if name == "sorted slots":
                slots = slots.sort().values
            if name == "keys and values swapped":
                k, v = v, k
            for half, new in zip(self.kv[layer_id], (k, v), strict=True):
                flat = half.flatten(0, 1)
                if name == "slots as blocks":
                    half[slots % len(half), 0] = new
                else:
                    flat[slots % len(flat)] = new.to(flat.dtype)
                if name == "values forgotten":
                    return

        def gather(self, layer_id: int, block_table: Tensor) -> Any:
            if name == "one layer for all":
                layer_id = 0
            if name == "sorted table":
                block_table = block_table.sort().values
            if name == "one table only" and block_table.ndim > 1:
                block_table = block_table[0]
            if name == "all rows in one":
                block_table = block_table.flatten()
            if name == "first block only":
                block_table = block_table[..., :1]
            if name == "as if adjacent":
                first = block_table[..., :1]
                block_table = (first + torch.arange(block_table.shape[-1])) % self.kv.shape[2]
            keys, values = (half[block_table % len(half)] for half in self.kv[layer_id])
            if name == "blocks not joined":
                return keys, values
            if name == "a view":
                keys, values = (half[int(block_table.flatten()[0])] for half in self.kv[layer_id])
                return keys, values
            keys, values = keys.flatten(-4, -3), values.flatten(-4, -3)
            if name == "keys only":
                return keys
            if name == "heads first":
                return keys.transpose(-3, -2), values.transpose(-3, -2)
            return None if name == "returns None" else (keys, values)

        def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
            for source, target in pairs:
                if name == "copies backwards":
                    source, target = target, source
                if name == "copies the first layer":
                    self.kv[0, :, target] = self.kv[0, :, source]
                elif name == "copies keys only":
                    self.kv[:, 0, target] = self.kv[:, 0, source]
                elif name == "copies one slot":
                    self.kv[:, :, target, 0] = self.kv[:, :, source, 0]
                elif name != "copies nothing":
                    self.kv[:, :, target] = self.kv[:, :, source]
                if name == "moves":
                    self.kv[:, :, source] = 0
                if name == "copies the first pair":
                    return

    return Pool


WRONG_POOLS = [
    *("no block 0", "not cleared", "always float32", "always blocks of 16", "one layer for all"),
    *("one slot too far", "from the first slot on", "sorted slots", "keys and values swapped"),
    *("slots as blocks", "values forgotten", "sorted table", "one table only", "all rows in one"),
    *("first block only", "as if adjacent", "blocks not joined", "a view", "keys only"),
    *("heads first", "returns None", "copies backwards", "copies the first layer"),
    "copies keys only",
    *("copies one slot", "copies nothing", "moves", "copies the first pair"),
]


def by_log_sums(q: Tensor, pool: Any, layer_id: int, block_ids: list[int], num_tokens: int) -> Any:
    """Right: merges normalised parts by the logarithms of their sums, from the last block on."""
    size = pool.block_size
    out, log_sum = torch.zeros_like(q), torch.full((len(q), 1), -torch.inf)
    for index in reversed(range((num_tokens + size - 1) // size)):
        keys, values = pool.gather(layer_id, torch.tensor([block_ids[index]]))
        held = slice(0, num_tokens - index * size)
        group = len(q) // keys.shape[1]
        keys, values = (each[held].repeat_interleave(group, 1) for each in (keys, values))
        scores = (q * keys).sum(-1).T / q.shape[-1] ** 0.5
        own = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(log_sum, own)
        part = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        out = out * (log_sum - both).exp() + part * (own - both).exp()
        log_sum = both
    return out


def _attended(
    q: Tensor, pool: Any, layer_id: int, block_ids: list[int], num_tokens: int, name: str
) -> Any:
    size, heads = pool.block_size, len(q)
    count = -(-num_tokens // size)
    if name == "gathers at once":
        keys, values = (
            each[:num_tokens] for each in pool.gather(layer_id, torch.tensor(block_ids[:count]))
        )
        return attention(q[None], keys, values)[0]
    if name == "reads all blocks":
        count = len(block_ids)
    if name == "forgets the last block":
        count -= 1
    largest = torch.full((heads, 1), -torch.inf)
    if name == "begins at 0":
        largest = torch.zeros(heads, 1)
    total, mixed = torch.zeros(heads, 1), torch.zeros_like(q)
    for index in range(count):
        block = block_ids[0] + index if name == "as if adjacent" else block_ids[index]
        keys, values = pool.gather(layer_id if name != "layer 0" else 0, torch.tensor([block]))
        if name == "reads twice":
            pool.gather(layer_id, torch.tensor([block]))
        held = size if name == "counts empty slots" else max(0, num_tokens - index * size)
        group = heads // keys.shape[1]
        if name == "repeats in the wrong order":
            keys, values = (each[:held].repeat(1, group, 1) for each in (keys, values))
        else:
            keys, values = (each[:held].repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("hd,khd->hk", q, keys)
        if name != "not scaled":
            scores = scores / q.shape[-1] ** 0.5
        if not len(keys):
            continue
        own = scores.amax(-1, keepdim=True)
        new = own if name == "this block's largest" else torch.maximum(largest, own)
        if name == "no maximum":
            new = torch.zeros(heads, 1)
        kept = (largest - new).exp() if name != "no maximum" else torch.ones(heads, 1)
        weights = (scores - new).exp()
        if name != "sum not rescaled":
            total = total * kept
        if name != "values not rescaled":
            mixed = mixed * kept
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + torch.einsum("hk,khd->hd", weights, values)
        largest = new
    if name == "mean of the blocks":
        return mixed / total / count
    return mixed if name == "not divided" else mixed / total


def attended(name: str) -> Any:
    def attend_by_block(
        q: Tensor, pool: Any, layer_id: int, block_ids: list[int], num_tokens: int
    ) -> Any:
        return _attended(q, pool, layer_id, block_ids, num_tokens, name)

    return attend_by_block


WRONG_ATTENDED = [
    *("gathers at once", "reads all blocks", "forgets the last block", "as if adjacent"),
    *("layer 0", "reads twice", "counts empty slots", "repeats in the wrong order", "not scaled"),
    *("this block's largest", "no maximum", "sum not rescaled", "values not rescaled"),
    *("mean of the blocks", "not divided", "begins at 0"),
]

ANSWERS = {
    "slots_of": Answers(
        right=(by_divmod, by_all_slots, wrong_slots("nothing")),
        wrong={name: wrong_slots(name) for name in WRONG_SLOTS},
        equivalent={},
    ),
    "decode_slots": Answers(
        right=(taken_along, from_flat_tables, wrong_batch("nothing")),
        wrong={name: wrong_batch(name) for name in WRONG_BATCHES},
        equivalent={},
    ),
    "KVPool": Answers(
        right=(ListOfBlocks, BySlots, wrong_pool("nothing")),
        wrong={name: wrong_pool(name) for name in WRONG_POOLS},
        equivalent={
            "1 -> 2": "one block more than there are; it is never used",
            "True -> False": "zip's strict: there are two halves, for keys and for values",
        },
    ),
    "attend_by_block": Answers(
        right=(by_log_sums, attended("nothing")),
        wrong={name: attended(name) for name in WRONG_ATTENDED},
        equivalent={},
    ),
}
