"""Compiles forms with llguidance; run as a module, it tries forms out for another process.

It imports neither torch nor the models, so that such a process starts fast and stays small.
"""

import json
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minigen.errors import OptionError, ParamsError
from minigen.sampling.json_schemas import enforceable
from minigen.sampling.structured_outputs import StructuredOutputsParams

_QUOTED = re.compile(r"\s*\d+ \|")
_MARK = "<non-verbose/>"  # llguidance ends some texts with it
_NOTHING_FOLLOWS = "NoExtensionBias"  # its whole text where no token can come next
_PLACE = re.compile(r"^at \d+\(\d+\): ")
NO_TOKEN = "no token can come next"
# The library recurses deeply into some forms; what fits into this stack fits into any thread's.
TRIAL_STACK = 2**20
TRIED_STEPS = 3  # the limits of some grammars are only met after the first tokens
# Without \u, each text has one spelling, so no property is written twice: "a" and "\u0061".
ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class Vocabulary:
    """What llguidance must know of a tokenizer: the bytes of each token, and the special ones."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    end_ids: Sequence[int]
    bos_token_id: int | None


class GrammarCompiler:
    """Compiles forms for one vocabulary. Raises `OptionError` if llguidance is not installed."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]):
        try:
            import llguidance
        except ImportError:
            raise OptionError(
                "Structured outputs need the llguidance library: pip install llguidance."
            ) from None
        self._library: Any = llguidance
        self.end_ids = vocabulary.end_ids
        # A step waits for the masks of all its sequences. The library's own limits allow a mask of
        # an ambiguous grammar to take a second; these allow milliseconds, which large schemas and
        # a language's expressions stay far below.
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=300, step_max_items=5000, step_lexer_fuel=50_000, verbose_errors=False
        )
        self.vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Wrapped(vocabulary, encode)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.end_ids),
        )

    def compile(self, params: StructuredOutputsParams) -> Any:
        """Return llguidance's matcher. Raises `ParamsError` if the form cannot be used."""
        try:
            grammar = self._grammar(params)
        except ValueError as error:
            raise refused(params, str(error)) from None
        matcher = self._library.LLMatcher(
            self.vocabulary, grammar, log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds the states that all copies share
        if matcher.is_error():
            raise refused(params, matcher.get_error())
        return matcher

    def _grammar(self, params: StructuredOutputsParams) -> str:
        library = self._library.LLMatcher
        found: str
        if params.kind in ("json", "json_object"):
            options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
            if params.blanks is None:
                options["whitespace_flexible"] = False
            else:
                options["whitespace_pattern"] = params.blanks
            schema = enforceable(json.loads(params.source))
            found = library.grammar_from_json_schema(json.dumps(schema), overrides=options)
        elif params.kind == "regex":
            found = library.grammar_from_regex(params.source)
        elif params.kind == "choice":
            # One lexeme: alternatives of a grammar count against its parser's limits.
            choices = "|".join(re.escape(each) for each in params.choice or ())
            found = library.grammar_from_regex(choices)
        else:
            found = self._library.grammar_from("grammar", params.source)
        return found


class _Wrapped:
    """A tokenizer as llguidance calls it."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]):
        self.eos_token_id, self.bos_token_id = vocabulary.end_ids[0], vocabulary.bos_token_id
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_token_ids
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def refused(params: StructuredOutputsParams, reason: str) -> ParamsError:
    """Return the error that a form cannot be used, for this reason."""
    said = first_line(reason)
    if said == NO_TOKEN and params.kind == "json":  # every value begins with a byte of ASCII
        said = "a $ref leads back to itself"
    return ParamsError(f"structured_outputs.{params.kind} cannot be used: {said}.")


def first_line(text: str) -> str:
    """Return an error's text on one line, at most 300 characters, without its last full stop.

    The lines of the grammar that it quotes are left out.
    """
    own = " ".join(line for line in text.splitlines() if not _QUOTED.match(line))
    said = " ".join(_PLACE.sub("", own).split()).removesuffix(_MARK)[:300].rstrip(". ")
    return NO_TOKEN if said == _NOTHING_FOLLOWS else said


def _try_out(compiler: GrammarCompiler, params: StructuredOutputsParams) -> None:
    """Compile a form and take the first allowed token a few times. Raises `ParamsError`."""
    matcher = compiler.compile(params)
    for _ in range(TRIED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise refused(params, matcher.get_error())
        token_id = (mask & -mask).bit_length() - 1
        if mask == 0 or token_id in compiler.end_ids:
            break
        matcher.consume_token(token_id)


def _greedy(tokens: Sequence[bytes]) -> Callable[[str], list[int]]:
    """Return a function that encodes with long tokens; for a trial, any encoding will do."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    lengths = sorted({len(token) for token in tokens if 0 < len(token) <= 8}, reverse=True)

    def encode(text: str) -> list[int]:
        found: list[int] = []
        whole, position = text.encode(), 0
        while position < len(whole):
            for length in lengths:
                if (token_id := ids.get(whole[position : position + length])) is not None:
                    break
            else:
                return found  # no token has this byte
            found.append(token_id)
            position += length
        return found

    return encode


def _run() -> None:
    """Try out each form that comes by a line of stdin; answer by one of stdout: an error or ""."""
    vocabulary = json.loads(sys.stdin.readline())
    vocabulary["tokens"] = [bytes.fromhex(each) for each in vocabulary["tokens"]]
    compiler = GrammarCompiler(Vocabulary(**vocabulary), _greedy(vocabulary["tokens"]))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the parent has ended; a form that takes for ever must not go on

    threading.Thread(target=read, daemon=True).start()
    threading.stack_size(TRIAL_STACK)
    threading.Thread(target=_answer_all, args=(compiler, requests)).start()


def _answer_all(compiler: GrammarCompiler, requests: "queue.SimpleQueue[str]") -> None:
    answer = ""
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")  # the first one says that this has started
        sys.stdout.flush()
        answer = ""
        try:
            _try_out(compiler, StructuredOutputsParams(**json.loads(requests.get())))
        except ParamsError as error:
            answer = str(error)


if __name__ == "__main__":
    _run()
