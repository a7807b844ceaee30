"""Grammars by the llguidance library: an Earley parser over lexemes that are regex derivatives.

A grammar is compiled once and cached; each answer follows a copy of it. A mask takes some
microseconds. Sources: llguidance's docs/json_schema.md and docs/syntax.md; Earley 1970; Brzozowski
1964, for derivatives.
"""

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from minigen.errors import GrammarError, OptionError, ParamsError
from minigen.sampling.processors import Logits, LogitsProcessor, TokenMatcher
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer

_QUOTED = re.compile(r"\s*\d+ \|")
_PLACE = re.compile(r"^at \d+\(\d+\): ")
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

    `end_ids` are the model's end tokens. Raises `OptionError` if the library is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]):
        try:
            import llguidance
        except ImportError:
            raise OptionError(
                "Structured outputs need the llguidance library: pip install llguidance."
            ) from None
        self._library: Any = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, end_ids)),
            n_vocab=vocab_size,
            eos_token=sorted(end_ids),
        )
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> "LLGuidanceMatcher":
        """Return a matcher at the start of a grammar. Raises `ParamsError` if it cannot be used.

        One grammar is compiled at a time, so that clients cannot keep all cores busy with this.
        """
        key = (params.kind, params.source, params.blanks or "", str(params.strict))
        with self._lock:
            matcher = self._compiled.pop(key, None)
            if matcher is None:
                matcher = self._fresh(params)
            self._compiled[key] = matcher
            while (
                len(self._compiled) > MOST_CACHED
                or sum(len(source) for _, source, *_ in self._compiled) > MOST_CACHED_CHARACTERS
            ):
                self._compiled.popitem(last=False)
            return LLGuidanceMatcher(matcher.deep_copy(), self.vocab_size)

    def _fresh(self, params: StructuredOutputsParams) -> Any:
        try:
            grammar = self._grammar(params)
        except ValueError as error:
            raise _refused(params, str(error)) from None
        matcher = self._library.LLMatcher(
            self._vocabulary, grammar, log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds the states that all copies share
        if matcher.is_error():
            raise _refused(params, matcher.get_error())
        return matcher

    def _grammar(self, params: StructuredOutputsParams) -> str:
        library = self._library.LLMatcher
        found: str
        if params.kind in ("json", "json_object"):
            options = (
                {"whitespace_flexible": False}
                if params.blanks is None
                else {"whitespace_pattern": params.blanks}
            )
            found = library.grammar_from_json_schema(params.source, overrides=options)
        elif params.kind == "regex":
            found = library.grammar_from_regex(params.source)
        elif params.kind == "choice":
            # One lexeme: alternatives of a grammar count against its parser's limits.
            choices = "|".join(re.escape(each) for each in params.choice or ())
            found = library.grammar_from_regex(choices)
        else:
            found = self._library.grammar_from("grammar", params.source)
        return found


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
            raise GrammarError(f"The grammar failed: {_first_line(self._matcher.get_error())}.")


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, and how it encodes text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]):
        self.eos_token_id, self.bos_token_id = min(end_ids), tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _refused(params: StructuredOutputsParams, reason: str) -> ParamsError:
    return ParamsError(f"structured_outputs.{params.kind} cannot be used: {_first_line(reason)}.")


def _first_line(text: str) -> str:
    """Return an error's text on one line, at most 300 characters, without its last full stop.

    The lines of the grammar that it quotes are left out.
    """
    own = [line for line in text.splitlines() if not _QUOTED.match(line)]
    return " ".join(_PLACE.sub("", " ".join(own)).split())[:300].rstrip(". ")
