"""Wrappers that check a user's sampler or attention backend at every call."""

import reprlib
from collections.abc import Sequence as SequenceOf
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import AttentionBackend
from minigen.errors import OptionError
from minigen.kv_cache.paged import Batch, KVPool
from minigen.protocols import Attend, Sampler
from minigen.sampling.logprobs import logprobs_of
from minigen.sequence import SampledToken, Sequence
from minigen.sockets.resolve import items_of, name_of, part_error, takes, whole_number

Heads = Float[Tensor, "tokens q_heads head_dim"]
KVHeads = Float[Tensor, "tokens kv_heads head_dim"]


class CheckedSampler:
    """Checks a user's sampler: it must return one token of the vocabulary per row.

    Where a request asks for logprobs and a token has none, they are the model's.
    """

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
            self._token(item, sequence, row)
            for item, sequence, row in zip(items, sequences, logits, strict=True)
        ]

    def _token(
        self, item: Any, sequence: Sequence, logits: Float[Tensor, " vocab"]
    ) -> SampledToken:
        own, logprobs = item, None
        if isinstance(item, SampledToken):
            own, logprobs = item.token_id, item.logprobs
        wanted = "must return a token id for each row"
        token_id = whole_number(self.sampler, "", own, wanted)
        if not 0 <= token_id < len(logits):
            raise part_error(
                self.sampler, "", f"chose token {token_id}; this model has 0 to {len(logits) - 1}"
            )
        if logprobs is None and sequence.params.logprobs is not None:
            logprobs = logprobs_of(logits, token_id, sequence.params.logprobs)
        return SampledToken(token_id, logprobs)


class CheckedAttention:
    """Checks a user's attention backend: its output is finite, in the queries' shape and dtype.

    It must also store the new keys and values, which it may round. The backend is tried at once,
    with a batch of one token; raises `OptionError` if it then returns no attention.
    """

    def __init__(self, backend: AttentionBackend, pool: KVPool, windows: SequenceOf[int | None]):
        self.backend = backend
        self.__name__ = name_of(backend)
        wanted = (
            f"attention_backend {name_of(backend)} must be called with (pool, batch, windows) and "
            "return a function attend(layer_id, q, k, v)"
        )
        try:
            found: Any = backend(pool, _one_token(), windows)
        except Exception as error:
            raise OptionError(
                f"{wanted}, but it raised {type(error).__name__} ({str(error)[:100]})."
            ) from error
        if not callable(found) or not takes(found, ("layer_id", "q", "k", "v")):
            raise OptionError(f"{wanted}, not {reprlib.repr(found)}.")

    def __call__(self, pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        """Return the backend's attention of one step, checked in every layer."""
        own: Any = self.backend(pool, batch, windows)
        if not callable(own):
            self._complain(
                f"must return a function attend(layer_id, q, k, v), not {reprlib.repr(own)}"
            )
        blocks, offsets = batch.slots // pool.block_size, batch.slots % pool.block_size

        def stored(layer_id: int) -> Float[Tensor, "tokens 2 kv_heads head_dim"]:
            return pool.kv[layer_id][:, blocks, offsets].transpose(0, 1)

        def attend(layer_id: int, q: Heads, k: KVHeads, v: KVHeads) -> Heads:
            wanted, before = torch.stack([k, v], dim=1), stored(layer_id)
            mixed: Any = own(layer_id, q, k, v)
            if torch.equal(before, stored(layer_id)) and not torch.equal(before, wanted):
                self._complain(
                    f"did not store the new keys and values in layer {layer_id}: call "
                    "pool.store(layer_id, k, v, batch.slots) first"
                )
            if not isinstance(mixed, Tensor) or (mixed.shape, mixed.dtype) != (q.shape, q.dtype):
                found = (
                    f"{list(mixed.shape)} of {mixed.dtype}"
                    if isinstance(mixed, Tensor)
                    else type(mixed).__name__
                )
                self._complain(
                    f"returned {found} in layer {layer_id}; it must return {list(q.shape)} of "
                    f"{q.dtype}, like the queries"
                )
            if not mixed.isfinite().all():
                self._complain(f"returned numbers that are not finite in layer {layer_id}")
            return mixed

        return attend

    def _complain(self, what: str) -> NoReturn:
        raise part_error(self.backend, "", what)


def _one_token() -> Batch:
    """Return a batch of one sequence with one token, in the padding block."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Batch(zero, zero, zero, [0, 1], zero + 1, zero.unsqueeze(0), zero, num_decodes=1)
