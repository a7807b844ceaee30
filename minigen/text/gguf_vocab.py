"""A GGUF's vocabulary as a tokenizer of the `tokenizers` library.

A GGUF carries the parts of a tokenizer: tokens, their types, and either merges (byte-level BPE,
`tokenizer.ggml.model` = "gpt2") or scores (SentencePiece, "llama").

Sources: the GGUF specification for the keys; llama.cpp's `llama-vocab.cpp` for what holds where a
key is absent; Kudo and Richardson 2018 (SentencePiece) for merging by score.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from minigen.errors import TokenizerError, UnsupportedError
from minigen.text.pretokenizers import FAMILIES, Family

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class GGUFVocabulary:
    """A GGUF's tokenizer, and the ids that begin and end a text."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: frozenset[int]


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """The tokenizer that a GGUF's key/values describe.

    Without `tokenizer.ggml.pre` a text is cut as llama.cpp's "default" does. Raises
    `TokenizerError` for keys that are missing or contradict each other, and `UnsupportedError` for
    a kind of vocabulary or a pre-tokeniser that minigen does not know.
    """
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, tokens)
    kind = metadata.get("tokenizer.ggml.model")
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
    """The tokens that a chat template may name: `bos_token`, `eos_token`, and so on."""
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
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if prefixed else []
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way of joining two pieces into a third, the third of the best score first."""
    ranked = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]


def _recognise(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], framing: Iterable[int]
) -> None:
    """Have tokens that are no words recognised wherever a text holds them, before all else."""
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}.union(framing)
    user_defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and i not in special]
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    backend.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=False) for i in user_defined]
    )


def _frame(before: int | None, after: int | None) -> processors.TemplateProcessing:
    """What puts BOS before a text, and EOS after it, where they are given."""
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
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"The GGUF's pre-tokeniser (tokenizer.ggml.pre) is {name!r}, "
            f"but minigen knows {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


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
                f"The GGUF merges {left!r} and {right!r}, but these, or both joined, are no tokens."
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
    """The id that is put before ("bos") or after ("eos") every text, if one is."""
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return None
    if token_id is None:
        raise TokenizerError(
            f"The GGUF's tokenizer adds {name.upper()} to every text, "
            f"but tokenizer.ggml.{name}_token_id is missing."
        )
    return token_id
