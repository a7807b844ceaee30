"""Creates the logits processors of each request: the user's own, then the grammar's."""

import threading
from collections.abc import Callable, Collection
from typing import Any

from minigen.config import EngineConfig
from minigen.errors import GrammarError
from minigen.protocols import GrammarBackend, LogitsProcessor, TokenMatcher
from minigen.sampling.params import SamplingParams
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.sockets.resolve import build_part, find_part, name_of
from minigen.tokenizer.tokenizer import Tokenizer


def _llguidance(tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> GrammarBackend:
    from minigen.sampling.grammar import LLGuidanceBackend

    return LLGuidanceBackend(tokenizer, vocab_size, end_ids)


GRAMMAR_BACKENDS: dict[str, Callable[..., GrammarBackend]] = {"llguidance": _llguidance}


class Processors:
    """Creates the processors of a request's first answer; any thread may call it.

    `own` is called with (params, prompt_ids). `build` builds the grammar backend, when the first
    request asks for a form.
    """

    def __init__(
        self,
        own: Callable[[SamplingParams, tuple[int, ...]], LogitsProcessor | None] | None,
        build: Callable[[], GrammarBackend],
    ):
        self._own, self._build = own, build
        self._backend: GrammarBackend | None = None
        self._lock = threading.Lock()

    def __call__(
        self, params: SamplingParams, prompt_ids: tuple[int, ...]
    ) -> tuple[LogitsProcessor, ...]:
        """Return the processors. Raises `ParamsError` for a form that cannot be used."""
        found = []
        if self._own is not None and (own := self._own(params, prompt_ids)) is not None:
            found.append(own)
        if isinstance(params.structured_outputs, StructuredOutputsParams):
            from minigen.sampling.grammar import GrammarProcessor

            found.append(GrammarProcessor(self._compile(params.structured_outputs)))
        return tuple(found)

    def _compile(self, structured: StructuredOutputsParams) -> TokenMatcher:
        with self._lock:
            if self._backend is None:
                self._backend = self._build()
        return self._backend.compile(structured)


def make_processors(
    options: EngineConfig, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]
) -> Processors:
    """Return what creates the processors of requests. Raises `OptionError` for a part of no use."""
    part = find_part("grammar_backend", options.grammar_backend, GRAMMAR_BACKENDS)
    builtin = any(part is each for each in GRAMMAR_BACKENDS.values())

    def build() -> GrammarBackend:
        if not end_ids:
            raise GrammarError("This model has no end token, so no answer could end in its form.")
        given = {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_ids": end_ids}
        if builtin:
            return _llguidance(**given)  # type: ignore[arg-type]
        from minigen.sockets.checks_processors import CheckedGrammarBackend

        return CheckedGrammarBackend(build_part("grammar_backend", part, **given), vocab_size)

    return Processors(_own(options.logits_processor, vocab_size), build)


def _own(wanted: Any, vocab_size: int) -> Callable[..., LogitsProcessor | None] | None:
    """Return the user's function that creates a processor, each of which is checked."""
    if wanted is None:
        return None
    from minigen.sockets.checks_processors import checked_factory

    return checked_factory(find_part("logits_processor", wanted, {}), vocab_size)


def describe_processors(options: EngineConfig) -> dict[str, str]:
    """Return the names of the parts that change logits."""
    backend = options.grammar_backend
    found = {"grammar": backend if isinstance(backend, str) else name_of(backend)}
    if options.logits_processor is not None:
        found["logits processor"] = name_of(options.logits_processor)
    return found
