"""Answers to the exercises of chapter 15."""

from collections.abc import Callable
from typing import Any

import torch

from minigen.model.layers import apply_rotary, apply_rotary_interleaved, rms_norm, swiglu
from minigen.model.transformer import project_qkv
from tests.answers import Answers


def layer_written_out(
    layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, norm_eps: float
) -> torch.Tensor:
    """Right, and without any of the package's own functions but the heads."""

    def normalised(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + norm_eps).sqrt() * weight

    ready = normalised(x, layer.attention_norm)
    mixed = attend(*project_qkv(layer, ready, rotation, head_dim, norm_eps))
    after = layer.out(mixed.reshape(len(x), -1)) + x
    both = layer.gate_up(normalised(after, layer.ffn_norm))
    width = layer.gate_up.parts[0]
    gate = both[:, :width]
    return after + layer.down(gate * torch.sigmoid(gate) * both[:, width:])


def wrong_layer(name: str) -> Callable[..., torch.Tensor]:
    def part(layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float) -> Any:
        if name == "own epsilon":
            eps = 1e-6
        first, second = layer.attention_norm, layer.ffn_norm
        if name == "norms exchanged":
            first, second = second, first
        ready = x if name == "attention norm forgotten" else rms_norm(x, first, eps)
        q, k, v = project_qkv(layer, ready, rotation, head_dim, eps)
        if name == "rotated twice":
            q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
        if name == "keys and values exchanged":
            k, v = v, k
        mixed = attend(q, k, v)
        if name == "attention called twice":
            mixed = attend(q, k, v)
        flat = mixed.flatten(-2)
        if name == "heads interleaved":
            flat = mixed.transpose(-1, -2).flatten(-2)
        out = layer.out(flat)
        if name == "in place":
            x += out
            after = x
        elif name == "first residual forgotten":
            after = out
        elif name == "residual of the normalised":
            after = ready + out
        else:
            after = x + out
        read = x if name == "feed-forward reads the old x" else after
        read = read if name == "feed-forward norm forgotten" else rms_norm(read, second, eps)
        gate, up = layer.gate_up(read).split(layer.gate_up.parts, dim=-1)
        if name == "gate and up exchanged":
            gate, up = up, gate
        product = gate * up if name == "no silu" else swiglu(gate, up)
        if name == "silu of both":
            product = torch.nn.functional.silu(gate * up)
        down = layer.down(product)
        if name == "second residual forgotten":
            return down
        if name == "residual from the beginning":
            return x + down
        if name == "second residual of the normalised":
            return read + down
        if name == "norms after":
            return rms_norm(after + down, second, eps)
        if name == "returns None":
            return None
        return after + down

    return part


WRONG_LAYERS = [
    *("own epsilon", "norms exchanged", "attention norm forgotten", "rotated twice"),
    *("keys and values exchanged", "attention called twice", "heads interleaved", "in place"),
    *("first residual forgotten", "residual of the normalised", "feed-forward reads the old x"),
    *("feed-forward norm forgotten", "gate and up exchanged", "no silu", "silu of both"),
    *("second residual forgotten", "residual from the beginning"),
    *("second residual of the normalised", "norms after", "returns None"),
]


def heads_by_slicing(
    layer: Any, x: Any, rotation: Any, head_dim: int, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right, and cut by hand."""
    fused = layer.qkv(x)
    q_width, kv_width, _ = layer.qkv.parts
    made = []
    cuts = ((0, q_width), (q_width, kv_width), (q_width + kv_width, kv_width))
    norms = (layer.q_norm, layer.k_norm, None)
    for place, ((begin, width), norm) in enumerate(zip(cuts, norms, strict=True)):
        heads = fused[:, begin : begin + width].reshape(len(x), width // head_dim, head_dim)
        if norm is not None:
            heads = rms_norm(heads, norm, norm_eps)
        made.append(apply_rotary(heads, *rotation) if place < 2 else heads)
    return made[0], made[1], made[2]


def wrong_heads(name: str) -> Callable[..., Any]:
    def part(layer: Any, x: Any, rotation: Any, head_dim: int, eps: float) -> Any:
        fused = layer.qkv(x)
        parts = fused.split(layer.qkv.parts, dim=-1)
        if name == "parted equally":
            parts = fused.chunk(3, dim=-1)
        if name == "values before keys":
            parts = (parts[0], parts[2], parts[1])
        if name == "keys first":
            k_width, q_width, v_width = layer.qkv.parts[1], *layer.qkv.parts[::2]
            k, q, v = fused.split((k_width, q_width, v_width), dim=-1)
            parts = (q, k, v)
        shape = (-1, head_dim)
        q, k, v = (each.unflatten(-1, shape) for each in parts)
        if name == "numbers of heads interleaved":
            q, k, v = (each.unflatten(-1, (head_dim, -1)).transpose(-1, -2) for each in parts)
        if name == "heads before tokens":
            return (
                *(apply_rotary(each, *rotation).transpose(0, 1) for each in (q, k)),
                v.transpose(0, 1),
            )
        rotate = apply_rotary_interleaved if name == "other pairing" else apply_rotary
        if name == "rotation backwards":
            rotation = (rotation[0], -rotation[1])
        if name == "norms after the rotation":
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if layer.q_norm is not None and name != "norms forgotten":
            q_norm, k_norm = layer.q_norm, layer.k_norm
            if name == "norms exchanged":
                q_norm, k_norm = k_norm, q_norm
            own = 1e-6 if name == "own epsilon" else eps
            q, k = rms_norm(q, q_norm, own), rms_norm(k, k_norm, own)
        if name == "norms after the rotation":
            return q, k, v
        if name == "queries not rotated":
            return q, rotate(k, *rotation), v
        if name == "keys not rotated":
            return rotate(q, *rotation), k, v
        if name == "values rotated too":
            return tuple(rotate(each, *rotation) for each in (q, k, v))
        if name == "one tensor":
            return fused
        return rotate(q, *rotation), rotate(k, *rotation), v

    return part


WRONG_HEADS = [
    *("parted equally", "values before keys", "keys first", "numbers of heads interleaved"),
    *("heads before tokens", "other pairing", "rotation backwards", "norms after the rotation"),
    *("norms forgotten", "norms exchanged", "own epsilon", "queries not rotated"),
    *("keys not rotated", "values rotated too", "one tensor"),
]


ANSWERS = {
    "run_layer": Answers(
        right=(layer_written_out, wrong_layer("nothing")),
        wrong={name: wrong_layer(name) for name in WRONG_LAYERS},
        equivalent={},
    ),
    "project_qkv": Answers(
        right=(heads_by_slicing, wrong_heads("nothing")),
        wrong={name: wrong_heads(name) for name in WRONG_HEADS},
        equivalent={},
    ),
}
