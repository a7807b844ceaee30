"""Wrappers that check a user's sampler or attention backend at every call."""

import reprlib
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import AttentionBackend
from minigen.kv_cache.paged import Batch, KVPool
from minigen.protocols import Attend, Sampler
from minigen.sequence import SampledToken, Sequence
from minigen.sockets.resolve import items_of, name_of, part_error, whole_number

Heads = Float[Tensor, "tokens q_heads head_dim"]
KVHeads = Float[Tensor, "tokens kv_heads head_dim"]


class CheckedSampler:
    """Checks a user's sampler: it must return one token of the vocabulary per row."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.__name__ = name_of(sampler)

    def __call__(
        self, logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
    ) -> list[SampledToken]:
        """Return the sampler's tokens. Raises `PartError` if it is not one token per row."""
        lengths = [len(sequence) for sequence in sequences]
        returned: Any = self.sampler(logits.clone(), sequences)
        if [len(sequence) for sequence in sequences] != lengths:
            raise part_error(
                self.sampler, "", "appended to a sequence; it must only return a token for each"
            )
        items = returned.tolist() if isinstance(returned, Tensor) else returned
        items = items_of(self.sampler, "", items, "a list of tokens")
        if len(items) != len(sequences):
            raise part_error(
                self.sampler, "", f"chose {len(items)} tokens for {len(sequences)} rows of logits"
            )
        return [
            self._token(item, sequence, logits.shape[-1])
            for item, sequence in zip(items, sequences, strict=True)
        ]

    def _token(self, item: Any, sequence: Sequence, vocab: int) -> SampledToken:
        own, logprobs = item, None
        if isinstance(item, SampledToken):
            own, logprobs = item.token_id, item.logprobs
        wanted = "must return a token id for each row"
        token_id = whole_number(self.sampler, "", own, wanted)
        if not 0 <= token_id < vocab:
            raise part_error(
                self.sampler, "", f"chose token {token_id}; this model has 0 to {vocab - 1}"
            )
        if sequence.params.logprobs is not None and logprobs is None:
            raise part_error(
                self.sampler,
                "",
                f"chose a token without the logprobs that sequence {sequence.sequence_id} "
                "requests: return SampledToken(token_id, logprobs), or request no logprobs",
            )
        return SampledToken(token_id, logprobs)


def checked_attend(factory: AttentionBackend) -> AttentionBackend:
    """Check a user's attention backend: its output must be finite, in the queries' shape and dtype.

    It must also store the new keys and values, which it may round.
    """

    def make(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        own = factory(pool, batch, windows)
        if not callable(own):
            raise part_error(
                factory,
                "",
                f"must return a function attend(layer_id, q, k, v), not {reprlib.repr(own)}",
            )

        blocks, offsets = batch.slots // pool.block_size, batch.slots % pool.block_size

        def stored(layer_id: int) -> Float[Tensor, "tokens 2 kv_heads head_dim"]:
            return pool.kv[layer_id][:, blocks, offsets].transpose(0, 1)

        def attend(layer_id: int, q: Heads, k: KVHeads, v: KVHeads) -> Heads:
            wanted, before = torch.stack([k, v], dim=1), stored(layer_id)
            mixed: Any = own(layer_id, q, k, v)
            if torch.equal(before, stored(layer_id)) and not torch.equal(before, wanted):
                raise part_error(
                    factory,
                    "",
                    f"did not store the new keys and values in layer {layer_id}: call "
                    "pool.store(layer_id, k, v, batch.slots) first",
                )
            if not isinstance(mixed, Tensor) or (mixed.shape, mixed.dtype) != (q.shape, q.dtype):
                found = (
                    f"{list(mixed.shape)} of {mixed.dtype}"
                    if isinstance(mixed, Tensor)
                    else type(mixed).__name__
                )
                raise part_error(
                    factory,
                    "",
                    f"returned {found} in layer {layer_id}; it must return {list(q.shape)} of "
                    f"{q.dtype}, like the queries",
                )
            if not mixed.isfinite().all():
                raise part_error(
                    factory, "", f"returned numbers that are not finite in layer {layer_id}"
                )
            return mixed

        return attend

    make.__name__ = name_of(factory)
    return make
