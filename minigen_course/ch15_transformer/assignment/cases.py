"""Cases of chapter 15's exercises, drawn by a seed."""

from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.model.attention import attention
from minigen.model.layers import rotary_frequencies, rotary_tables
from minigen_course.ch15_transformer.lesson import tiny_model
from minigen_course.grading.varied import Varied, normal
from minigen_course.lab.cost_model import config_of
from minigen_course.lab.small_model import HEAD_DIM, HIDDEN, random_layer

THETA, TOKENS, VOCAB = 100.0, 2, 7


def _sizes(random: Random) -> dict[str, Any]:
    """Return the sizes of a model, all of them different, so that none can stand for another."""
    kv_heads = random.choice((2, 3))
    hidden, head_dim, ffn, vocab_size = random.sample(range(5, 30), 4)
    return {
        "hidden": hidden,
        "num_layers": random.choice((4, 6)),
        "q_heads": kv_heads * random.choice((2, 3)),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab_size": vocab_size,
        "tied_embeddings": random.random() < 0.5,
    }


def _config(sizes: dict[str, Any]) -> ModelConfig:
    windows = (None,) * sizes["num_layers"]
    return replace(config_of("SmolLM2-135M"), sliding_windows=windows, **sizes)


def _token_flops(random: Random) -> dict[str, Any]:
    return _sizes(random) | {"context": random.randint(2, 40)}


def _of_token(part: Any, context: int, **sizes: Any) -> Any:
    """Give the part a `config` with these sizes, and the context."""
    return part(_config(sizes), context)


def _prompt_flops(random: Random) -> dict[str, Any]:
    return _sizes(random) | {"num_tokens": random.randint(3, 20)}


def _of_prompt(part: Any, num_tokens: int, **sizes: Any) -> Any:
    """Give the part a `config` with these sizes, and the number of tokens."""
    return part(_config(sizes), num_tokens)


def _layer(random: Random) -> dict[str, Any]:
    return {
        "x": (10 * normal(random, TOKENS, HIDDEN)).round() / 10 + 0.0,  # no -0
        "first_position": random.randint(1, 9),
        "norm_eps": random.choice((0.02, 0.1, 0.5)),
        "head_norms": random.random() < 0.5,
    }


def _rotation(first_position: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(first_position, first_position + TOKENS)
    return rotary_tables(rotary_frequencies(HEAD_DIM, THETA), positions)


def _added(
    part: Any, x: Tensor, first_position: int, norm_eps: float, head_norms: bool
) -> list[Any]:
    """Run the part on `random_layer(head_norms)` of `minigen_course.lab.small_model`.

    The tokens of `x` follow each other from `first_position` on, the theta of the rotation is 100,
    and `attend` is causal attention. The result has the new x, whether the old x is as it was, and
    how often `attend` was called.
    """
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q)
        return attention(q, k, v)

    before = x.clone()
    rotation = _rotation(first_position)
    found = part(random_layer(head_norms), x, rotation, attend, HEAD_DIM, norm_eps)
    return [found, torch.equal(x, before), len(calls)]


def _projected(
    part: Any, x: Tensor, first_position: int, norm_eps: float, head_norms: bool
) -> list[Tensor]:
    """Run the part on `random_layer(head_norms)` of `minigen_course.lab.small_model`.

    The tokens of `x` follow each other from `first_position` on, and the theta of the rotation is
    100. The result has queries, keys and values.
    """
    q, k, v = part(random_layer(head_norms), x, _rotation(first_position), HEAD_DIM, norm_eps)
    return [q, k, v]


def _port(random: Random) -> dict[str, Any]:
    return {
        "token_ids": random.sample(range(VOCAB), 3),
        "num_hidden_layers": random.choice((1, 2, 3)),
        "hidden_size": random.choice((10, 14, 20)),
        "num_key_value_heads": random.choice((1, 2)),
        "head_dim": random.choice((4, 6)),
        "rms_norm_eps": random.choice((0.02, 0.1, 0.5)),
        "rope_theta": random.choice((10.0, 50.0, 1000.0)),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _ported(part: Any, token_ids: list[int], **changes: Any) -> Any:
    """Run the part on `tiny_model("qwen3", vocab_size=7, ...)` of the chapter's `lesson`.

    The further arguments of `tiny_model` are shown here, after the token ids.
    """
    tiny = tiny_model("qwen3", vocab_size=VOCAB, **changes)
    return part(tiny.config, tiny.weights, token_ids)


VARIED = {
    "token_flops": Varied("all sizes of the model, and the context", _token_flops, _of_token),
    "prompt_flops": Varied("all sizes of the model, tokens", _prompt_flops, _of_prompt),
    "run_layer": Varied("x, positions, epsilon, norms of the heads", _layer, _added),
    "run_parallel_layer": Varied("x, positions, epsilon, norms of the heads", _layer, _added),
    "project_qkv": Varied("x, positions, epsilon, norms of the heads", _layer, _projected),
    "qwen3_logits": Varied("text, sizes, epsilon, theta, tied or not", _port, _ported),
}
