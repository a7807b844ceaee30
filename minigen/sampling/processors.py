"""The interfaces of what changes one sequence's logits before penalties, filters and the draw.

A grammar is one of them (`minigen.sampling.grammar`): it forbids all tokens but those that its
`TokenMatcher` allows next.
"""

import copy
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

Logits = Float[Tensor, " vocab"]


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes the logits of one sequence, and keeps the state that it needs for that.

    A class that inherits from this one needs only `__call__`.
    """

    def __call__(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Return the logits of the next token, given the output so far; may change `logits`.

        Minus infinity forbids a token; one token at least must be left.
        """

    def prepare(self) -> None:
        """Compute what the next call needs, in another thread, while the model computes."""

    def accept(self, token_id: int) -> None:
        """Take note of a token that was appended to the output."""

    def roll_back(self, count: int) -> None:
        """Forget the last `count` tokens, which were taken back."""

    def fork(self) -> "LogitsProcessor":
        """Return a copy for another answer to the same prompt, whose state is separate."""
        return copy.deepcopy(self)


@runtime_checkable
class TokenMatcher(Protocol):
    """Follows one output through a grammar, and knows which tokens may come next."""

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token may come next; an end token only where the output may end."""

    def accept(self, token_id: int) -> None:
        """Follow the output by one allowed token."""

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens."""

    def fork(self) -> "TokenMatcher":
        """Return a copy that continues from the same place."""
