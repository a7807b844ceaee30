"""Log probabilities in OpenAI's two dialects: a chat's list of entries, a completion's columns."""

from collections.abc import Iterable, Mapping
from typing import Any

from minigen.sequence import Logprob
from minigen.text.tokenizer import StreamDecoder, Tokenizer

LEAST = -9999.0  # what OpenAI writes for a probability of 0, since JSON has no infinity

Told = Mapping[int, Logprob]


def chat_entry(tokenizer: Tokenizer, token_id: int, told: Told, num_top: int) -> dict[str, Any]:
    """A chosen token, and the `num_top` likeliest, each with its bytes."""
    return {
        **_entry(tokenizer, token_id, told[token_id]),
        "top_logprobs": [_entry(tokenizer, *each) for each in _likeliest(told)[:num_top]],
    }


class Columns:
    """A completion's log probabilities, token by token: where each begins in the text, too.

    A token that is part of a character begins where the character does. `offset` is where the
    first token begins.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: StreamDecoder, offset: int = 0):
        self._tokenizer, self._decoder, self._offset = tokenizer, decoder, offset

    def of(self, tokens: Iterable[tuple[int, Told | None]]) -> dict[str, list[Any]]:
        """The columns of the next tokens; None for a prompt's first, of which nothing is told."""
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, told in tokens:
            columns["text_offset"].append(self._offset)
            columns["tokens"].append(_text(self._tokenizer.token_bytes(token_id), "bytes:"))
            columns["token_logprobs"].append(told and _number(told[token_id]))
            columns["top_logprobs"].append(told and self._top(told))
            self._offset += len(self._decoder.push(token_id))
        return columns

    def _top(self, told: Told) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in _likeliest(told):  # of equal texts the likeliest stays
            text = _text(self._tokenizer.token_bytes(token_id), "bytes:")
            top.setdefault(text, _number(logprob))
        return top


def _entry(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": _text(raw), "logprob": _number(logprob), "bytes": list(raw)}


def _likeliest(told: Told) -> list[tuple[int, Logprob]]:
    return sorted(told.items(), key=lambda each: -each[1].logprob)


def _text(raw: bytes, prefix: str = "") -> str:
    """The token's text; part of a character as its bytes, as in `\\xe2\\x80`.

    >>> _text(b" caf"), _text("é".encode()[:1], "bytes:")
    (' caf', 'bytes:\\\\xc3')
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
