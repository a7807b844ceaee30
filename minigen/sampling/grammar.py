"""Grammars by the llguidance library: an Earley parser over lexemes that are regex derivatives.

A grammar is compiled once and cached; each answer follows a copy of it. A mask takes tens of
microseconds. Sources: llguidance's docs/json_schema.md and docs/syntax.md; Earley 1970; Brzozowski
1964, for derivatives.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from minigen.errors import GrammarError, ParamsError
from minigen.sampling.grammar_compiler import GrammarCompiler, Vocabulary, first_line
from minigen.sampling.grammar_trial import GrammarTrial
from minigen.sampling.processors import Logits, LogitsProcessor, TokenMatcher
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer

MOST_CACHED = 32  # compiled grammars
MOST_CACHED_CHARACTERS = 2**20  # of their sources, in all


class GrammarProcessor(LogitsProcessor):
    """Forbids every token that the grammar does not allow."""

    def __init__(self, matcher: TokenMatcher):
        self.matcher = matcher
        self._allowed: Bool[np.ndarray, " vocab"] | None = None

    def prepare(self) -> None:
        """Compute the mask of the next token."""
        if self._allowed is None:
            self._allowed = self.matcher.allowed()

    def __call__(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Set the logits of tokens that are not allowed to minus infinity.

        Raises `GrammarError` if no token is allowed.
        """
        self.prepare()
        assert self._allowed is not None
        if not self._allowed.any():
            raise GrammarError(
                f"The grammar allows no token after the {len(output_ids)} tokens of this answer."
            )
        forbidden = torch.from_numpy(~self._allowed).to(logits.device)
        return logits.masked_fill_(forbidden, -math.inf)

    def accept(self, token_id: int) -> None:
        """Follow the output by one token."""
        self.matcher.accept(token_id)
        self._allowed = None

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens."""
        self.matcher.roll_back(count)
        self._allowed = None

    def fork(self) -> "GrammarProcessor":
        """Return a copy that continues from the same place."""
        return GrammarProcessor(self.matcher.fork())


class LLGuidanceBackend:
    """Compiles grammars for one model's vocabulary; any thread may call it.

    `end_ids` are the model's end tokens. Each new form is tried out in a process of its own first.
    Raises `OptionError` if the library is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]):
        vocabulary = Vocabulary(
            tokens=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            special_token_ids=sorted(tokenizer.special_ids),
            end_ids=sorted(end_ids),
            bos_token_id=tokenizer.bos_token_id,
        )
        self._compiler = GrammarCompiler(
            vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        self._trial = GrammarTrial(vocabulary)
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._refused: OrderedDict[tuple[str, ...], str] = OrderedDict()  # with the reason
        self._table, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> "LLGuidanceMatcher":
        """Return a matcher at the start of a grammar. Raises `ParamsError` if it cannot be used.

        One grammar is compiled at a time, so that clients cannot keep all cores busy with this.
        """
        key = (params.kind, params.source, params.blanks or "", str(params.strict))
        found = self._known(key)
        if found is None:
            with self._compiling:
                found = self._known(key) or self._new(key, params)
        return LLGuidanceMatcher(found, self.vocab_size)

    def _known(self, key: tuple[str, ...]) -> Any | None:
        """Return a copy of the matcher in the cache; raise `ParamsError` for a form refused before.

        It waits for no compilation.
        """
        with self._table:
            if key in self._refused:
                raise ParamsError(self._refused[key])
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            return self._compiled[key].deep_copy()

    def _new(self, key: tuple[str, ...], params: StructuredOutputsParams) -> Any:
        """Try a form out, compile it, and remember what came of it; return a copy."""
        try:
            self._trial.check(params)
            matcher = self._compiler.compile(params)
        except ParamsError as error:
            with self._table:
                self._refused[key] = str(error)
                _trim(self._refused)
            raise
        with self._table:
            self._compiled[key] = matcher
            _trim(self._compiled)
            return matcher.deep_copy()


def _trim(cache: OrderedDict[tuple[str, ...], Any]) -> None:
    """Remove the oldest entries of a cache that is too large."""
    while (
        len(cache) > MOST_CACHED
        or sum(len(source) for _, source, *_ in cache) > MOST_CACHED_CHARACTERS
    ):
        cache.popitem(last=False)


class LLGuidanceMatcher:
    """A `TokenMatcher` by llguidance."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token may come next. Raises `GrammarError` past a step's limits."""
        mask = self._matcher.compute_bitmask()
        self._check()
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> None:
        """Follow the output by one token. Raises `GrammarError` if it is not allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens. Raises `GrammarError` if there are fewer."""
        self._matcher.rollback(count)
        self._check()

    def fork(self) -> "LLGuidanceMatcher":
        """Return a copy that continues from the same place."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab_size)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because the grammar leaves no choice."""
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"The grammar failed: {first_line(self._matcher.get_error())}.")
