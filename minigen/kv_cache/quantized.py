"""A KV cache in 8, 4 or 2 bits per number, in the blocks of paged attention.

Source: KIVI, Liu et al. 2024. Keys have channels that are large in every token, so each channel of
a key has a grid of its own: a low end and a step, which the tokens of a group share. Values have no
such channels, so each token of a value has grids of its own, one per group of channels. A code
stands for `low + code * step`. A channel's grid is known only when all tokens of its group are
there, so the newest tokens stay in the runner's data type until then.

**In pages.** A group lies within one block, and the step that fills a block quantises it. What is
still in full precision is the *tail*: the tokens of the block that a sequence is filling, from one
to `block_size` of them. (This is KIVI's residual, of up to R tokens, with R = `block_size`.) A
token reads earlier blocks by their codes, and its own block in full precision, also where one step
computes many tokens. So what a token sees depends on its position alone, and not on how its prompt
was cut into steps, on what the prefix cache had, or on what runs beside it.

This makes sharing safe. A prefix hit shares full blocks only, which have codes. A fork shares the
block that its parent is filling, and copy-on-write copies that block's tail. KIVI always keeps R
values in full precision, where this cache has 1 to R. A window that reaches into the block before
would need what a prefix hit no longer has, so the last blocks of a hit would be computed again.

**Rolling back.** Speculation computes tokens that may be wrong. A block that they fill gets codes,
which the next step overwrites unless all of its tokens were right. Until then its tail is kept, as
those of the last `num_kept` blocks that a step touched.

**Memory.** Tails belong to blocks, by their ids. At the start of each step the tails of all blocks
that no sequence is filling are free again. So a sequence has at most `num_kept` tails and that of
the block that it was filling: `tails_needed` are enough. A grid's low end and step are float16; a
number beyond its range makes the numbers of its group infinite or NaN. Attention converts the codes
of a whole context in each step, so this cache saves memory, not time.
"""

import math
import mmap
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from minigen.kv_cache.paged import Batch
from minigen.protocols import Attend

GROUP = 32  # tokens of a key's channel, or channels of a token's value, that share a grid
BITS = {"int8": 8, "int4": 4, "int2": 2}  # by the names of `kv_cache_dtype`
_GRID_BYTES = 4  # a low end and a step, both float16


def group_size(length: int) -> int:
    """Return the numbers of a group: 32, or all of them if groups of 32 do not fit.

    >>> [group_size(length) for length in (16, 32, 48, 64)]
    [16, 32, 48, 32]
    """
    return GROUP if length % GROUP == 0 else length


def block_bytes(bits: int, block_size: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block's keys and values in one layer: codes and grids."""
    codes = 2 * block_size * kv_heads * head_dim * bits // 8
    key_grids = block_size // group_size(block_size) * kv_heads * head_dim
    value_grids = block_size * kv_heads * (head_dim // group_size(head_dim))
    return codes + _GRID_BYTES * (key_grids + value_grids)


def tails_needed(num_sequences: int, num_kept: int) -> int:
    """Return the tails of so large a batch: of the blocks kept, and of the one filled before."""
    return num_sequences * (num_kept + 1)


def quantize(
    x: Float[Tensor, "*shape"], dim: int, bits: int
) -> tuple[UInt8[Tensor, "*shape"], Float[Tensor, "*ends"], Float[Tensor, "*ends"]]:
    """Return codes, and the low end and the step of the grid that the numbers along `dim` share.

    The low end and the step are rounded to float16 first, so that the codes are the nearest on the
    grid that is stored: a number is wrong by at most half a step and their rounding.
    """
    x, most = x.float(), 2**bits - 1
    low = x.amin(dim, keepdim=True).half()
    step = ((x.amax(dim, keepdim=True) - low.float()) / most).half()
    codes = (x - low.float()) / torch.where(step > 0, step, 1).float()
    return codes.round().clamp(0, most).to(torch.uint8), low, step


def dequantize(
    codes: UInt8[Tensor, "*shape"], low: Float[Tensor, "*ends"], step: Float[Tensor, "*ends"]
) -> Float[Tensor, "*shape"]:
    """Return the numbers that codes stand for, in float32."""
    return torch.addcmul(low.float(), codes.float(), step.float())


def pack(codes: UInt8[Tensor, "*rows numbers"], bits: int) -> UInt8[Tensor, "*rows packed"]:
    """Return codes of `bits` bits as bytes, 8 / bits of them in each, the first one lowest."""
    parts = codes.unflatten(-1, (-1, 8 // bits))
    packed = parts[..., 0].clone()
    for place in range(1, 8 // bits):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpack(packed: UInt8[Tensor, "*rows packed"], bits: int) -> UInt8[Tensor, "*rows numbers"]:
    """Return the codes in bytes.

    >>> unpack(pack(torch.tensor([3, 0, 2, 1], dtype=torch.uint8), bits=2), bits=2).tolist()
    [3, 0, 2, 1]
    """
    most = 2**bits - 1
    parts = [(packed >> (bits * place)) & most for place in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


@dataclass(frozen=True)
class Piece:
    """One sequence's part of a step: the tokens at positions `start` to `stop`.

    `rows` are their rows in the batch. Attention reads codes for the positions 0 to `num_coded`,
    and numbers in full precision from `first_fresh` on; a token reads codes before its entry of
    `limits`, and full precision from there on. `block_ids` is the sequence's block table. `tail` is
    the tail with its earlier tokens in full precision, if there are any, and `kept` has pairs of a
    block's index in the table and the tail that it gets in this step.
    """

    rows: slice
    start: int
    stop: int
    block_ids: list[int]
    num_coded: int
    first_fresh: int
    limits: Int64[Tensor, " tokens"]
    tail: int | None = None
    kept: tuple[tuple[int, int], ...] = ()

    def visible(self, window: int | None) -> Bool[Tensor, "tokens keys"]:
        """Return which keys each token attends to: those with codes, then the fresh ones."""
        query = torch.arange(self.start, self.stop).unsqueeze(-1)
        coded, fresh = torch.arange(self.num_coded), torch.arange(self.first_fresh, self.stop)
        limits = self.limits.unsqueeze(-1)
        seen = torch.cat([coded < limits, (fresh >= limits) & (fresh <= query)], dim=-1)
        return seen if window is None else seen & (torch.cat([coded, fresh]) > query - window)


@runtime_checkable
class CodedPool(Protocol):
    """A KV cache that stores codes instead of numbers."""

    def begin_step(self, batch: Batch) -> list[Piece]:
        """Prepare for a step, and return its sequences."""

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
        """Store a sequence's new keys and values; return all, in the order of `Piece.visible`."""


def attend_coded(pool: CodedPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
    """Return attention over a cache of codes for one batch, one sequence after another.

    A sequence's attention has the same bits whatever else is in the batch, because rounding to
    codes would turn a difference in the last bit into one of a step.
    """
    pieces = pool.begin_step(batch)
    masks = {window: [piece.visible(window) for piece in pieces] for window in set(windows)}

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for piece, mask in zip(pieces, masks[windows[layer_id]], strict=True):
            keys, values = pool.extend(layer_id, piece, k[piece.rows], v[piece.rows])
            query = q[piece.rows]
            heads = [each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values)]
            out = functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=mask, enable_gqa=True
            )
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    return attend


def sequences_of(batch: Batch, block_size: int) -> list[tuple[slice, int, int, list[int]]]:
    """Return each sequence's rows, first and last new position, and block table."""
    found = []
    for row, stop in enumerate(batch.context_lens.tolist()):
        rows = slice(batch.query_starts[row], batch.query_starts[row + 1])
        table = batch.block_tables[row, : -(-stop // block_size)].tolist()
        found.append((rows, stop - (rows.stop - rows.start), stop, table))
    return found


def map_zeros(shape: SequenceOf[int], dtype: torch.dtype) -> Tensor:
    """Return zeros, of which the operating system gives a page memory when it is first written."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class QuantizedKVPool:
    """The codes, grids and tails of all blocks, including block 0.

    `filling` returns the blocks that sequences are filling: those with tokens, but not full.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        bits: int,
        num_tails: int,
        num_kept: int,
        filling: Callable[[], Iterable[int]],
    ):
        self.block_size, self.bits = block_size, bits
        self.num_kept, self._filling = num_kept, filling
        size, blocks = block_size, num_blocks + 1
        token_groups, channel_groups = size // group_size(size), head_dim // group_size(head_dim)
        packed = head_dim * bits // 8
        self.codes = map_zeros((layers, 2, blocks, size, kv_heads, packed), torch.uint8)
        half = torch.float16
        self.key_grids = map_zeros((layers, blocks, 2, token_groups, kv_heads, head_dim), half)
        self.value_grids = map_zeros((layers, blocks, 2, size, kv_heads, channel_groups), half)
        self.tails = map_zeros((layers, 2, num_tails, size, kv_heads, head_dim), dtype)
        self._tail_of: dict[int, int] = {}  # by block
        self._free = list(range(num_tails))

    @property
    def num_tails(self) -> int:
        """The number of blocks that have a tail now."""
        return len(self._tail_of)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, with their tails, for each pair (source, target)."""
        if not pairs:
            return
        sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
        self.codes[:, :, targets] = self.codes[:, :, sources]
        for grids in (self.key_grids, self.value_grids):
            grids[:, targets] = grids[:, sources]
        self._free_tails({*self._filling(), *sources})
        for source, target in pairs:
            if source in self._tail_of:
                tails = self._tail_of[source], self._tail(target)
                self.tails[:, :, tails[1]] = self.tails[:, :, tails[0]]

    def begin_step(self, batch: Batch) -> list[Piece]:
        """Free the tails of blocks that no sequence is filling, and assign those of this step."""
        self._free_tails(set(self._filling()))
        size, pieces = self.block_size, []
        for rows, start, stop, table in sequences_of(batch, size):
            first, last = start // size, (stop - 1) // size
            tail = self._tail_of[table[first]] if start % size else None
            kept = range(max(first, last + 1 - self.num_kept), last + 1)
            tails = tuple((index, self._tail(table[index])) for index in kept)
            limits = torch.arange(start, stop) // size * size
            spans = last * size, first * size
            pieces.append(Piece(rows, start, stop, table, *spans, limits, tail, tails))
        return pieces

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
        """Store a sequence's new keys and values, and quantise the blocks that they fill.

        Returns the codes' keys and values of all blocks but the last one, and after them the fresh
        ones, from the first block on that has new tokens.
        """
        size, dtype = self.block_size, k.dtype
        first, fresh = piece.start // size, [k, v]
        if piece.tail is not None:
            tail = self.tails[layer_id, :, piece.tail, : piece.start % size]
            fresh = [torch.cat([old, new]) for old, new in zip(tail, fresh, strict=True)]
        num_full = len(fresh[0]) // size
        if num_full:
            filled = piece.block_ids[first : first + num_full]
            self._quantize(layer_id, filled, *(each[: num_full * size] for each in fresh))
        for index, tail_id in piece.kept:
            begin = (index - first) * size
            for half, new in zip(self.tails[layer_id], fresh, strict=True):
                part = new[begin : begin + size]
                half[tail_id, : len(part)] = part
        coded = self.gather(layer_id, piece.block_ids[: piece.num_coded // size])
        keys, values = (
            torch.cat([old.to(dtype), new]) for old, new in zip(coded, fresh, strict=True)
        )
        return keys, values

    def gather(
        self, layer_id: int, block_ids: list[int]
    ) -> tuple[
        Float[Tensor, "slots kv_heads head_dim"],
        Float[Tensor, "slots kv_heads head_dim"],
    ]:
        """Return the keys and values of quantised blocks, in table order, in float32."""
        ids = torch.tensor(block_ids, dtype=torch.int64)
        keys, values = (unpack(half[ids], self.bits) for half in self.codes[layer_id])
        low, step = self.key_grids[layer_id, ids].unsqueeze(3).unbind(1)
        groups = low.shape[1]
        by_tokens = keys.unflatten(1, (groups, -1))
        found_keys = dequantize(by_tokens, low, step).flatten(0, 2)
        low, step = self.value_grids[layer_id, ids].unsqueeze(-1).unbind(1)
        by_channels = values.unflatten(-1, (low.shape[-2], -1))
        return found_keys, dequantize(by_channels, low, step).flatten(-2).flatten(0, 1)

    def _quantize(self, layer_id: int, block_ids: list[int], keys: Tensor, values: Tensor) -> None:
        """Write the codes and grids of whole blocks."""
        ids = torch.tensor(block_ids, dtype=torch.int64)
        groups = self.block_size // group_size(self.block_size)
        by_tokens = keys.unflatten(0, (len(block_ids), groups, -1))
        codes, low, step = quantize(by_tokens, 2, self.bits)
        self.codes[layer_id, 0, ids] = pack(codes.flatten(1, 2), self.bits)
        self.key_grids[layer_id, ids] = torch.stack([low, step], dim=1).squeeze(3)
        channels = group_size(values.shape[-1])
        by_channels = values.unflatten(0, (len(block_ids), -1)).unflatten(-1, (-1, channels))
        codes, low, step = quantize(by_channels, -1, self.bits)
        self.codes[layer_id, 1, ids] = pack(codes.flatten(-2), self.bits)
        self.value_grids[layer_id, ids] = torch.stack([low, step], dim=1).squeeze(-1)

    def _tail(self, block_id: int) -> int:
        """Return the block's tail; it gets one if it has none."""
        if block_id not in self._tail_of:
            assert self._free, "there are tails for all sequences"
            self._tail_of[block_id] = self._free.pop()
        return self._tail_of[block_id]

    def _free_tails(self, used: set[int]) -> None:
        """Free the tails of all blocks that are not in `used`."""
        for block_id in self._tail_of.keys() - used:
            self._free.append(self._tail_of.pop(block_id))
