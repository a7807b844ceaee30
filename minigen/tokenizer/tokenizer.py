"""Converts text to token ids and back.

The `tokenizers` library does the merging (byte-pair encoding: Sennrich et al. 2016; byte-level:
Radford et al. 2019; pieces with byte fallback: Kudo and Richardson 2018). This module does the
decoding, in the same way for all tokenizers: every id stands for some bytes, and the text is the
joined bytes of its ids, decoded as UTF-8. So a stream can hold back the bytes of an incomplete
character, and its pieces still add up to the result of decoding all ids at once.

Vocabularies are stored as strings, and strings cannot hold arbitrary bytes. Byte-level BPE writes
each of the 256 bytes as one letter. SentencePiece writes characters unchanged, a space as "▁", and
a byte that is not a whole character as "<0xAB>".
"""

import codecs
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from minigen.errors import PromptError, TokenizerError, UnsupportedError


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes bytes, and whether it adds a space before every text."""

    bytes_of: Callable[[str], bytes]
    prefixes_space: bool


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """Return the spelling of a tokenizer, derived from its decoder.

    Raises `UnsupportedError` if it is neither byte-level nor SentencePiece-like BPE.
    """
    if not isinstance(backend.model, tokenizers.models.BPE):
        raise UnsupportedError(
            f"The tokenizer is a {type(backend.model).__name__} model, but minigen supports only "
            "BPE."
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
        "but minigen supports only byte-level and SentencePiece-like ones."
    )


def bytes_of_letters(token: str) -> bytes:
    """Return a byte-level token's bytes; a token outside the byte alphabet stands for itself.

    >>> bytes_of_letters("Ġcaf") + bytes_of_letters("Ã©")
    b' caf\\xc3\\xa9'
    """
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


def bytes_of_piece(token: str) -> bytes:
    """Return a SentencePiece token's bytes.

    >>> bytes_of_piece("▁caf") + bytes_of_piece("<0xC3>") + bytes_of_piece("<0xA9>")
    b' caf\\xc3\\xa9'
    """
    return _BYTE_OF_PIECE.get(token) or token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's letters: printable Latin-1 unchanged, U+0100 onwards for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
_BYTE_OF_PIECE = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _decoding_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of the library's decoder that define how tokens are spelled.

    The two steps that only join bytes to characters and tokens to a text are left out.
    """
    if backend.decoder is None:
        return []
    outer = json.loads(backend.decoder.__getstate__())
    steps = outer["decoders"] if outer["type"] == "Sequence" else [outer]
    return [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]


LONG_TEXT = 20_000  # characters, which take some 10 ms to encode


class Tokenizer:
    """A vocabulary that encodes text into token ids, and decodes token ids into text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token_id: int | None,
        eos_token_ids: Collection[int],
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Raises `UnsupportedError` if it is neither byte-level nor SentencePiece-like BPE.
        """
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._backend = backend
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes = {i: token.content.encode() for i, token in added.items()}
        spelling = spelling_of(backend)
        self._spell, self._prefixes_space = spelling.bytes_of, spelling.prefixes_space

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json`, and the names of BOS and EOS from `tokenizer_config.json`.

        Raises `TokenizerError` if it is missing, unreadable, or lacks a token that
        `tokenizer_config.json` names; `UnsupportedError` if it is not a kind of BPE that minigen
        decodes.
        """
        backend = _read_backend(directory)
        names = special_tokens(directory)
        known = backend.get_added_tokens_decoder()
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, special=True, normalized=False)
                for token in dict.fromkeys(names.values())
                if (i := backend.token_to_id(token)) is not None and i not in known
            ]
        )
        bos, eos = (_id_of(backend, names, role, directory) for role in ("bos_token", "eos_token"))
        return cls(backend, bos, () if eos is None else (eos,))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that a GGUF's key/values describe.

        Raises `TokenizerError` and `UnsupportedError` as `gguf.read_vocabulary` does.
        """
        from minigen.tokenizer.gguf import read_vocabulary  # noqa: PLC0415 - most files are no GGUF

        vocabulary = read_vocabulary(metadata)
        return cls(vocabulary.backend, vocabulary.bos_token_id, vocabulary.eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the text's token ids, with BOS and EOS where the tokenizer adds them.

        A special token that is written in the text is recognised. If a vocabulary has no token for
        some byte (SmolLM2's lacks a few control characters), the byte is skipped, as in the
        library. Raises `PromptError` for a lone surrogate, which is not a character, and
        `TokenizerError` if the tokenizer is damaged so that the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"The text holds half a surrogate pair ({text[error.start]!r}) at position "
                f"{error.start}, which is not a character."
            ) from None
        with _panics_as_errors():
            if len(text) < LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # encode_batch lets other threads run meanwhile, so a server's streams continue.
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these ids; bytes that are not valid UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else ()
        joined = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = joined.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._prefixes_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
            known = self._bytes[token_id] = b"" if token is None else self._spell(token)
        return known

    def stream(self, skip_special_tokens: bool = True, continues: bool = True) -> "StreamDecoder":
        """Return a decoder that takes one id at a time.

        With `continues` the ids continue an earlier text, so a leading space belongs to them.
        Without it, the pieces add up to the result of `decode`.
        """
        return StreamDecoder(
            self.token_bytes,
            skipped=self.special_ids if skip_special_tokens else (),
            drop_space=self._prefixes_space and not continues,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `TokenizerError` if a token's id is not in the model's vocabulary.

        A tokenizer may have fewer tokens than the model has ids: models pad their vocabularies.
        """
        if self.num_ids > vocab_size:
            worst = self._backend.id_to_token(self.num_ids - 1)
            raise TokenizerError(
                f"The tokenizer's token {worst!r} has the id {self.num_ids - 1}, but the model "
                f"has only the ids 0 to {vocab_size - 1}: they do not belong together."
            )


class StreamDecoder:
    """Decodes ids one by one, and never returns an incomplete character."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Collection[int], drop_space: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._drop_space = drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._drop_leading_space(self._utf8.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that stayed incomplete, or an empty string."""
        return self._drop_leading_space(self._utf8.decode(b"", final=True))

    def _drop_leading_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the tokens that a model's directory names: `bos_token`, `eos_token`, and so on.

    The source is `tokenizer_config.json`, and `special_tokens_map.json` for names that are absent
    there. Raises `TokenizerError` if either is not JSON.
    """
    entries = read_json(directory / "special_tokens_map.json")
    entries |= read_json(directory / "tokenizer_config.json")
    tokens = {
        role: entry["content"] if isinstance(entry, dict) and "content" in entry else entry
        for role, entry in entries.items()
        if role.endswith("_token")
    }
    named = {role: token for role, token in tokens.items() if isinstance(token, str)}
    for role, token in named.items():
        if not _is_text(token):
            raise TokenizerError(f"{directory} names {token!r} as its {role}, which is no text.")
    return named


def _is_text(string: str) -> bool:
    """Return whether a string has no lone surrogates, which are not characters."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty without a file. Raises `TokenizerError`."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise TokenizerError(f"{path} should hold a JSON object, not a {type(parsed).__name__}.")
    return parsed


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        hint = (
            "; minigen does not read tokenizer.model, so save the tokenizer with transformers first"
            if (directory / "tokenizer.model").is_file()
            else ""
        )
        raise TokenizerError(f"{directory} has no tokenizer.json{hint}.")
    try:
        with _panics_as_errors():
            return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{path} cannot be read: {error}.") from None


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic of the library, which `except Exception` would miss, into a `TokenizerError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which Python code cannot import
            raise
        raise TokenizerError(f"The tokenizers library failed: {error}.") from None


def _id_of(
    backend: tokenizers.Tokenizer, names: Mapping[str, str], role: str, directory: Path
) -> int | None:
    if role not in names:
        return None
    token_id = backend.token_to_id(names[role])
    if token_id is None:
        raise TokenizerError(
            f"{directory} names {names[role]!r} as its {role}, but its tokenizer.json has no "
            "such token."
        )
    return token_id
