"""Answers to the exercises of chapter 15."""

from collections.abc import Callable
from typing import Any

import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.model.attention import attention_naive
from minigen.model.layers import (
    apply_rotary,
    apply_rotary_interleaved,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)
from minigen.model.transformer import project_qkv
from minigen_course.ch15_transformer.reference import token_flops
from tests.answers import Answers


def flops_by_product(config: ModelConfig, context: int) -> int:
    """Right, and a sum over all products, each as rows x columns."""
    query, key = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    products = [(config.hidden, query), (config.hidden, key), (config.hidden, key)]
    products += [(query, config.hidden), (config.hidden, config.ffn), (config.hidden, config.ffn)]
    products += [(config.ffn, config.hidden)]
    products += [(config.head_dim, context), (context, config.head_dim)] * config.q_heads
    layer = sum(2 * rows * columns for rows, columns in products)
    return config.num_layers * layer + 2 * config.hidden * config.vocab_size


def wrong_flops(name: str) -> Callable[[ModelConfig, int], Any]:
    def part(config: ModelConfig, context: int) -> Any:
        query, key = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        if name == "queries as wide as hidden":
            query = config.hidden
        if name == "full heads for keys and values":
            key = query
        matrices = 2 * query + 2 * key
        if name == "no output matrix":
            matrices = query + 2 * key
        ffn = (2 if name == "two matrices in the feed-forward" else 3) * config.ffn
        head = config.vocab_size * config.hidden
        if name == "embedding multiplied too":
            head *= 2
        if name == "head forgotten":
            head = 0
        if name == "no embedding, tied":
            head = 0 if config.tied_embeddings else head
        per_flop = 1 if name == "a multiplication and an addition are one" else 2
        weights = config.num_layers * config.hidden * (matrices + ffn) + head
        seen = {"context without itself": context - 1, "square of the context": context**2}
        mixed = 4 * config.num_layers * query * seen.get(name, context)
        if name == "scores only":
            mixed //= 2
        if name == "KV heads attend":
            mixed = 4 * config.num_layers * key * context
        if name == "context of one layer":
            mixed //= config.num_layers
        if name == "no context":
            mixed = 0
        found = per_flop * weights + mixed
        return found / 1e9 if name == "in billions" else found

    return part


WRONG_FLOPS = [
    *("queries as wide as hidden", "full heads for keys and values", "no output matrix"),
    *("two matrices in the feed-forward", "embedding multiplied too", "head forgotten"),
    *("no embedding, tied", "a multiplication and an addition are one", "context without itself"),
    *("square of the context", "scores only", "KV heads attend", "context of one layer"),
    *("no context", "in billions"),
]


def prompt_by_formula(config: ModelConfig, num_tokens: int) -> int:
    """Right, and without a sum: the contexts 1 to n add up to n (n + 1) / 2."""
    head = 2 * config.vocab_size * config.hidden
    per_seen = 4 * config.num_layers * config.q_heads * config.head_dim
    without_context = token_flops(config, 0) - head
    pairs = num_tokens * (num_tokens + 1) // 2
    return num_tokens * without_context + per_seen * pairs + head


def prompt_by_loop(config: ModelConfig, num_tokens: int) -> int:
    """Right, and token by token."""
    found = 0
    for position in range(num_tokens):
        found += token_flops(config, position + 1)
        if position + 1 < num_tokens:
            found -= 2 * config.vocab_size * config.hidden
    return found


def wrong_prompt(name: str) -> Callable[[ModelConfig, int], Any]:
    def part(config: ModelConfig, num_tokens: int) -> Any:
        head = 2 * config.vocab_size * config.hidden
        right = prompt_by_formula(config, num_tokens)
        per_seen = token_flops(config, 1) - token_flops(config, 0)
        wrong = {
            "the whole square": num_tokens * (token_flops(config, num_tokens) - head) + head,
            "logits for every token": right + (num_tokens - 1) * head,
            "no logits": right - head,
            "not itself": right - num_tokens * per_seen,
            "one token too far": right + num_tokens * per_seen,
            "one token": token_flops(config, num_tokens),
            "no context": num_tokens * (token_flops(config, 0) - head) + head,
            "half a square, rounded": right - per_seen * (num_tokens // 2),
            "the last token forgotten": right - token_flops(config, num_tokens) + head,
        }
        return wrong[name] if name in wrong else float(right)

    return part


WRONG_PROMPTS = [
    *("the whole square", "logits for every token", "no logits", "not itself"),
    *("one token too far", "one token", "no context", "half a square, rounded"),
    *("the last token forgotten", "a float"),
]


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


def parallel_written_out(
    layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, norm_eps: float
) -> torch.Tensor:
    """Right, with the feed-forward network first."""
    ready = rms_norm(x, layer.attention_norm, norm_eps)
    both = layer.gate_up(ready)
    width = layer.gate_up.parts[0]
    gate, up = both[:, :width], both[:, width:]
    added = layer.down(gate * torch.sigmoid(gate) * up)
    q, k, v = project_qkv(layer, ready, rotation, head_dim, norm_eps)
    return added + layer.out(attend(q, k, v).reshape(len(x), -1)) + x


def wrong_parallel(name: str) -> Callable[..., Any]:
    def part(layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float) -> Any:
        if name == "one after the other":
            return wrong_layer("nothing")(layer, x, rotation, attend, head_dim, eps)
        eps = 1e-6 if name == "own epsilon" else eps
        weight = layer.ffn_norm if name == "the other norm" else layer.attention_norm
        ready = x if name == "norm forgotten" else rms_norm(x, weight, eps)
        q, k, v = project_qkv(layer, ready, rotation, head_dim, eps)
        if name == "keys and values exchanged":
            k, v = v, k
        added = layer.out(attend(q, k, v).flatten(-2))
        read = rms_norm(x, layer.ffn_norm, eps) if name == "two norms" else ready
        read = x if name == "feed-forward reads x" else read
        gate, up = layer.gate_up(read).split(layer.gate_up.parts, dim=-1)
        if name == "gate and up exchanged":
            gate, up = up, gate
        down = layer.down(swiglu(gate, up))
        if name == "residual forgotten":
            return added + down
        if name == "residual twice":
            return (x + added) + (x + down)
        if name == "residual of the normalised":
            return ready + added + down
        return x + added if name == "feed-forward forgotten" else x + added + down

    return part


WRONG_PARALLEL = [
    *("one after the other", "own epsilon", "the other norm", "norm forgotten"),
    *("keys and values exchanged", "two norms", "feed-forward reads x", "gate and up exchanged"),
    *("residual forgotten", "residual twice", "residual of the normalised"),
    "feed-forward forgotten",
]


def port(name: str) -> Callable[..., Any]:
    """Return a Qwen3 with the mistake `name`, or a right one, written with loops over heads."""

    def part(config: ModelConfig, weights: Any, token_ids: list[int]) -> Any:
        theta = 10_000.0 if name == "usual theta" else config.rope_theta
        eps = 1e-6 if name == "usual epsilon" else config.norm_eps
        positions = torch.arange(len(token_ids))
        if name == "positions reversed":
            positions = positions.flip(0)
        tables = rotary_tables(rotary_frequencies(config.head_dim, theta), positions)
        rotate = apply_rotary_interleaved if name == "other pairing" else apply_rotary

        def heads(x: torch.Tensor, layer: str, part: str) -> torch.Tensor:
            y = x @ weights[f"{layer}.self_attn.{part}_proj.weight"].T
            cut = torch.stack(y.split(config.head_dim, dim=-1), dim=1)
            if part == "v" and name != "values normalised":
                return cut
            own = "k" if part == "v" or (name == "norms exchanged" and part == "q") else part
            own = "q" if name == "norms exchanged" and part == "k" else own
            scale = weights[f"{layer}.self_attn.{own}_norm.weight"]
            if name == "norm after the rotation":
                return rms_norm(rotate(cut, *tables), scale, eps)
            if name == "norm over all heads":
                wide = rms_norm(y, scale.repeat(cut.shape[1]), eps)
                cut = torch.stack(wide.split(config.head_dim, dim=-1), dim=1)
            elif name != "norm forgotten":
                cut = rms_norm(cut, scale, eps)
            return cut if part == "v" else rotate(cut, *tables)

        x = weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        last = config.num_layers - (name == "last layer forgotten")
        for layer in (f"model.layers.{layer_id}" for layer_id in range(last)):
            ready = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
            q, k, v = (heads(ready, layer, part) for part in "qkv")
            mixed = attention_naive(q, k, v)
            if name == "no mask":
                mixed = attention_naive(q.flip(0), k.flip(0), v.flip(0)).flip(0)
            x = x + mixed.flatten(-2) @ weights[f"{layer}.self_attn.o_proj.weight"].T
            ready = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
            gate, up = (ready @ weights[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + swiglu(gate, up) @ weights[f"{layer}.mlp.down_proj.weight"].T
        if name != "last norm forgotten":
            x = rms_norm(x, weights["model.norm.weight"], eps)
        is_tied = config.tied_embeddings or name == "always tied"
        head = "lm_head" if not is_tied or name == "never tied" else "model.embed_tokens"
        logits = x @ weights[f"{head}.weight"].T
        return logits[-1] if name == "last token only" else logits

    return part


def qwen3_by_layers(config: ModelConfig, weights: Any, token_ids: list[int]) -> torch.Tensor:
    """Right, and with one layer as a function of its own tensors."""
    tables = rotary_tables(
        rotary_frequencies(config.head_dim, config.rope_theta), torch.arange(len(token_ids))
    )

    def layer(x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
        y = rms_norm(x, own["input_layernorm"], config.norm_eps)
        made = {}
        for each in "qkv":
            made[each] = (y @ own[f"self_attn.{each}_proj"].T).reshape(len(x), -1, config.head_dim)
        for each in "qk":
            scaled = rms_norm(made[each], own[f"self_attn.{each}_norm"], config.norm_eps)
            made[each] = apply_rotary(scaled, *tables)
        x = x + attention_naive(**made).reshape(len(x), -1) @ own["self_attn.o_proj"].T
        y = rms_norm(x, own["post_attention_layernorm"], config.norm_eps)
        hidden = swiglu(y @ own["mlp.gate_proj"].T, y @ own["mlp.up_proj"].T)
        return x + hidden @ own["mlp.down_proj"].T

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer_id in range(config.num_layers):
        prefix = f"model.layers.{layer_id}."
        names = [name for name in weights if name.startswith(prefix)]
        x = layer(
            x, {name.removeprefix(prefix).removesuffix(".weight"): weights[name] for name in names}
        )
    table = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return rms_norm(x, weights["model.norm.weight"], config.norm_eps) @ table.T


WRONG_PORTS = [
    *("usual theta", "usual epsilon", "positions reversed", "other pairing", "values normalised"),
    *("norms exchanged", "norm after the rotation", "norm over all heads", "norm forgotten"),
    *("last layer forgotten", "no mask", "last norm forgotten", "always tied", "never tied"),
    "last token only",
]


ANSWERS = {
    "token_flops": Answers(
        right=(flops_by_product, wrong_flops("nothing")),
        wrong={name: wrong_flops(name) for name in WRONG_FLOPS},
        equivalent={},
    ),
    "prompt_flops": Answers(
        right=(prompt_by_formula, prompt_by_loop),
        wrong={name: wrong_prompt(name) for name in WRONG_PROMPTS},
        equivalent={},
    ),
    "run_layer": Answers(
        right=(layer_written_out, wrong_layer("nothing")),
        wrong={name: wrong_layer(name) for name in WRONG_LAYERS},
        equivalent={},
    ),
    "run_parallel_layer": Answers(
        right=(parallel_written_out, wrong_parallel("nothing")),
        wrong={name: wrong_parallel(name) for name in WRONG_PARALLEL},
        equivalent={},
    ),
    "project_qkv": Answers(
        right=(heads_by_slicing, wrong_heads("nothing")),
        wrong={name: wrong_heads(name) for name in WRONG_HEADS},
        equivalent={},
    ),
    "qwen3_logits": Answers(
        right=(qwen3_by_layers, port("nothing")),
        wrong={name: port(name) for name in WRONG_PORTS},
        equivalent={},
    ),
}
