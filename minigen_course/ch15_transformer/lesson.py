"""What the lesson compares with: logits of transformers, layers left out, tiny models to port."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.config_json import read_config
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.transformer import (
    build_transformer,
    dense_linear,
    expected_tensors,
    run_layer,
)
from minigen_course.lab.inspect_model import perplexity, recorded_states, transformer_of

STORED = Path(__file__).with_name("transformers_logits.json")


@dataclass(frozen=True)
class StoredLogits:
    """Logits that the transformers library computed from the default model's own weights.

    `python -m tests.golden.make_logits` writes them, and tests/test_15_transformer.py compares them
    with the library that is installed.

    `logits` are those of the tokens `vocab_ids` after each token of `prompt`. `log_sum_exp` has the
    logarithm of the sum of the exponentials of all logits at each position, so that no logit is
    left out of the comparison.
    """

    prompt: str
    version: str
    token_ids: list[int]
    vocab_ids: Int64[Tensor, " stored"]
    logits: Float[Tensor, "tokens stored"]
    log_sum_exp: Float[Tensor, " tokens"]

    def difference(self, found: Float[Tensor, "tokens vocab"]) -> float:
        """Return the largest difference of any stored value from those of other logits."""
        stored = (found[:, self.vocab_ids] - self.logits).abs().max()
        return max(float(stored), float((found.logsumexp(-1) - self.log_sum_exp).abs().max()))


def stored_logits() -> StoredLogits:
    """Read the stored logits."""
    found = json.loads(STORED.read_text(encoding="utf-8"))
    return StoredLogits(
        prompt=found["prompt"],
        version=found["version"],
        token_ids=found["token_ids"],
        vocab_ids=torch.tensor(found["vocab_ids"]),
        logits=torch.tensor(found["logits"]),
        log_sum_exp=torch.tensor(found["log_sum_exp"]),
    )


@torch.inference_mode()
def perplexities_without_layers(llm: LLM, token_ids: Sequence[int]) -> list[float]:
    """Return the perplexity of a text for the model without layer 0, without layer 1, and so on.

    The hidden states before the missing layer are those of the whole model, so they are computed
    once.
    """
    model, ids = transformer_of(llm), torch.tensor(token_ids)
    attend = attend_packed([len(ids)], llm.config.sliding_windows)
    rotation = model.rotation(torch.arange(len(ids)))
    found = []
    for left_out, x in enumerate(recorded_states(llm, token_ids)[:-1]):
        for layer_id in range(left_out + 1, len(model.layers)):
            in_layer = partial(attend, layer_id)
            layer = model.layers[layer_id]
            x = run_layer(layer, x, rotation, in_layer, model.head_dim, model.norm_eps)
        logs = model.logits(x[:-1]).log_softmax(-1)
        found.append(perplexity(logs.gather(-1, ids[1:, None])[:, 0]))
    return found


@dataclass(frozen=True)
class TinyModel:
    """A small model with random weights, and the package's own forward pass to compare with."""

    config: ModelConfig
    weights: dict[str, Tensor]

    def logits(self, token_ids: Sequence[int]) -> Float[Tensor, "tokens vocab"]:
        """Return the logits after each token, computed by the package's transformer."""
        stored = {name: _stored(name, tensor) for name, tensor in self.weights.items()}
        make_linear = dense_linear(torch.float32)
        model = build_transformer(self.config, stored, torch.float32, make_linear)
        attend = attend_packed([len(token_ids)], self.config.sliding_windows)
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        return model.logits(hidden)


def flops_of_onednn() -> dict[Any, Callable[..., int]]:
    """Return a `custom_mapping` for torch's `FlopCounterMode`.

    The engine's float32 products are oneDNN's on some processors, and torch counts none for these.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return {}

    def linear(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    return {torch.ops.mkldnn._linear_pointwise: linear}


def tiny_model(family: str, **changes: Any) -> TinyModel:
    """Return a random model of a family ("llama", "qwen2", "qwen3", "mistral"), always the same.

    `changes` replace entries of its config.json. Norms and biases are random, too, so that a
    forgotten one changes the logits.
    """
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 53,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 0.05,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    config = read_config(raw | changes, f"a tiny {family} model")
    generator = torch.Generator().manual_seed(15)
    weights = {}
    for name, shape in expected_tensors(config).items():
        drawn = torch.randn(*shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        weights[name] = drawn.abs() + 0.5 if is_norm else drawn / math.sqrt(shape[-1])
    return TinyModel(config, weights)


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    rows = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
    return StoredTensor(name, "F32", tuple(tensor.shape), rows.contiguous().view(torch.uint8))
