"""What happens inside one forward pass: its states, its queries and keys, what it finds likely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.llm import LLM
from minigen.model.attention import attend_packed, causal_mask
from minigen.model.layers import apply_rotary
from minigen.model.transformer import run_layer
from minigen.teach.looking import transformer_of


@dataclass(frozen=True)
class HeadInputs:
    """What one layer's attention is given: queries and keys already turned, and values."""

    q: Float[Tensor, "tokens q_heads head_dim"]
    k: Float[Tensor, "tokens kv_heads head_dim"]
    v: Float[Tensor, "tokens kv_heads head_dim"]


@torch.inference_mode()
def log_probabilities(
    llm: LLM,
    token_ids: Sequence[int],
    positions: Int64[Tensor, " tokens"] | None = None,
    frequencies: Float[Tensor, " half"] | None = None,
) -> Float[Tensor, " followers"]:
    """How likely the model finds each token after the first, given those before it.

    `positions` are 0, 1, 2, ... and `frequencies` the model's own, unless others are given.
    """
    model = transformer_of(llm)
    if frequencies is not None:
        model = replace(model, frequencies=frequencies)
    if positions is None:
        positions = torch.arange(len(token_ids))
    ids = torch.tensor(token_ids)
    hidden = model(ids, positions, attend_packed([len(ids)], llm.config.sliding_windows))
    return model.logits(hidden[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def perplexity(log_probabilities: Float[Tensor, " followers"]) -> float:
    """Among how many equally likely tokens the model might as well have chosen, in the mean."""
    return math.exp(-float(log_probabilities.double().mean()))


@torch.inference_mode()
def recorded_states(llm: LLM, token_ids: Sequence[int]) -> Float[Tensor, "states tokens hidden"]:
    """The hidden states before the first layer, and after each one."""
    model, ids = transformer_of(llm), torch.tensor(token_ids)
    attend = attend_packed([len(ids)], llm.config.sliding_windows)
    rotation = model.rotation(torch.arange(len(ids)))
    states = [model.embed(ids)]
    for layer_id, layer in enumerate(model.layers):
        in_layer = partial(attend, layer_id)
        states.append(
            run_layer(layer, states[-1], rotation, in_layer, model.head_dim, model.norm_eps)
        )
    return torch.stack(states)


@torch.inference_mode()
def recorded_heads(llm: LLM, token_ids: Sequence[int]) -> tuple[HeadInputs, ...]:
    """Every layer's queries, keys and values, taken on the way by an `attend` that listens."""
    heads: list[HeadInputs] = []
    usual = attend_packed([len(token_ids)], llm.config.sliding_windows)

    def listening(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads.append(HeadInputs(q, k, v))
        return usual(layer_id, q, k, v)

    transformer_of(llm)(torch.tensor(token_ids), torch.arange(len(token_ids)), listening)
    return tuple(heads)


def turned_back(llm: LLM, heads: HeadInputs) -> HeadInputs:
    """The same queries and keys as they were before the rotation by their positions."""
    cos, sin = transformer_of(llm).rotation(torch.arange(len(heads.q)))
    return HeadInputs(apply_rotary(heads.q, cos, -sin), apply_rotary(heads.k, cos, -sin), heads.v)


def head_scores(heads: HeadInputs) -> Float[Tensor, "q_heads tokens tokens"]:
    """q k^T / sqrt(head_dim) of every head, minus infinity where a key is later than the query."""
    keys = heads.k.repeat_interleave(heads.q.shape[1] // heads.k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", heads.q, keys) / math.sqrt(heads.q.shape[-1])
    return scores.masked_fill(~causal_mask(len(keys), len(keys)), -math.inf)
