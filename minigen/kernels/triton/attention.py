"""`attention_backend="triton"`: one kernel launch for a step's decodes, one for its prefills."""

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from minigen.engine.placement import PlacedKVPool
from minigen.kernels.triton.decode_attention import num_splits, paged_decode_triton
from minigen.kernels.triton.prefill_attention import flash_prefill_triton
from minigen.kv_cache.paged import Batch, KVPool
from minigen.protocols import Attend

Heads = Float[Tensor, "tokens q_heads head_dim"]
KVHeads = Float[Tensor, "tokens kv_heads head_dim"]


def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of the GPU; 4 without a GPU."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def to_device(numbers: Shaped[Tensor, "*axes"], device: torch.device) -> Shaped[Tensor, "*axes"]:
    """Copy a CPU tensor to the device asynchronously, after the work that is queued there.

    The copy goes through pinned memory, so the CPU does not wait for it.
    """
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def attend_triton(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
    """Do what `minigen.kv_cache.paged.attend_paged` does, by kernels that read block tables."""
    attention = PagedAttention(pool, batch, windows)

    def attend(layer_id: int, q: Heads, k: KVHeads, v: KVHeads) -> Heads:
        pool.store(layer_id, k, v, batch.slots)
        return attention.read(layer_id, q.contiguous())

    return attend


class DevicePool(PlacedKVPool):
    """A `PlacedKVPool` whose keys and values kernels write, and that copies without waiting."""

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks, each (source, target), in all layers."""
        if pairs:
            sources, targets = to_device(torch.tensor(pairs), self.kv.device).unbind(1)
            for layer in self.kv:  # one at a time, because the right side is in new memory
                layer[:, targets] = layer[:, sources]


class PagedAttention:
    """Attention of one batch in every layer; the batch's tensors are on the pool's device."""

    def __init__(self, pool: KVPool, batch: Batch, windows: SequenceOf[int | None]):
        self.pool, self.batch, self.windows = pool, batch, windows
        starts = batch.query_starts[batch.num_decodes :]
        self.most_new = max((end - begin for begin, end in pairwise(starts)), default=0)
        # Decodes only: nothing is copied here, because a captured step must not copy from the CPU.
        self.starts = batch.slots[:0]
        if self.most_new:
            self.starts = to_device(torch.tensor(starts), batch.slots.device)
        num_programs = batch.num_decodes * pool.kv.shape[4]
        longest = batch.block_tables.shape[1] * pool.block_size
        self.splits = num_splits(num_programs, longest, num_processors(batch.slots.device))

    def read(self, layer_id: int, q: Heads) -> Heads:
        """Return attention of `q` (contiguous) over the pool, which has its new keys and values."""
        batch, window, decodes = self.batch, self.windows[layer_id], self.batch.num_decodes
        keys, values = self.pool.kv[layer_id]
        tables, lengths = batch.block_tables, batch.context_lens
        outputs = []
        if decodes:
            one = (q[:decodes], keys, values, tables[:decodes], lengths[:decodes])
            outputs.append(paged_decode_triton(*one, window, self.splits))
        if self.most_new:
            many = (q, keys, values, tables[decodes:], self.starts, lengths[decodes:])
            outputs.append(flash_prefill_triton(*many, self.most_new, window)[decodes:])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
