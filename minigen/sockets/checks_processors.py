"""Wrappers that check a user's logits processor or grammar backend at every call."""

import copy
import inspect
import reprlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from minigen.errors import OptionError
from minigen.protocols import GrammarBackend, LogitsProcessor, TokenMatcher
from minigen.sampling.params import SamplingParams
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.sockets.resolve import name_of, part_error, takes

Logits = Float[Tensor, " vocab"]
_METHODS = {"prepare": (), "accept": ("token_id",), "roll_back": ("count",), "fork": ()}


def checked_factory(
    part: Any, vocab_size: int
) -> Callable[[SamplingParams, tuple[int, ...]], LogitsProcessor | None]:
    """Return a function that creates a checked processor per answer, or None where it has none.

    Raises `OptionError` if `part` cannot be called with (params, prompt_ids).
    """
    if not callable(part) or not takes(part, ("params", "prompt_ids")):
        kind = "class" if inspect.isclass(part) else "function"
        raise OptionError(
            f"logits_processor {name_of(part)} must be a {kind} that is called with (params, "
            "prompt_ids) for each request, and returns a processor or None."
        )

    def make(params: SamplingParams, prompt_ids: tuple[int, ...]) -> LogitsProcessor | None:
        made = part(params, prompt_ids)
        return None if made is None else CheckedLogitsProcessor(made)

    return make


class CheckedLogitsProcessor(LogitsProcessor):
    """Checks a user's processor: it must return logits of the same shape, one of them finite.

    A function of (logits, output_ids) is a processor without state. Methods that it lacks do
    nothing, and it is copied where it forks.
    """

    def __init__(self, processor: Any):
        if not callable(processor) or not takes(processor, ("logits", "output_ids")):
            raise part_error(
                processor, "", "must be called with (logits, output_ids), and return logits"
            )
        for name, arguments in _METHODS.items():
            own = getattr(processor, name, None)
            if own is not None and not takes(own, arguments):
                raise part_error(processor, name, f"must take ({', '.join(arguments)})")
        self.processor = processor

    @property
    def rolls_back(self) -> bool:
        """Whether drafts can be tried out: it keeps no count of tokens, or can take them back."""
        own = {name: _own_method(self.processor, name) for name in ("accept", "roll_back")}
        return own["roll_back"] is not None or own["accept"] is None

    def __call__(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Return the processor's logits. Raises `PartError` if they are none."""
        shape, dtype = logits.shape, logits.dtype
        found: Any = self.processor(logits, tuple(output_ids))
        if not isinstance(found, Tensor) or found.shape != shape or found.dtype != dtype:
            got = (
                f"{list(found.shape)} of {found.dtype}"
                if isinstance(found, Tensor)
                else reprlib.repr(found)
            )
            raise part_error(
                self.processor, "", f"returned {got}; it must return {list(shape)} of {dtype}"
            )
        if not found.amax().isfinite():  # NaN and infinity are the largest of all
            raise part_error(
                self.processor,
                "",
                "returned logits without a largest finite one: it must leave "
                "at least one token, and no NaN",
            )
        return found

    def prepare(self) -> None:
        """Call the processor's own method, if there is one."""
        self._call("prepare")

    def accept(self, token_id: int) -> None:
        """Call the processor's own method, if there is one."""
        self._call("accept", token_id)

    def roll_back(self, count: int) -> None:
        """Call the processor's own method, if there is one."""
        self._call("roll_back", count)

    def fork(self) -> "CheckedLogitsProcessor":
        """Return a copy by the processor's own method, or a deep copy."""
        own = getattr(self.processor, "fork", None)
        return CheckedLogitsProcessor(copy.deepcopy(self.processor) if own is None else own())

    def _call(self, method: str, *arguments: int) -> None:
        own = getattr(self.processor, method, None)
        if own is not None:
            own(*arguments)


def _own_method(processor: Any, name: str) -> Any:
    """Return a processor's method, or None if it has none, or only the protocol's own."""
    found = getattr(processor, name, None)
    return None if getattr(found, "__func__", None) is getattr(LogitsProcessor, name) else found


class CheckedGrammarBackend:
    """Checks a user's grammar backend: it returns matchers."""

    def __init__(self, backend: GrammarBackend, vocab_size: int):
        self.backend, self.vocab_size = backend, vocab_size
        self.__name__ = name_of(backend)

    def compile(self, params: StructuredOutputsParams) -> TokenMatcher:
        """Return the backend's matcher, checked at every call."""
        matcher: Any = self.backend.compile(params)
        return CheckedMatcher(matcher, self.vocab_size)


class CheckedMatcher:
    """Checks a user's matcher: its masks have an entry per token, and allow what it accepts."""

    def __init__(self, matcher: Any, vocab_size: int):
        if not isinstance(matcher, TokenMatcher):
            raise part_error(
                matcher, "", "is no matcher: that has allowed, accept, roll_back and fork"
            )
        self.matcher, self.vocab_size = matcher, vocab_size

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return the matcher's mask. Raises `PartError` if it is none."""
        mask: Any = self.matcher.allowed()
        found = np.asarray(mask)
        if found.shape != (self.vocab_size,) or found.dtype != bool:
            raise part_error(
                self.matcher,
                "allowed",
                f"returned {list(found.shape)} of {found.dtype}; it must return "
                f"[{self.vocab_size}] of bool",
            )
        return found

    def accept(self, token_id: int) -> None:
        """Follow the output by one token."""
        self.matcher.accept(token_id)

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens."""
        self.matcher.roll_back(count)

    def fork(self) -> "CheckedMatcher":
        """Return a checked copy."""
        return CheckedMatcher(self.matcher.fork(), self.vocab_size)
