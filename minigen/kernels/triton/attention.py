"""`attention_backend="triton"`: a step's attention by the kernels, decodes and prefills each in one launch."""

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import torch
from torch import Tensor

from minigen.kernels.triton.decode_attention import num_splits, paged_decode_triton
from minigen.kernels.triton.prefill_attention import flash_prefill_triton
from minigen.kv_cache.paged import Batch, KVPool
from minigen.protocols import Attend


def num_processors(device: torch.device) -> int:
    """Multiprocessors that run programs at the same time; a few where there is no GPU."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the processor's on the device, behind all that is queued there: nobody waits.

    A GPU fetches them by itself, out of memory that stays in its place.
    """
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def attend_triton(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
    """`minigen.kv_cache.paged.attend_paged` by kernels that read the pool through block tables."""
    attention = PagedAttention(pool, batch, windows)

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool.store(layer_id, k, v, batch.slots)
        return attention.read(layer_id, q.contiguous())

    return attend


class DevicePool:
    """`minigen.kv_cache.paged.KVPool` in a device's memory; kernels store into it themselves."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        shape = (layers, 2, num_blocks + 1, block_size, kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks, each (source, target), in all layers."""
        if pairs:
            sources, targets = sent(torch.tensor(pairs), self.kv.device).unbind(1)
            self.kv[:, :, targets] = self.kv[:, :, sources]


class PagedAttention:
    """Attention of one batch, in any layer; the batch's tensors are where the pool is."""

    def __init__(self, pool: KVPool | DevicePool, batch: Batch, windows: SequenceOf[int | None]):
        self.pool, self.batch, self.windows = pool, batch, windows
        starts = batch.query_starts[batch.num_decodes :]
        self.most_new = max((end - begin for begin, end in pairwise(starts)), default=0)
        # Decodes alone need no copy to the device here, which a captured step must not make.
        self.starts = batch.slots[:0]
        if self.most_new:
            self.starts = sent(torch.tensor(starts), batch.slots.device)
        num_programs = batch.num_decodes * pool.kv.shape[4]
        longest = batch.block_tables.shape[1] * pool.block_size
        self.splits = num_splits(num_programs, longest, num_processors(batch.slots.device))

    def read(self, layer_id: int, q: Tensor) -> Tensor:
        """Attention of `q`, contiguous, over what is in the pool, its own keys and values too."""
        batch, window, decodes = self.batch, self.windows[layer_id], self.batch.num_decodes
        keys, values = self.pool.kv[layer_id]
        tables, lengths = batch.block_tables, batch.context_lens
        mixed = []
        if decodes:
            one = (q[:decodes], keys, values, tables[:decodes], lengths[:decodes])
            mixed.append(paged_decode_triton(*one, window, self.splits))
        if self.most_new:
            many = (q, keys, values, tables[decodes:], self.starts, lengths[decodes:])
            mixed.append(flash_prefill_triton(*many, self.most_new, window)[decodes:])
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)
