"""Writes a model's directory: weights in `model.safetensors`, configuration, tokenizer, template.

The small files of a directory are copied. Those of a GGUF are made from its keys:
`tokenizer.json` by the `tokenizers` library from the tokenizer that minigen builds of the
vocabulary.
"""

import functools
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.config_json import read_json
from minigen.checkpoint.model_config import RopeScaling
from minigen.errors import UnsupportedError
from minigen.export.compressed_writer import quantization_config
from minigen.export.gguf_metadata import rope_divisors
from minigen.export.partial import FLOATING, PartialOutput
from minigen.export.pieces import float_dtype, floating
from minigen.export.plan import Plan
from minigen.export.safetensors_writer import TensorToWrite, write_safetensors
from minigen.quantization.float_codes import NF4_BLOCK
from minigen.tokenizer.gguf import read_vocabulary, special_tokens

_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt"),
)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, context: of all Llama 3 models


class DirectoryOutput:
    """Writes a model's pieces, and the tensors that stay as they are, as a directory.

    Raises `UnsupportedError` for a GGUF whose configuration `config.json` has no keys for.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self._checkpoint, self._plan = checkpoint, plan
        if checkpoint.gguf_metadata is not None:
            _config_keys(checkpoint)
            read_vocabulary(checkpoint.gguf_metadata)

    def estimated_bytes(self, names: Iterable[str]) -> int:
        """Return about the size that these tensors have in the directory."""
        total = 0
        for name in names:
            tensor = self._checkpoint.tensors[name]
            numbers = math.prod(tensor.shape)
            grid = self._plan.grids.get(name)
            if grid is not None:
                total += grid.num_bytes(*tensor.shape)
            elif name not in self._plan.made:
                total += numbers * float_dtype(tensor).itemsize
            elif self._plan.method == "nf4":
                total += numbers // 2 + 4 * -(-numbers // NF4_BLOCK)
            else:
                total += numbers
        return total

    def write(self, folder: Path, partial: PartialOutput) -> None:
        """Write the directory, with the pieces that `partial` has."""
        folder.mkdir()
        tensors: dict[str, TensorToWrite] = {}
        forms: dict[str, str] = {}
        for name, stored in self._checkpoint.tensors.items():
            if name == "rope_freqs.weight":
                continue  # config.json says it
            if not partial.may_have(name):
                shape, dtype = stored.shape, float_dtype(stored)
                tensors[name] = TensorToWrite(dtype, shape, functools.partial(floating, stored))
                continue
            piece, (stem, _, _) = partial.get(name), name.rpartition(".")
            if piece.form != FLOATING:
                forms[stem] = piece.form
            for key, each in piece.tensors.items():
                load = functools.partial(_part, partial, name, key)
                tensors[f"{stem}.{key}"] = TensorToWrite(each.dtype, tuple(each.shape), load)
        write_safetensors(folder / "model.safetensors", tensors)
        embedding = self._checkpoint.tensors["model.embed_tokens.weight"]
        dtype = float_dtype(embedding)
        write_model_files(self._checkpoint, folder, quantization_config(forms), dtype)


def _part(partial: PartialOutput, name: str, key: str) -> Shaped[Tensor, "..."]:
    return partial.get(name).tensors[key]


def write_model_files(
    checkpoint: Checkpoint, folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write all of a model's directory but its weights.

    Raises `UnsupportedError` for a GGUF whose rotary scaling `config.json` has no keys for.
    """
    if checkpoint.gguf_metadata is None:
        config = read_json(checkpoint.path / "config.json")
        for name in _COPIED:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    else:
        config = _config_keys(checkpoint)
        _write_tokenizer(checkpoint, checkpoint.gguf_metadata, folder)
        ends = list(checkpoint.config.eos_token_ids)
        _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    config.pop("torch_dtype", None)
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    _write_json(folder / "config.json", config)


def _config_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return `config.json` for a model whose configuration came out of a GGUF."""
    config = checkpoint.config
    window = next((each for each in config.sliding_windows if each is not None), None)
    keys: dict[str, Any] = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # where older versions of transformers look for it
        "rope_parameters": _rope_parameters(checkpoint),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
    }
    if config.family in ("llama", "qwen3"):
        keys["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        keys["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        keys["sliding_window"] = window
    elif window is not None:
        keys |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return keys


def _rope_parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    theta = {"rope_theta": config.rope_theta}
    if "rope_freqs.weight" in checkpoint.tensors:
        return {**theta, "rope_type": "llama3", **_llama3_scaling(checkpoint)}
    if config.rope_linear_factor != 1.0:
        return {**theta, "rope_type": "linear", "factor": config.rope_linear_factor}
    return {**theta, "rope_type": "default"}


def _llama3_scaling(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling whose divisors a GGUF stores.

    The divisors do not tell them apart in general, so those of the published models are tried.
    """
    stored = checkpoint.tensors["rope_freqs.weight"].dequantize()
    low, high, context = _LLAMA3
    scaling = RopeScaling(round(float(stored.max()), 3), low, high, context)
    if torch.allclose(rope_divisors(checkpoint.config, scaling), stored, rtol=1e-4):
        return {
            "factor": scaling.factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }
    raise UnsupportedError(
        f"{checkpoint.path} stores a rotary scaling (rope_freqs) that is not Llama 3's for a "
        f"context of {context} tokens, so config.json cannot express it; write a GGUF."
    )


def _write_tokenizer(checkpoint: Checkpoint, metadata: Mapping[str, Any], folder: Path) -> None:
    backend = read_vocabulary(metadata).backend
    text = backend.to_str(pretty=True)  # `save` raises a bare Exception on a full disk
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config.max_positions,
        **special_tokens(metadata),
    }
    template = checkpoint.chat_template()
    if template is not None:
        settings["chat_template"] = template.source
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
