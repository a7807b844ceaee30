"""What bytes a token stands for.

Vocabularies are kept as strings, and strings cannot hold any byte. Byte-level BPE (Radford et al.
2019) writes each of the 256 bytes as one letter; SentencePiece (Kudo and Richardson 2018) writes
characters as they are, a space as "▁", and a byte that is no whole character as "<0xAB>".
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from minigen.errors import UnsupportedError


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes bytes, and whether it puts a space before every text."""

    bytes_of: Callable[[str], bytes]
    prefixes_space: bool


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """The spelling of a tokenizer, by the way that it decodes.

    Raises `UnsupportedError` if it is neither byte-level nor SentencePiece-like BPE.
    """
    if not isinstance(backend.model, tokenizers.models.BPE):
        raise UnsupportedError(
            f"The tokenizer is a {type(backend.model).__name__} model, but minigen reads BPE."
        )
    steps = _decoding_steps(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Spelling(bytes_of_letters, prefixes_space=False)
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps in ([space], [space, strip]):
        return Spelling(bytes_of_piece, prefixes_space=strip in steps)
    raise UnsupportedError(
        f"The tokenizer decodes by {', '.join(step['type'] for step in steps) or 'nothing'}, "
        "but minigen reads byte-level and SentencePiece-like ones."
    )


def bytes_of_letters(token: str) -> bytes:
    """A byte-level token's bytes; one that is not written in the alphabet stands for itself.

    >>> bytes_of_letters("Ġcaf") + bytes_of_letters("Ã©")
    b' caf\\xc3\\xa9'
    """
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


def bytes_of_piece(token: str) -> bytes:
    """A SentencePiece token's bytes.

    >>> bytes_of_piece("▁caf") + bytes_of_piece("<0xC3>") + bytes_of_piece("<0xA9>")
    b' caf\\xc3\\xa9'
    """
    return _BYTE_OF_PIECE.get(token) or token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters: printable Latin-1 for itself, and U+0100 onwards for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
_BYTE_OF_PIECE = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _decoding_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the library's decoder that say how tokens are spelled.

    Left out are the two that only join: bytes to characters, and tokens to a text.
    """
    if backend.decoder is None:
        return []
    outer = json.loads(backend.decoder.__getstate__())
    steps = outer["decoders"] if outer["type"] == "Sequence" else [outer]
    return [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]
