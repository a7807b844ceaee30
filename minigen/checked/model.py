"""Foreign samplers and attention, watched: one token a row, one vector a query."""

import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor

from minigen.cache.paged import Batch, KVPool
from minigen.checked.complaint import complaint, name_of
from minigen.engine.runner import AttendFactory
from minigen.protocols import Attend, Sampler
from minigen.sequence import SampledToken, Sequence


class CheckedSampler:
    """A foreign sampler: one token that the model knows for each row."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.__name__ = name_of(sampler)

    def __call__(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """The sampler's choice. Raises `PartError` if it is not one token a row."""
        returned: Any = self.sampler(logits.clone(), sequences)
        items = returned.tolist() if isinstance(returned, Tensor) else returned
        if not isinstance(items, Iterable):
            raise complaint(
                self.sampler, "", f"must return a list of tokens, not {type(items).__name__}"
            )
        tokens = [self._token(item, logits.shape[-1]) for item in items]
        if len(tokens) != len(sequences):
            raise complaint(
                self.sampler, "", f"chose {len(tokens)} tokens for {len(sequences)} rows of logits"
            )
        return tokens

    def _token(self, item: Any, vocab: int) -> SampledToken:
        try:
            token = item if isinstance(item, SampledToken) else SampledToken(operator.index(item))
        except TypeError:
            raise complaint(self.sampler, "", f"chose {item!r}, which is no token id") from None
        if not 0 <= token.token_id < vocab:
            raise complaint(
                self.sampler, "", f"chose token {token.token_id}; this model knows 0 to {vocab - 1}"
            )
        return token


def checked_attend(factory: AttendFactory) -> AttendFactory:
    """A foreign attention: what comes out has the shape and type of the queries, and is finite."""

    def make(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        own = factory(pool, batch, windows)
        if not callable(own):
            raise complaint(
                factory, "", f"must return attend(layer_id, q, k, v), not {type(own).__name__}"
            )

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed: Any = own(layer_id, q, k, v)
            if not isinstance(mixed, Tensor) or (mixed.shape, mixed.dtype) != (q.shape, q.dtype):
                found = (
                    f"{list(mixed.shape)} of {mixed.dtype}"
                    if isinstance(mixed, Tensor)
                    else type(mixed).__name__
                )
                raise complaint(
                    factory,
                    "",
                    f"returned {found} in layer {layer_id}; the queries are {list(q.shape)} of "
                    f"{q.dtype}, and so must be what it returns",
                )
            if not mixed.isfinite().all():
                raise complaint(
                    factory, "", f"returned numbers that are not finite in layer {layer_id}"
                )
            return mixed

        return attend

    make.__name__ = name_of(factory)
    return make
