"""A KV cache in FP8: each number has 8 bits, of which 4 are an exponent and 3 a fraction (e4m3).

Source: FP8 Formats for Deep Learning, Micikevicius et al. 2022; the format is e4m3fn, which has no
infinity and ends at 448. Each token has a scale per head for its key and one for its value, which
map its largest number to 448. A number is wrong by at most 1/16 of itself, or by 2^-10 of the scale
if it is tiny. A token's codes depend on that token only. So there is nothing to wait for, no tail,
and every token reads its own codes, too.
"""

from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.kv_cache.paged import Batch
from minigen.kv_cache.quantized import Piece, map_zeros, sequences_of

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
_SCALE_BYTES = 4  # float32


def fp8_block_bytes(block_size: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block's keys and values in one layer: codes and scales."""
    return 2 * block_size * kv_heads * (head_dim + _SCALE_BYTES)


def to_fp8(
    x: Float[Tensor, "*heads head_dim"],
) -> tuple[Float[Tensor, "*heads head_dim"], Float[Tensor, " *heads"]]:
    """Return numbers in e4m3, and the scale of each head's vector: x = codes * scale, nearly."""
    scales = x.float().abs().amax(-1) / LARGEST
    steps = torch.where(scales > 0, scales, 1).unsqueeze(-1)
    return (x.float() / steps).to(E4M3), scales


class Fp8KVPool:
    """The codes and scales of all blocks, including block 0."""

    def __init__(self, layers: int, num_blocks: int, kv_heads: int, block_size: int, head_dim: int):
        self.block_size = block_size
        shape = (layers, 2, num_blocks + 1, block_size, kv_heads)
        self.codes = map_zeros((*shape, head_dim), torch.uint8)  # torch copies no e4m3 by index
        self.scales = map_zeros(shape, torch.float32)
        self._slots = torch.zeros(0, dtype=torch.int64)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for each pair (source, target)."""
        if pairs:
            sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
            for stored in (self.codes, self.scales):
                stored[:, :, targets] = stored[:, :, sources]

    def begin_step(self, batch: Batch) -> list[Piece]:
        """Return the step's sequences; their tokens read codes up to and including their own."""
        self._slots = batch.slots
        return [
            Piece(rows, start, stop, table, stop, stop, torch.arange(start, stop) + 1)
            for rows, start, stop, table in sequences_of(batch, self.block_size)
        ]

    def extend(
        self,
        layer_id: int,
        piece: Piece,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> tuple[
        Float[Tensor, "keys kv_heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
    ]:
        """Store a sequence's new keys and values, and return all of them, in the dtype of `k`."""
        slots, table = self._slots[piece.rows], torch.tensor(piece.block_ids)
        found = []
        halves = zip(self.codes[layer_id], self.scales[layer_id], (k, v), strict=True)
        for codes, scales, new in halves:
            numbers, own = to_fp8(new)
            codes.flatten(0, 1)[slots] = numbers.view(torch.uint8)
            scales.flatten(0, 1)[slots] = own
            stored = codes[table].flatten(0, 1)[: piece.stop].view(E4M3).float()
            steps = scales[table].flatten(0, 1)[: piece.stop].unsqueeze(-1)
            found.append((stored * steps).to(k.dtype))
        keys, values = found
        return keys, values
