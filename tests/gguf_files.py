"""GGUF files for the tests: good ones by the `gguf` library's writer, any others byte by byte.

The bytes follow the GGUF specification and share no code with `minigen.checkpoint.gguf`; the models
follow llama.cpp's `convert_hf_to_gguf.py`, with names and keys of the `gguf` library.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, GGUFValueType

LAYOUTS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class Value:
    """A typed value of a key; for an array, `kind` is the type of its elements.

    `count` is the length in an array's header, where that is to be wrong.
    """

    kind: GGUFValueType
    content: Any
    is_array: bool = False
    count: int | None = None


def text(content: str) -> Value:
    """Return a string value."""
    return Value(GGUFValueType.STRING, content)


def uint32(content: int) -> Value:
    """Return a uint32 value, the type of most keys."""
    return Value(GGUFValueType.UINT32, content)


@dataclass(frozen=True)
class Part:
    """A tensor as a header describes it; `sizes` are in GGUF's order, the row's length first.

    Without an `offset` it follows the tensor before it.
    """

    name: str
    sizes: Sequence[int]
    data: bytes
    kind: int = GGMLQuantizationType.F32
    offset: int | None = None


@dataclass
class GGUFBytes:
    """A file being written; records the positions of its counts, lengths, types and offsets."""

    data: bytearray = field(default_factory=bytearray)
    numbers: list[tuple[int, int]] = field(default_factory=list)  # position, width in bytes

    def number(self, layout: str, value: int) -> None:
        """Append a number that determines how the following bytes are read."""
        self.numbers.append((len(self.data), struct.calcsize(layout)))
        self.data += struct.pack(layout, value)

    def string(self, content: str | bytes) -> None:
        """Append a length and the bytes."""
        raw = content.encode() if isinstance(content, str) else content
        self.number("<Q", len(raw))
        self.data += raw

    def value(self, value: Value) -> None:
        """Append a type and its value."""
        if not value.is_array:
            self.number("<I", value.kind)
            self._element(value.kind, value.content)
            return
        self.number("<I", GGUFValueType.ARRAY)
        self.number("<I", value.kind)
        self.number("<Q", len(value.content) if value.count is None else value.count)
        for content in value.content:
            self._element(value.kind, content)

    def _element(self, kind: GGUFValueType, content: Any) -> None:
        if kind == GGUFValueType.STRING:
            self.string(content)
        else:
            self.data += struct.pack(f"<{LAYOUTS[kind]}", content)

    def tensor(self, part: Part, offset: int) -> None:
        """Append a tensor's description."""
        self.string(part.name)
        self.number("<I", len(part.sizes))
        for size in part.sizes:
            self.number("<Q", size)
        self.number("<I", part.kind)
        self.number("<Q", offset)


def raw_gguf(
    pairs: Sequence[tuple[str, Value]],
    parts: Sequence[Part] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> GGUFBytes:
    """Return a GGUF file, byte by byte, with the requested wrong values."""
    file = GGUFBytes(bytearray(b"GGUF"))
    file.number("<I", version)
    file.number("<Q", len(parts) if num_tensors is None else num_tensors)
    file.number("<Q", len(pairs) if num_pairs is None else num_pairs)
    for key, value in pairs:
        file.string(key)
        file.value(value)
    data = bytearray()
    for part in parts:
        file.tensor(part, len(data) if part.offset is None else part.offset)
        data += part.data + bytes(-len(part.data) % alignment)
    file.data += bytes(-len(file.data) % alignment) + data
    return file


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType | None]],
    alignment: int | None = None,
) -> None:
    """Write a file with the library; a tensor of a quantised kind is given as rows of bytes.

    Values are given as ints, floats, bools, strings or lists, or as `Value`s to name the type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, Value) and value.is_array:
            writer.add_key_value(key, value.content, GGUFValueType.ARRAY, sub_type=value.kind)
        elif isinstance(value, Value):
            writer.add_key_value(key, value.content, value.kind)
        else:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, model: Any, changes: Mapping[str, Any] = {}) -> None:
    """Write a transformers model as llama.cpp's converter does, in F32.

    `changes` replace metadata, or remove it with None.
    """
    architecture = {"mistral": "llama"}.get(model.config.model_type, model.config.model_type)
    metadata = {**_metadata(architecture, model.config), **changes}
    kept = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(path, architecture, kept, _tensors(architecture, model))


def _metadata(architecture: str, config: Any) -> dict[str, Any]:
    keys = gguf.Keys
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        keys.LLM.BLOCK_COUNT: config.num_hidden_layers,
        keys.LLM.CONTEXT_LENGTH: config.max_position_embeddings,
        keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
        keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
        keys.Attention.HEAD_COUNT: config.num_attention_heads,
        keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
        keys.Attention.KEY_LENGTH: head_dim,
        keys.Attention.VALUE_LENGTH: head_dim,
        keys.Attention.LAYERNORM_RMS_EPS: config.rms_norm_eps,
        keys.Rope.DIMENSION_COUNT: head_dim,
        keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
        keys.LLM.VOCAB_SIZE: config.vocab_size,
        keys.Tokenizer.BOS_ID: config.bos_token_id,
        keys.Tokenizer.EOS_ID: config.eos_token_id,
    }
    if rope["rope_type"] == "linear":
        values[keys.Rope.SCALING_TYPE] = "linear"
        values[keys.Rope.SCALING_FACTOR] = float(rope["factor"])
    if getattr(config, "sliding_window", None) is not None:
        values[keys.Attention.SLIDING_WINDOW] = config.sliding_window
    return {key.format(arch=architecture): value for key, value in values.items()}


def _tensors(architecture: str, model: Any) -> dict[str, tuple[np.ndarray, None]]:
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        count = heads.get(name.split(".")[-2])
        stored = permuted(tensor, count) if architecture == "llama" and count else tensor
        tensors[names.get_name(name, (".weight", ".bias"))] = (stored.float().numpy(), None)
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = (rope_factors(config).numpy(), None)
    return tensors


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of Q or K in llama.cpp's order (`LlamaModel.permute` of its converter)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def rope_factors(config: Any) -> torch.Tensor:
    """Return Llama 3's scaling as divisors of each frequency (`generate_extra_tensors` there)."""
    rope = config.rope_parameters
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context = rope["original_max_position_embeddings"]
    factors = []
    for even in range(0, config.head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (even / config.head_dim)
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)
