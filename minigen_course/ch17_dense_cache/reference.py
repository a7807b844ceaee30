"""The simplest KV cache: one contiguous K and V per sequence, of the sequence's maximum length.

It reserves memory for every sequence's longest answer and shares nothing. It stays as the oracle
of the paged cache.
"""

from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.model.attention import attention
from minigen.model.transformer import Transformer
from minigen.protocols import Attend
from minigen.sequence import Sequence


class DenseCache:
    """Keys and values of one sequence, `[2, layers, max_tokens, kv_heads, head_dim]`."""

    def __init__(
        self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        self.kv = torch.empty(2, layers, max_tokens, kv_heads, head_dim, dtype=dtype)
        self.num_tokens = 0

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Append one layer's new keys and values to the old ones; return all of them."""
        end = self.num_tokens + len(k)
        assert end <= self.kv.shape[2], "the sequence is longer than its cache"
        self.kv[0, layer_id, self.num_tokens : end] = k
        self.kv[1, layer_id, self.num_tokens : end] = v
        return self.kv[:, layer_id, :end]

    def advance(self, num_tokens: int) -> None:
        """Count the new tokens, once every layer has stored them."""
        self.num_tokens += num_tokens


class WindowCache:
    """Keys and values of one sequence's last tokens, `[2, layers, window, kv_heads, head_dim]`."""

    def __init__(self, layers: int, window: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.kv = torch.empty(2, layers, window, kv_heads, head_dim, dtype=dtype)
        self.num_tokens = 0

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "1 kv_heads head_dim"],
        v: Float[Tensor, "1 kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Add one token to a layer; return its last `window` tokens, in any order."""
        window = self.kv.shape[2]
        slot = self.num_tokens % window
        self.kv[0, layer_id, slot] = k[0]
        self.kv[1, layer_id, slot] = v[0]
        return self.kv[:, layer_id, : self.num_tokens + 1]  # a slice ends at the window at most

    def advance(self) -> None:
        """Count the new token, once every layer has stored it."""
        self.num_tokens += 1


def attend_dense(
    caches: SequenceOf[DenseCache], lengths: SequenceOf[int], windows: SequenceOf[int | None]
) -> Attend:
    """Return attention of packed new tokens, `lengths` per sequence, over each one's cache."""

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = []
        packed = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for cache, (q_own, k_own, v_own) in zip(caches, packed, strict=True):
            keys, values = cache.store(layer_id, k_own, v_own)
            mixed.append(attention(q_own, keys, values, windows[layer_id]))
        return torch.cat(mixed)

    return attend


class DenseRunner:
    """Runs the model on each sequence's new tokens: the whole prompt, then one token per step.

    `windows` are the layers' sliding windows.
    """

    def __init__(
        self,
        model: Transformer,
        kv_heads: int,
        windows: SequenceOf[int | None],
        dtype: torch.dtype = torch.float32,
    ):
        self.model, self.kv_heads, self.windows, self.dtype = model, kv_heads, windows, dtype
        self.caches: dict[int, DenseCache] = {}

    @torch.inference_mode()
    def logits(self, sequences: SequenceOf[Sequence]) -> Float[Tensor, "sequences vocab"]:
        """Return the raw logits of each sequence's next token."""
        caches = [self._cache(sequence) for sequence in sequences]
        new_ids = [sequence.new_ids for sequence in sequences]
        lengths = [len(ids) for ids in new_ids]
        token_ids = torch.tensor([token_id for ids in new_ids for token_id in ids])
        positions = torch.cat(
            [
                torch.arange(cache.num_tokens, cache.num_tokens + length)
                for cache, length in zip(caches, lengths, strict=True)
            ]
        )
        hidden = self.model(token_ids, positions, attend_dense(caches, lengths, self.windows))
        for cache, length in zip(caches, lengths, strict=True):
            cache.advance(length)
        last_rows = torch.tensor(lengths).cumsum(0) - 1
        return self.model.logits(hidden[last_rows])

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's keys and values."""
        self.caches.pop(sequence.sequence_id, None)

    def _cache(self, sequence: Sequence) -> DenseCache:
        if sequence.sequence_id not in self.caches:
            max_tokens = len(sequence.prompt_ids) + sequence.max_output
            self.caches[sequence.sequence_id] = DenseCache(
                len(self.model.layers), max_tokens, self.kv_heads, self.model.head_dim, self.dtype
            )
        return self.caches[sequence.sequence_id]
