"""Attention over keys and values in scattered blocks equals that over contiguous ones."""

import pytest
import torch

from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.model.attention import attention_naive

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 8


def make_pool(block_size: int, num_blocks: int = 40) -> KVPool:
    """Return a pool full of numbers that would show if they leaked."""
    pool = KVPool(LAYERS, num_blocks, KV_HEADS, block_size, HEAD_DIM, torch.float32)
    pool.kv.fill_(1e4)
    return pool


def make_batch(contexts: list[int], new: list[int], block_size: int, num_blocks: int = 40) -> Batch:
    """Return sequences of these context lengths; the last `new` tokens of each are computed now."""
    generator = torch.Generator().manual_seed(sum(contexts))
    free = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
    tables = [[free.pop() for _ in range(-(-context // block_size))] for context in contexts]
    longest = max(map(len, tables))
    positions = [
        list(range(context - count, context)) for context, count in zip(contexts, new, strict=True)
    ]
    slots = [
        [table[position // block_size] * block_size + position % block_size for position in own]
        for table, own in zip(tables, positions, strict=True)
    ]
    starts = torch.tensor([0, *new]).cumsum(0)
    return Batch(
        token_ids=torch.zeros(sum(new), dtype=torch.int64),
        positions=torch.tensor([each for own in positions for each in own]),
        slots=torch.tensor([each for own in slots for each in own]),
        query_starts=starts.tolist(),
        context_lens=torch.tensor(contexts),
        block_tables=torch.tensor([table + [0] * (longest - len(table)) for table in tables]),
        logits_rows=starts[1:] - 1,
        num_decodes=next((i for i, count in enumerate(new) if count != 1), len(new)),
    )


def slots_of(batch: Batch, row: int, count: int, block_size: int) -> torch.Tensor:
    position = torch.arange(count)
    return batch.block_tables[row][position // block_size] * block_size + position % block_size


def random_kv(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, KV_HEADS, HEAD_DIM), torch.randn(tokens, KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("contexts", "new"),
    [
        ([7], [7]),
        ([9, 16, 1], [1, 1, 1]),
        ([17, 30, 12, 5], [1, 1, 12, 3]),
        ([8, 33], [8, 16]),
        ([16, 16], [1, 15]),
    ],
)
def test_a_mixed_batch_attends_as_each_sequence_alone(
    contexts: list[int], new: list[int], block_size: int, window: int | None
) -> None:
    torch.manual_seed(1)
    pool = make_pool(block_size, num_blocks=100)
    batch = make_batch(contexts, new, block_size, num_blocks=100)
    k, v = zip(*(random_kv(context) for context in contexts), strict=True)
    for row, (context, count) in enumerate(zip(contexts, new, strict=True)):
        old = context - count
        for layer_id in range(LAYERS):
            pool.store(layer_id, k[row][:old], v[row][:old], slots_of(batch, row, old, block_size))
    q = torch.randn(sum(new), Q_HEADS, HEAD_DIM)
    attend = attend_paged(pool, batch, [window, None])
    new_k = torch.cat([each[len(each) - count :] for each, count in zip(k, new, strict=True)])
    new_v = torch.cat([each[len(each) - count :] for each, count in zip(v, new, strict=True)])
    for layer_id, own_window in enumerate([window, None]):
        together = attend(layer_id, q, new_k, new_v).split(new)
        alone = [
            attention_naive(own_q, own_k, own_v, own_window)
            for own_q, own_k, own_v in zip(q.split(new), k, v, strict=True)
        ]
        for ours, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_what_is_stored_through_a_table_is_gathered_through_it_in_order() -> None:
    pool = make_pool(block_size=4)
    k, v = random_kv(10)
    table = torch.tensor([7, 3, 21])
    slots = torch.tensor([table[i // 4] * 4 + i % 4 for i in range(10)])
    pool.store(1, k, v, slots)
    keys, values = pool.gather(1, table)
    assert torch.equal(keys[:10], k)
    assert torch.equal(values[:10], v)
    assert (pool.kv[0] == 1e4).all(), "another layer was written"
    untouched = [block for block in range(41) if block not in (7, 3, 21)]
    assert (pool.kv[1][:, untouched] == 1e4).all(), "another block was written"


def test_a_copied_block_is_equal_in_all_layers_and_then_independent() -> None:
    pool = make_pool(block_size=4)
    for layer_id in range(LAYERS):
        pool.store(layer_id, *random_kv(4), torch.arange(20, 24))
    before = pool.kv[:, :, 5].clone()
    pool.copy_blocks([(5, 9), (5, 11)])
    assert torch.equal(pool.kv[:, :, 9], before)
    assert torch.equal(pool.kv[:, :, 11], before)
    pool.store(0, *random_kv(1), torch.tensor([9 * 4]))
    assert torch.equal(pool.kv[:, :, 5], before)
    pool.copy_blocks([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_pool_is_zero_everywhere(dtype: torch.dtype) -> None:
    pool = KVPool(LAYERS, 5, KV_HEADS, 4, HEAD_DIM, dtype)
    assert pool.kv.shape == (LAYERS, 2, 6, 4, KV_HEADS, HEAD_DIM)
    assert pool.kv.dtype == dtype
    assert not pool.kv.any()
