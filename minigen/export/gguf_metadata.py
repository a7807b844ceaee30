"""The metadata of a GGUF file: copied from another GGUF, or translated from a directory's files.

Sources: the GGUF specification for the keys and their types; llama.cpp's `convert_hf_to_gguf.py`
for what it writes for these architectures; `minigen.tokenizer.gguf` for what a reader makes of a
vocabulary.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import GGUFValueType
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.gguf import ValueReader
from minigen.checkpoint.model_config import ModelConfig, RopeScaling
from minigen.errors import TokenizerError, UnsupportedError
from minigen.model.layers import rotary_frequencies
from minigen.tokenizer.gguf import FAMILIES, read_vocabulary
from minigen.tokenizer.tokenizer import special_tokens

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types
_COUNTS_AT = 8  # in a header: after the magic and the version
_FIRST_KEY_AT = 24
# Texts whose tokens show which rules split a text into words, one or more for each family.
PROBES = (
    "Hello world, it's 2024 and I've 3.14159 reasons!",
    "  two  spaces\n\n\tand\ttabs \r\n end   ",
    "don't DON'T we'LL café naïve Ünïcödé cafe\u0301",
    "x=1; y+=x**2 // (a[0]-b)<=c && !d || e^f~g",
    "1234567890 12 345 6789 ½ ² ٣٤٥",
    "日本語のテキスト 한국어 русский 🙂🙃 👩‍👩‍👧",
    "CamelCaseWord snake_case_word HTTPServer iPhone12 $100 +5% <tag/>",
    "...!!! ??? --- /path/to/file\n/next",
)


@dataclass(frozen=True)
class TypedValue:
    """A value of a key with its GGUF type; for an array, also the type of its elements."""

    value: Any
    kind: GGUFValueType
    element: GGUFValueType | None = None


Metadata = dict[str, TypedValue]


def metadata_of_gguf(path: Path) -> Metadata:
    """Return all keys of a GGUF file with values and types, in the file's order.

    An empty array is left out, because the `gguf` library writes none. The file must have been
    checked by `read_gguf`.
    """
    data = np.memmap(path, np.uint8, "r").data
    _, num_pairs = struct.unpack_from("<QQ", data, _COUNTS_AT)
    values = ValueReader(path, data)
    values.position = _FIRST_KEY_AT
    metadata: Metadata = {}
    for _ in range(num_pairs):
        key = values.name("a key")
        kind = values.type(key)
        if kind != GGUFValueType.ARRAY:
            metadata[key] = TypedValue(values.value(kind, key), GGUFValueType(kind))
            continue
        (element,) = struct.unpack_from("<I", data, values.position)
        array = values.array(key)
        if len(array):
            elements = array.tolist() if isinstance(array, np.ndarray) else array
            metadata[key] = _array(elements, GGUFValueType(element))
    return metadata


def metadata_of_directory(checkpoint: Checkpoint) -> Metadata:
    """Translate a directory's configuration, tokenizer and chat template to GGUF's keys.

    Raises `UnsupportedError` for what GGUF, or minigen's translation, has no keys for.
    """
    config = checkpoint.config
    architecture = "llama" if config.family == "mistral" else config.family
    name = checkpoint.path.resolve().name
    metadata = {
        "general.architecture": _text(architecture),
        "general.type": _text("model"),
        "general.name": _text(name),
        **_config_keys(config, architecture),
        **tokenizer_keys(checkpoint.path, config),
    }
    template = checkpoint.chat_template()
    if template is not None:
        metadata["tokenizer.chat_template"] = _text(template.source)
    return metadata


def rope_divisors(config: ModelConfig, scaling: RopeScaling) -> Float[Tensor, " half"]:
    """Return what GGUF stores of Llama 3's scaling: the divisor of each frequency."""
    plain = rotary_frequencies(config.head_dim, config.rope_theta)
    return plain / rotary_frequencies(config.head_dim, config.rope_theta, 1.0, scaling)


def _config_keys(config: ModelConfig, architecture: str) -> Metadata:
    windows = set(config.sliding_windows)
    if len(windows) > 1:
        raise UnsupportedError(
            f"{config.family} with a sliding window in some layers only cannot be written as "
            "GGUF, whose key for the window holds for all layers; write a directory."
        )
    values: dict[str, int | float | str] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn,
        "rope.dimension_count": config.head_dim,
        "attention.head_count": config.q_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
    }
    if config.rope_linear_factor != 1.0:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_linear_factor}
    if (window := next(iter(windows))) is not None:
        values["attention.sliding_window"] = window
    return {f"{architecture}.{key}": _typed(value) for key, value in values.items()}


def tokenizer_keys(folder: Path, config: ModelConfig) -> Metadata:
    """Translate `tokenizer.json` and `tokenizer_config.json` to GGUF's keys.

    The rules that split texts into words only have a name in GGUF: the first family is taken that
    splits `PROBES` in the same way and makes the same tokens of them. Raises `UnsupportedError` for
    a tokenizer that is not BPE, or if there is no such family.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(
            f"The tokenizer of {folder} is a {model['type']} model; minigen writes "
            "vocabularies of BPE to GGUF."
        )
    keys = {
        **_vocabulary_keys(backend, model, config.vocab_size),
        **_special_keys(folder, config, backend),
    }
    if model.get("byte_fallback"):
        keys["tokenizer.ggml.model"] = _text("llama")
        return _checked(keys, backend, folder)
    keys["tokenizer.ggml.model"] = _text("gpt2")
    for family in FAMILIES:
        tried = {**keys, "tokenizer.ggml.pre": _text(family)}
        if _same_tokens(tried, backend):
            return tried
    raise UnsupportedError(
        f"The tokenizer of {folder} splits texts into words in a way that is none of "
        f"those that GGUF and minigen have names for ({', '.join(FAMILIES)}); write a directory."
    )


def _vocabulary_keys(
    backend: tokenizers.Tokenizer, model: Mapping[str, Any], vocab_size: int
) -> Metadata:
    """Return tokens, types, merges and scores; ids without a token get one that no text has."""
    ids = backend.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{i}]" for i in range(max(vocab_size, 1 + max(ids.values())))]
    types = [_UNUSED] * len(tokens)
    added = backend.get_added_tokens_decoder()
    for token, token_id in ids.items():
        tokens[token_id] = token
        is_byte = bool(model.get("byte_fallback")) and token[:3] == "<0x" and len(token) == 6
        types[token_id] = _BYTE if is_byte else _NORMAL
    for token_id, each in added.items():
        types[token_id] = _CONTROL if each.special else _USER_DEFINED
    merges = [
        tuple(each.split(" ", 1)) if isinstance(each, str) else each for each in model["merges"]
    ]
    keys = {
        "tokenizer.ggml.tokens": _array(tokens, GGUFValueType.STRING),
        "tokenizer.ggml.token_type": _array(types, GGUFValueType.INT32),
    }
    if model.get("byte_fallback"):
        rank = {"".join(pair): -float(place) for place, pair in reversed([*enumerate(merges)])}
        scores = [rank.get(token, 0.0) for token in tokens]
        keys["tokenizer.ggml.scores"] = _array(scores, GGUFValueType.FLOAT32)
    elif merges:
        joined = [" ".join(pair) for pair in merges]
        keys["tokenizer.ggml.merges"] = _array(joined, GGUFValueType.STRING)
    return keys


def _special_keys(folder: Path, config: ModelConfig, backend: tokenizers.Tokenizer) -> Metadata:
    """Return the ids of special tokens, and whether a text begins with BOS or ends with EOS.

    Raises `UnsupportedError` for more end tokens than a GGUF has names for.
    """
    names = special_tokens(folder)
    keys: Metadata = {}
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = names.get(f"{role}_token")
        token_id = None if token is None else backend.token_to_id(token)
        if token_id is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = _typed(token_id)
    bos, eos = (keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    ends = [i for i in config.eos_token_ids if eos is None or i != eos.value]
    free = ("eos", "eot", "eom") if eos is None else ("eot", "eom")
    if len(ends) > len(free):
        raise UnsupportedError(
            f"The model has {len(config.eos_token_ids)} end tokens. A GGUF has names for three, "
            f"so that it would not stop at {ends[len(free) :]}; write a directory."
        )
    for name, token_id in zip(free, ends, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = _typed(token_id)
    framed = backend.encode("a").ids
    bare = backend.encode("a", add_special_tokens=False).ids
    is_framed = len(framed) > len(bare)
    begins = is_framed and bos is not None and framed[0] == bos.value
    ends_too = is_framed and eos is not None and framed[-1] == eos.value
    prefixed = bool(bare) and (backend.id_to_token(bare[0]) or "").startswith("▁")
    return {
        **keys,
        "tokenizer.ggml.add_bos_token": _typed(begins),
        "tokenizer.ggml.add_eos_token": _typed(ends_too),
        "tokenizer.ggml.add_space_prefix": _typed(prefixed),
    }


def _checked(keys: Metadata, backend: tokenizers.Tokenizer, path: Path) -> Metadata:
    if not _same_tokens(keys, backend):
        raise TokenizerError(
            f"The tokenizer of {path} cuts texts into other tokens when it is read back from "
            "GGUF's keys, so it cannot be written as GGUF; write a directory."
        )
    return keys


def _same_tokens(keys: Metadata, backend: tokenizers.Tokenizer) -> bool:
    """Whether a reader of these keys cuts the probes into the same words and the same tokens."""
    read = read_vocabulary({key: typed.value for key, typed in keys.items()}).backend
    return all(
        _words(read, text) == _words(backend, text)
        and all(
            read.encode(text, add_special_tokens=framed).ids
            == backend.encode(text, add_special_tokens=framed).ids
            for framed in (True, False)
        )
        for text in PROBES
    )


def _words(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """Return the words of a text in the byte alphabet; none for SentencePiece's vocabularies."""
    if getattr(backend.model, "byte_fallback", False):
        return []
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = backend.pre_tokenizer
    return [] if words is None else [word for word, _ in words.pre_tokenize_str(text)]


def _text(value: str) -> TypedValue:
    return TypedValue(value, GGUFValueType.STRING)


def _array(values: list[Any], element: GGUFValueType) -> TypedValue:
    return TypedValue(values, GGUFValueType.ARRAY, element)


def _typed(value: bool | int | float | str) -> TypedValue:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    return TypedValue(value, kinds[type(value)])
