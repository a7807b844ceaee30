"""Answers to the exercises of chapter 41."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from minigen.model.layers import rms_norm, swiglu
from minigen.model.transformer import project_qkv
from minigen.parallel.sharding import PLAN, Split, module_of, span
from tests.answers import Answers


def shares_module_by_module(tensors: Any, config: Any, rank: int, num_ranks: int) -> Any:
    """Right, without PLAN."""
    rows = {"embed_tokens": "vocab", "lm_head": "vocab", "q_proj": "q_heads"}
    rows |= {"k_proj": "kv_heads", "v_proj": "kv_heads", "gate_proj": "ffn", "up_proj": "ffn"}
    columns = {"o_proj": "q_heads", "down_proj": "ffn"}
    made = dict(tensors)
    for name, tensor in tensors.items():
        module, kind = name.split(".")[-2:]
        if module in rows:
            own = span(config, rows[module], rank, num_ranks)
            made[name] = tensor.rows(own.start, own.stop)
        elif module in columns and kind == "weight":
            own = span(config, columns[module], rank, num_ranks)
            made[name] = tensor.columns(own.start, own.stop)
        elif module in columns and rank > 0:
            del made[name]
    return made


def shares_by_cutting_alike(tensors: Any, config: Any, rank: int, num_ranks: int) -> Any:
    """Right, written as one cut for each tensor."""

    def cut(name: str, tensor: Any) -> Any:
        if module_of(name) not in PLAN:
            return tensor
        split, axis = PLAN[module_of(name)]
        own = span(config, axis, rank, num_ranks)
        if split is Split.ROW and name.endswith(".bias"):
            return None if rank else tensor
        way = tensor.columns if split is Split.ROW else tensor.rows
        return way(own[0], own[-1] + 1)

    cuts = {name: cut(name, tensor) for name, tensor in tensors.items()}
    return {name: each for name, each in cuts.items() if each is not None}


def wrong_shares(name: str) -> Callable[..., Any]:
    def part(tensors: Any, config: Any, rank: int, num_ranks: int) -> Any:
        made: dict[str, Any] = {}
        for key, tensor in tensors.items():
            module, matrix = module_of(key), len(tensor.shape) == 2
            if module not in PLAN:
                if name != "norms on rank 0 only" or rank == 0:
                    made[key] = tensor
                if name == "norms forgotten":
                    del made[key]
                continue
            split, axis = PLAN[module]
            own = span(config, axis, rank, num_ranks)
            if name == "the next rank's":
                own = span(config, axis, (rank + 1) % num_ranks, num_ranks)
            if name == "KV heads cut evenly" and axis == "kv_heads":
                width = config.kv_heads * config.head_dim // num_ranks
                own = range(rank * width, (rank + 1) * width)
            if name == "the vocabulary cut short" and axis == "vocab":
                width = config.vocab_size // num_ranks
                own = range(rank * width, (rank + 1) * width)
            if name == "the vocabulary whole" and axis == "vocab":
                own = range(config.vocab_size)
            column = split is Split.COLUMN
            if name == "rows and columns exchanged" and matrix:
                column = not column
            if name == "all by rows" and matrix and not column:
                width = tensor.shape[0] // num_ranks
                own, column = range(rank * width, (rank + 1) * width), True
            if column:
                if matrix or name != "column biases whole":
                    made[key] = tensor.rows(own.start, own.stop)
                else:
                    made[key] = tensor
            elif matrix:
                made[key] = tensor.columns(own.start, own.stop)
            else:
                holders = {
                    "row biases everywhere": range(num_ranks),
                    "row biases nowhere": (),
                    "row biases on the last rank": (num_ranks - 1,),
                }
                if rank in holders.get(name, (0,)):
                    made[key] = tensor
            if name == "read at once" and key in made:
                made[key] = made[key].dequantize()
            if name == "copied" and key in made:
                made[key] = replace(made[key], data=made[key].data.clone())
        return None if name == "returns None" else made

    return part


WRONG_SHARES = [
    *("norms on rank 0 only", "norms forgotten", "the next rank's", "KV heads cut evenly"),
    *("the vocabulary cut short", "the vocabulary whole", "rows and columns exchanged"),
    *("all by rows", "column biases whole", "row biases everywhere", "row biases nowhere"),
    *("row biases on the last rank", "read at once", "copied", "returns None"),
]


def layer_with_x_from_rank_0(
    layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
) -> torch.Tensor:
    """Right: one rank adds x, and the all-reduce sends it to all ranks."""

    def once(y: torch.Tensor) -> torch.Tensor:
        return y if comm.rank == 0 else torch.zeros_like(y)

    ready = rms_norm(x, layer.attention_norm, eps)
    mixed = attend(*project_qkv(layer, ready, rotation, head_dim, eps))
    x = comm.all_reduce(once(x) + layer.out(mixed.reshape(len(x), -1)))
    both = layer.gate_up(rms_norm(x, layer.ffn_norm, eps))
    gate, up = both[:, : layer.gate_up.parts[0]], both[:, layer.gate_up.parts[0] :]
    return comm.all_reduce(once(x) + layer.down(swiglu(gate, up)))


def wrong_split(name: str) -> Callable[..., Any]:
    def part(
        layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
    ) -> Any:
        ready = rms_norm(x, layer.attention_norm, eps)
        if name == "a message more":
            ready = comm.all_reduce(ready) / comm.num_ranks
        q, k, v = project_qkv(layer, ready, rotation, head_dim, eps)
        mixed = attend(q, k, v).flatten(-2)
        if name == "heads summed before out":
            mixed = comm.all_reduce(mixed)
        out = layer.out(mixed)
        if name not in ("only the feed-forward summed", "heads summed before out", "no message"):
            if name == "attention gathered":
                out = comm.all_gather(out)[:, : out.shape[-1]]
            elif name == "rank 0's attention":
                out = comm.broadcast(out)
            elif name == "the mean":
                out = comm.all_reduce(out) / comm.num_ranks
            elif name == "x summed too":
                out = comm.all_reduce(x + out) - x
            elif name == "one rank alone sends":
                out = comm.all_reduce(out) if comm.rank == 0 else out
            elif name == "the sum thrown away":
                comm.all_reduce(out.clone())
            elif name != "one message at the end":
                out = comm.all_reduce(out)
        if name == "in place":
            x += out
            after = x
        else:
            after = x + out
        both = layer.gate_up(rms_norm(after, layer.ffn_norm, eps))
        gate, up = both.split(layer.gate_up.parts, dim=-1)
        if name == "gate and up summed":
            gate, up = comm.all_reduce(gate.clone()), comm.all_reduce(up.clone())
        down = layer.down(swiglu(gate, up))
        if name == "one message at the end":
            return x + comm.all_reduce(out + down)
        if name in ("only attention summed", "gate and up summed", "no message"):
            return after + down
        if name == "the residual forgotten":
            return comm.all_reduce(down)
        return after + comm.all_reduce(down)

    return part


WRONG_SPLITS = [
    *("a message more", "heads summed before out", "only the feed-forward summed", "no message"),
    *("attention gathered", "rank 0's attention", "the mean", "x summed too"),
    *("one rank alone sends", "the sum thrown away", "one message at the end", "in place"),
    *("gate and up summed", "only attention summed", "the residual forgotten"),
]


ANSWERS = {
    "shard_tensors": Answers(
        right=(shares_module_by_module, shares_by_cutting_alike, wrong_shares("nothing")),
        wrong={name: wrong_shares(name) for name in WRONG_SHARES},
        equivalent={},
    ),
    "run_split_layer": Answers(
        right=(layer_with_x_from_rank_0, wrong_split("nothing")),
        wrong={name: wrong_split(name) for name in WRONG_SPLITS},
        equivalent={},
    ),
}
