"""Predictions from sizes alone: the time of a decode step and of a prompt, and the ridge's batch.

Source: Williams, Waterman and Patterson 2009, "Roofline". The step-time model of the course,
`minigen_course.lab.cost_model`, computes the same for a `ModelShape` and a `Machine`.
"""

import math

from minigen_course.lab.cost_model import MACHINES, SHAPES, decode_step


def compute_bound_batch(context: int) -> int | None:
    """Return the least batch at which decoding is compute-bound, or None if no batch is.

    The model is Llama-3-8B with weights and KV cache in bfloat16, the card is an L4, and each
    sequence has `context` tokens.
    """
    one = decode_step(SHAPES["Llama-3-8B"], 1, context, weight_bits=16)
    card = MACHINES["L4"]
    gained = one.flops / card.flops - one.kv_bytes / card.bandwidth  # per sequence, in seconds
    if gained <= 0:
        return None
    return math.ceil(one.weight_bytes / card.bandwidth / gained)


def step_seconds(
    *,
    weights: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time of one decode step in seconds.

    `weights` are the parameters that each token is multiplied with; each of `batch` sequences has
    `context` tokens. `bandwidth` is in bytes per second, `peak` in FLOPs per second, `overhead` in
    seconds.
    """
    num_bytes = weights * weight_bits / 8
    num_bytes += 2 * layers * kv_heads * head_dim * batch * context * kv_bits / 8
    operations = batch * (2 * weights + 4 * layers * q_heads * head_dim * context)
    return max(num_bytes / bandwidth, operations / peak) + overhead


def prefill_seconds(
    *,
    weights: float,
    head: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    prompt_tokens: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time to the first token of one prompt, in seconds.

    The whole prompt is one step, and only its last token is multiplied with the `head`, which is
    part of `weights`. Each token attends to itself and all before it. All keys and values are
    counted once as bytes. The other arguments are those of `step_seconds`.
    """
    num_bytes = weights * weight_bits / 8
    num_bytes += 2 * layers * kv_heads * head_dim * prompt_tokens * kv_bits / 8
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    operations = 2 * (weights - head) * prompt_tokens + 2 * head
    operations += 4 * layers * q_heads * head_dim * pairs
    return max(num_bytes / bandwidth, operations / peak) + overhead
