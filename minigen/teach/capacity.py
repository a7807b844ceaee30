"""The memory that a model needs, from its configuration alone: weights, KV cache, working memory.

The configurations are those that the models' publishers give (config.json on the Hugging Face hub).
GB are 10^9 bytes.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from minigen.config import ModelConfig
from minigen.config_json import read_config
from minigen.model.transformer import expected_tensors

GB = 1e9

# Bits a weight takes, its share of the scales included.
BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "int8": 8.0,
    "Q4_0: 4 bits and a scale for 32": 4.5,
    "4 bits, scales forgotten": 4.0,
}


def _llama(**own: Any) -> dict[str, Any]:
    common = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    return common | {"tie_word_embeddings": False} | own


MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _llama(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B": _llama(
        vocab_size=49152,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": _llama(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "Llama-2-7B": _llama(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
    ),
    "Llama-3-8B": _llama(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
    ),
    "Llama-3-70B": _llama(
        vocab_size=128256,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    ),
}


def config_of(name_or_json: str) -> ModelConfig:
    """The configuration of a model of `MODELS`, or of the text of a config.json.

    Raises `ValueError` for what is neither, and `ConfigError` for a model of another family.
    """
    if name_or_json in MODELS:
        return read_config(MODELS[name_or_json], name_or_json)
    try:
        raw = json.loads(name_or_json)
    except ValueError:
        known = ", ".join(MODELS)
        raise ValueError(f"Give one of {known}, or the text of a config.json.") from None
    return read_config(raw, "the config.json")


def num_parameters(config: ModelConfig) -> int:
    """Numbers in all weights; tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def kv_bytes_per_token(config: ModelConfig, kv_bits: float = 16) -> float:
    """Bytes of keys and values that one token keeps in all layers."""
    return config.kv_bytes_per_token * kv_bits / 16


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of weights, of the KV cache of all sequences, and of what the steps work in."""

    weights: float
    kv: float
    working: float

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.kv + self.working


def budget(
    config: ModelConfig, bits: float, sequences: int, context: int, working: float = GB
) -> MemoryBudget:
    """What so many sequences of so many tokens need, with KV at 2 bytes a number."""
    weights = num_parameters(config) * bits / 8
    return MemoryBudget(weights, kv_bytes_per_token(config) * sequences * context, working)


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """How many sequences of so many tokens fit: (memory - weights - working) / KV of one; or 0."""
    free = memory - working - num_parameters(config) * bits / 8
    return max(0, int(free // (kv_bytes_per_token(config) * context)))
