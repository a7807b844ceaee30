"""Translates a GGUF's keys and tensor names into those of transformers' checkpoints.

Sources: the GGUF specification's standardised keys and tensor names; llama.cpp's converter for the
order of the rows of Q and K.
"""

import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from minigen.checkpoint.config_json import FAMILIES
from minigen.checkpoint.gguf import GGUFFile
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import ConfigError, UnsupportedError, WeightsError

_MAX_LISTED = 8  # keys in one error message
_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}

_OWN_KEYS = {"attention.value_length", "rope.dimension_count", "rope.scaling.finetuned"}
_SCALING_KEYS = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
}


def config_dict(file: GGUFFile) -> dict[str, Any]:
    """Return a GGUF's metadata under the keys of transformers' `config.json`.

    Raises `UnsupportedError` for an architecture, or a key of it, that minigen does not support.
    """
    architecture = _plain(file, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: the architecture {reprlib.repr(architecture)} is not one that minigen "
            f"runs from GGUF ({', '.join(_ARCHITECTURES)}; Mistral's is 'llama')."
        )
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): _plain(file, key)
        for key in file.metadata
        if key.startswith(prefix)
    }
    strange = sorted(set(own) - set(_CONFIG_KEYS) - _OWN_KEYS - _SCALING_KEYS)
    if strange:
        raise UnsupportedError(
            f"{file.path}: minigen does not support "
            f"{', '.join(prefix + key for key in strange[:_MAX_LISTED])}"
            f"{', ...' if len(strange) > _MAX_LISTED else ''}."
        )
    config = {_CONFIG_KEYS[key]: value for key, value in own.items() if key in _CONFIG_KEYS}
    if "rms_norm_eps" not in config:
        raise ConfigError(f"{file.path}: {prefix}attention.layer_norm_rms_epsilon is missing.")
    _refuse_partial_heads(file.path, own, config)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    has_window = "sliding_window" in config
    return {
        "model_type": "mistral" if architecture == "llama" and has_window else architecture,
        **config,
        **_rope_parameters(file.path, own),
        **({"use_sliding_window": True, "max_window_layers": 0} if has_window else {}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": not FAMILIES[architecture].qkv_bias
        and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": _plain(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file),
    }


def _plain(file: GGUFFile, key: str) -> Any:
    """Return a key's value, with arrays as lists; None if the key is absent."""
    value = file.metadata.get(key)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _end_ids(file: GGUFFile) -> list[Any]:
    ids: list[Any] = []
    for name in ("eos", "eot", "eom"):
        end = _plain(file, f"tokenizer.ggml.{name}_token_id")
        if end is not None and end not in ids:
            ids.append(end)
    return ids


def _refuse_partial_heads(path: Path, own: dict[str, Any], config: dict[str, Any]) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{path}: {key} is {reprlib.repr(own[key])}, but minigen rotates and caches whole "
                f"heads of {reprlib.repr(head_dim)}."
            )


def _rope_parameters(path: Path, own: dict[str, Any]) -> dict[str, Any]:
    attn_factor = own.get("rope.scaling.attn_factor", 1.0)
    if attn_factor != 1.0:
        raise UnsupportedError(
            f"{path}: rope.scaling.attn_factor is {reprlib.repr(attn_factor)}; minigen supports "
            "only 1."
        )
    # llama.cpp treats a factor without a type as linear.
    kind = own.get("rope.scaling.type", "linear" if "rope.scaling.factor" in own else "none")
    if kind == "none":
        return {}
    return {
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": own.get("rope.freq_base", 10_000.0),
            "factor": own.get("rope.scaling.factor"),
        }
    }


def named_tensors(file: GGUFFile, q_heads: int, kv_heads: int) -> dict[str, StoredTensor]:
    """Return a GGUF's tensors under transformers' names, with Q and K in transformers' row order.

    For the Llama architecture, llama.cpp stores the rows of Q and K so that the two halves of each
    rotated pair are neighbours. `row_order` reverses that without changing the bytes. Raises
    `WeightsError` for two tensors of one name, `UnsupportedError` for a quantised bias of Q or K.
    """
    permuted = file.metadata.get("general.architecture") == "llama"
    tensors = {}
    for stored_name, stored in file.tensors.items():
        name = _tensor_name(stored_name)
        tensor = replace(stored, name=name)
        if name in tensors:
            raise WeightsError(f"{file.path} holds {name} twice, once under {stored_name}.")
        module = name.rpartition(".")[0].rpartition(".")[2]
        heads = {"q_proj": q_heads, "k_proj": kv_heads}.get(module, 0)
        if permuted and heads and stored.shape[0] % (2 * heads) == 0:
            tensor = _unpermuted(file.path, tensor, heads)
        tensors[name] = tensor
    return tensors


def _unpermuted(path: Path, tensor: StoredTensor, heads: int) -> StoredTensor:
    order = unpermuted_rows(tensor.shape[0], heads)
    if len(tensor.shape) == 2:
        return replace(tensor, row_order=order)
    if tensor.format.block_size > 1:
        raise UnsupportedError(
            f"{path}: {tensor.name} is a vector of {tensor.kind}, whose numbers cannot be "
            "reordered; minigen reads such vectors in F32, F16 and BF16."
        )
    numbers = tensor.data.unflatten(-1, (-1, tensor.format.block_bytes))[:, order]
    return StoredTensor(tensor.name, tensor.kind, tensor.shape, numbers.flatten(-2))


def unpermuted_rows(num_rows: int, heads: int) -> Int64[Tensor, " rows"]:
    """Return the stored row for each row 0, 1, 2, ...: within a head first the even, then the odd.

    >>> unpermuted_rows(12, heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    return torch.arange(num_rows).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten()


_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def _tensor_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _TENSOR_NAMES:
        return f"model.layers.{block[1]}.{_TENSOR_NAMES[block[2]]}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TENSOR_NAMES[stem]}.{kind}" if stem in _TENSOR_NAMES else name


_GGUF_NAMES = {theirs: own for own, theirs in _TENSOR_NAMES.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """Return the name in a GGUF of a tensor that has this name in transformers' checkpoints.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight"), gguf_name("model.norm.weight")
    ('blk.3.attn_q.weight', 'output_norm.weight')
    """
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _GGUF_NAMES:
        return f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{kind}" if stem in _GGUF_NAMES else name
