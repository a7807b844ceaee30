"""Builds a tokenizer of the `tokenizers` library from a GGUF's vocabulary.

A GGUF contains the parts of a tokenizer: tokens, their types, and either merges (byte-level BPE,
`tokenizer.ggml.model` = "gpt2") or scores (SentencePiece, "llama"). It does not contain the rules
that split text into words before merging (the pre-tokeniser): `tokenizer.ggml.pre` only names them.

Sources: the GGUF specification for the keys; llama.cpp's `llama-vocab.cpp` for the names of
pre-tokenisers, what they imply, and the defaults of absent keys; the `tokenizer.json` of the model
behind each name for the exact expressions, because llama.cpp's differ on rare characters; Kudo and
Richardson 2018 (SentencePiece) for merging by score.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import gt
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from minigen.errors import TokenizerError, UnsupportedError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """The pre-tokenisation rules that a family of vocabularies shares.

    Each pattern splits the pieces of the pattern before it: a match is a word, and so is the text
    between two matches. With `single_digits` every digit is a word, before any pattern. With
    `composes` the text is first normalised to Unicode's NFC. With `whole_words` a word that is a
    token is not merged. With `adds_bos` a text begins with BOS unless the vocabulary disables it.
    """

    patterns: tuple[str, ...]
    single_digits: bool = False
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """Return the family's rules as a pre-tokeniser, down to the byte alphabet."""
        return Sequence(
            [
                *([Digits(individual_digits=True)] if self.single_digits else []),
                *(Split(Regex(pattern), "isolated") for pattern in self.patterns),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_SINGLE_DIGITS = Family((_GPT2,), single_digits=True)
_LLAMA3_FAMILY = Family((_LLAMA3,), whole_words=True, adds_bos=True)
_CL100K = Family((_LLAMA3,))
_QWEN2_FAMILY = Family((_QWEN2,), composes=True)

FAMILIES = {
    "default": Family((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Family((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "pixtral": _LLAMA3_FAMILY,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "tekken": Family((_TEKKEN,), whole_words=True, adds_bos=True),
}


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class GGUFVocabulary:
    """A GGUF's tokenizer, and the token ids that begin and end a text."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: frozenset[int]


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Build the tokenizer that a GGUF's key/values describe.

    Without `tokenizer.ggml.pre` the rules are those of llama.cpp's "default". Raises
    `TokenizerError` for keys that are missing or contradict each other, and `UnsupportedError` for
    a kind of vocabulary or a pre-tokeniser that minigen does not know.
    """
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, tokens)
    kind = _scalar(metadata, "model", "", str)
    if kind == "gpt2":
        family = _family(metadata)
        backend, adds_bos = _byte_level(metadata, tokens, family), family.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentence_piece(metadata, tokens, types), True
    else:
        raise UnsupportedError(
            f"The GGUF's vocabulary is of the kind {kind!r} (tokenizer.ggml.model), "
            "but minigen reads 'gpt2' and 'llama'."
        )
    bos, eos, end_of_turn, end_of_message = (
        _token_id(metadata, name, tokens) for name in ("bos", "eos", "eot", "eom")
    )
    ends = frozenset(i for i in (eos, end_of_turn, end_of_message) if i is not None)
    _recognise(backend, tokens, types, ends if bos is None else ends | {bos})
    backend.post_processor = _frame(
        before=_framing_id(metadata, "bos", bos, adds_bos),
        after=_framing_id(metadata, "eos", eos, False),
    )
    return GGUFVocabulary(backend, bos, ends)


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a chat template may name: `bos_token`, `eos_token`, and so on."""
    tokens = _strings(metadata, "tokens")
    ids = {name: _token_id(metadata, key, tokens) for name, key in _NAMED_TOKENS.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], family: Family
) -> tokenizers.Tokenizer:
    vocabulary = _ids_of(tokens)
    merges = _merges(metadata, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family.whole_words))
    if family.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    vocabulary = _ids_of(tokens)
    _check_bytes(vocabulary)
    scores = _numbers(metadata, "scores", tokens)
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == _NORMAL
    }
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges_by_score(normal), byte_fallback=True)
    )
    prefixed = _scalar(metadata, "add_space_prefix", True, bool)
    prefix = [normalizers.Prepend("▁")] if prefixed else []
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins into a third, ordered by the third's score."""
    lengths = sorted({len(piece) for piece in pieces})  # few, even if a piece is very long
    ranked = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in takewhile(partial(gt, len(piece)), lengths)
        if cut > 0 and piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]


def _recognise(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], framing: Iterable[int]
) -> None:
    """Register special tokens, which are recognised anywhere in a text before it is split."""
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}.union(framing)
    user_defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and i not in special]
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    backend.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=False) for i in user_defined]
    )


def _frame(before: int | None, after: int | None) -> processors.TemplateProcessing:
    """Return a post-processor that adds BOS before a text and EOS after it, where given."""
    ids = {"bos": before, "eos": after}
    return processors.TemplateProcessing(
        single=[
            *(["bos"] if before is not None else []),
            "$A",
            *(["eos"] if after is not None else []),
        ],
        special_tokens=[
            {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items() if i is not None
        ],
    )


def _family(metadata: Mapping[str, Any]) -> Family:
    name = _scalar(metadata, "pre", "default", str)
    if name not in FAMILIES:
        raise UnsupportedError(
            f"The GGUF's pre-tokeniser (tokenizer.ggml.pre) is {name!r}, "
            f"but minigen knows {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def _scalar(metadata: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    """Return the value of a key, which must be a string or a truth value."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, kind):
        what = "a string" if kind is str else "true or false"
        raise TokenizerError(f"The GGUF's tokenizer.ggml.{name} should be {what}, not {value!r}.")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    strings = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(strings, list) or not strings:
        raise TokenizerError(f"The GGUF has no tokenizer.ggml.{name}, so it has no tokenizer.")
    return strings


def _numbers(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> list[Any]:
    numbers = np.asarray(metadata.get(f"tokenizer.ggml.{name}", ()))
    if numbers.shape != (len(tokens),):
        raise TokenizerError(
            f"The GGUF's tokenizer.ggml.{name} has {numbers.size} entries, "
            f"but there are {len(tokens)} tokens."
        )
    if numbers.dtype.kind not in "iuf":
        raise TokenizerError(f"The GGUF's tokenizer.ggml.{name} should hold numbers.")
    return numbers.tolist()


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [_NORMAL] * len(tokens)
    return _numbers(metadata, "token_type", tokens)


def _ids_of(tokens: list[str]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise TokenizerError(
            f"The GGUF's vocabulary has the token {tokens[first]!r} more than once, "
            f"as {first} and as {ids[tokens[first]]}."
        )
    return ids


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _strings(metadata, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise TokenizerError(
                f"The GGUF merges {left!r} and {right!r}, but one of them, or the joined text, is "
                "not a token."
            )
        pairs.append((left, right))
    return pairs


def _check_bytes(vocabulary: Mapping[str, int]) -> None:
    absent = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if absent:
        raise TokenizerError(
            f"The GGUF's vocabulary lacks {len(absent)} of the 256 byte tokens, "
            f"<0x{absent[0]:02X}> first, so it cannot spell every text."
        )


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise TokenizerError(
            f"The GGUF's tokenizer.ggml.{name}_token_id is {token_id}, "
            f"but its tokens have the ids 0 to {len(tokens) - 1}."
        )
    return token_id


def _framing_id(
    metadata: Mapping[str, Any], name: str, token_id: int | None, default: bool
) -> int | None:
    """Return the id added before ("bos") or after ("eos") every text; None if none is added."""
    if not _scalar(metadata, f"add_{name}_token", default, bool):
        return None
    if token_id is None:
        raise TokenizerError(
            f"The GGUF's tokenizer adds {name.upper()} to every text, "
            f"but tokenizer.ggml.{name}_token_id is missing."
        )
    return token_id
