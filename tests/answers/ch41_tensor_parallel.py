"""Answers to the exercises of chapter 41."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from minigen.model.layers import rms_norm, swiglu
from minigen.model.transformer import project_qkv
from minigen.parallel.sharding import PLAN, Split, module_of, span
from tests.answers import Answers


def way_by_sorting(num_bytes: float, n: int, latency: float, bandwidth: float) -> Any:
    """Right, by the minimum of two pairs; "ring" comes first in the alphabet."""
    levels, all_bytes = (n - 1).bit_length(), num_bytes / bandwidth
    ring = 2 * (n - 1) * latency + 2 * (n - 1) / n * all_bytes
    return min([("ring", ring), ("tree", 2 * levels * (latency + all_bytes))], key=lambda w: w[1])


def way_by_branches(num_bytes: float, num_ranks: int, latency: float, bandwidth: float) -> Any:
    """Right, as a list, with few ranks apart."""
    if num_ranks == 1:
        return ["ring", 0]
    ring = (latency + num_bytes / (num_ranks * bandwidth)) * (num_ranks - 1)
    tree = (latency + num_bytes / bandwidth) * math.ceil(math.log2(num_ranks))
    return ["ring", 2 * ring] if ring <= tree else ["tree", 2 * tree]


def wrong_way(name: str) -> Callable[..., Any]:
    def part(num_bytes: float, n: int, latency: float, bandwidth: float) -> Any:
        levels: float = math.ceil(math.log2(n))
        if name == "levels rounded down":
            levels = int(math.log2(n))
        if name == "levels not rounded":
            levels = math.log2(n)
        turns, moved = 2 * (n - 1), num_bytes / n
        if name == "half of the ring":
            turns = n - 1
        if name == "a turn for each rank":
            turns = 2 * n
        if name == "all bytes in the ring":
            moved = num_bytes
        ring = turns * (latency + moved / bandwidth)
        down = 1 if name == "the tree upwards only" else 2
        in_tree = num_bytes / n if name == "the tree by pieces" else num_bytes
        tree = down * levels * (latency + in_tree / bandwidth)
        if name == "latency once":
            ring = latency + turns * moved / bandwidth
        if name == "bytes times bandwidth":
            ring = turns * (latency + moved * bandwidth)
        if name == "the tree in doubt":
            return ("tree", tree) if tree <= ring else ("ring", ring)
        if name == "the slower one":
            return ("tree", tree) if tree > ring else ("ring", ring)
        if name == "always a ring":
            return ("ring", ring)
        found = ("tree", tree) if tree < ring else ("ring", ring)
        return found[1] if name == "seconds only" else found

    return part


WRONG_WAYS = [
    *("levels rounded down", "levels not rounded", "half of the ring", "a turn for each rank"),
    *("all bytes in the ring", "the tree upwards only", "the tree by pieces", "latency once"),
    *("bytes times bandwidth", "the tree in doubt", "the slower one", "always a ring"),
    "seconds only",
]


def ring_from_the_own_left(x: Any, rank: int, num_ranks: int, pass_on: Any) -> torch.Tensor:
    """Right: a rank starts with the piece before its own number, so it ends with its own."""
    table = x.clone().view(num_ranks, -1)
    for turn in range(1, num_ranks):
        sent = (rank - turn) % num_ranks
        table[(sent - 1) % num_ranks] += pass_on(table[sent].clone())
    for turn in range(num_ranks - 1):
        sent = (rank - turn) % num_ranks
        table[(sent - 1) % num_ranks] = pass_on(table[sent].clone())
    return table.flatten()


def ring_with_what_came(x: Any, rank: int, num_ranks: int, pass_on: Any) -> torch.Tensor:
    """Right: what came in one turn goes out in the next."""
    pieces, moving = dict(enumerate(x.chunk(num_ranks))), x.chunk(num_ranks)[rank]
    for place in range(rank - 1, rank - num_ranks, -1):
        moving = pass_on(moving) + pieces[place % num_ranks]
    for place in range(rank + 1, rank + 2 - num_ranks, -1):
        pieces[place % num_ranks] = moving
        moving = pass_on(moving)
    pieces[(rank + 2) % num_ranks] = moving
    return torch.cat([pieces[place] for place in range(num_ranks)])


def wrong_ring(name: str) -> Callable[..., Any]:
    def part(x: Any, rank: int, num_ranks: int, pass_on: Any) -> Any:
        if name == "all of x goes round":
            total, moving = x, x
            for _ in range(num_ranks - 1):
                moving = pass_on(moving)
                total = total + moving
            return total
        pieces = list(x.chunk(num_ranks))
        for turn in range(num_ranks - 1 + (name == "a turn too many")):
            received = pass_on(pieces[(rank - turn) % num_ranks])
            place = (rank - turn - 1) % num_ranks
            if name == "the wrong place":
                place = (rank - turn) % num_ranks
            if name == "the wrong direction":
                place = (rank - turn + 1) % num_ranks
            if name == "replaced too early":
                pieces[place] = received
            elif name == "in place":
                pieces[place] += received
            else:
                pieces[place] = pieces[place] + received
        if name == "no second half":
            return torch.cat(pieces)
        for turn in range(num_ranks - 1):
            begin = rank if name == "the second half from the own piece" else rank + 1
            received = pass_on(pieces[(begin - turn) % num_ranks])
            place = (begin - turn - 1) % num_ranks
            if name == "added twice":
                pieces[place] = pieces[place] + received
            else:
                pieces[place] = received
        if name == "the own piece only":
            return pieces[rank]
        if name == "the mean":
            return torch.cat(pieces) / num_ranks
        if name == "as a list":
            return torch.cat(pieces).tolist()
        return torch.cat(pieces[::-1]) if name == "backwards" else torch.cat(pieces)

    return part


WRONG_RINGS = [
    *("all of x goes round", "a turn too many", "the wrong place", "the wrong direction"),
    *("replaced too early", "in place", "no second half", "the second half from the own piece"),
    *("added twice", "the own piece only", "the mean", "as a list", "backwards"),
]


def rows_by_sums(parts: Any, rank: int, num_ranks: int) -> list[range]:
    """Right, with the first rows of all matrices at once."""
    firsts = [0, *accumulate(parts)][:-1]
    widths = [each // num_ranks for each in parts]
    starts = [first + rank * width for first, width in zip(firsts, widths, strict=True)]
    return [range(start, start + width) for start, width in zip(starts, widths, strict=True)]


def rows_by_slices(parts: Any, rank: int, num_ranks: int) -> list[range]:
    """Right, by slices of a range of all rows."""
    rows, found = range(sum(parts)), []
    for num_rows in parts:
        own, rows, share = rows[:num_rows], rows[num_rows:], num_rows // num_ranks
        found.append(own[rank * share :][:share])
    return found


def wrong_rows(name: str) -> Callable[..., Any]:
    def part(parts: Any, rank: int, num_ranks: int) -> Any:
        if name == "one cut through all":
            width = sum(parts) // num_ranks
            return [range(rank * width, (rank + 1) * width)]
        found, first = [], 0
        if name == "the next rank's":
            rank = (rank + 1) % num_ranks
        for num_rows in parts:
            width = num_rows // num_ranks
            if name == "all of the first's size":
                width = parts[0] // num_ranks
            start = first + rank * width
            if name == "every n-th row":
                found.append(range(first + rank, first + num_rows, num_ranks))
            elif name == "a row too many":
                found.append(range(start, start + width + 1))
            elif name == "a row too few":
                found.append(range(start, start + width - 1))
            elif name == "pairs of numbers":
                found.append((start, start + width))  # type: ignore[arg-type]
            else:
                found.append(range(start, start + width))
            if name == "within each matrix":
                continue
            first += width if name == "as stored on the rank" else num_rows
        if name == "the last one forgotten":
            return found[:-1]
        return found

    return part


WRONG_ROWS = [
    *("one cut through all", "the next rank's", "all of the first's size", "every n-th row"),
    *("a row too many", "a row too few", "pairs of numbers", "within each matrix"),
    *("as stored on the rank", "the last one forgotten"),
]


def parallel_layer_with_x_from_rank_0(
    layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
) -> torch.Tensor:
    """Right: one rank adds x, and the all-reduce sends it to all ranks."""
    ready = rms_norm(x, layer.attention_norm, eps)
    both = layer.gate_up(ready)
    gate, up = both[:, : layer.gate_up.parts[0]], both[:, layer.gate_up.parts[0] :]
    part = layer.down(swiglu(gate, up))
    mixed = attend(*project_qkv(layer, ready, rotation, head_dim, eps))
    part = part + layer.out(mixed.reshape(len(x), -1))
    return comm.all_reduce(x + part if comm.rank == 0 else part)


def wrong_parallel(name: str) -> Callable[..., Any]:
    def part(
        layer: Any, x: Any, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
    ) -> Any:
        ready = rms_norm(x, layer.attention_norm, eps)
        q, k, v = project_qkv(layer, ready, rotation, head_dim, eps)
        out = layer.out(attend(q, k, v).flatten(-2))
        read = ready
        if name == "the norm of the feed-forward":
            read = rms_norm(x, layer.ffn_norm, eps)
        elif name == "one after the other":
            read = rms_norm(x + out, layer.ffn_norm, eps)
        elif name == "x not normalised":
            read = x
        gate, up = layer.gate_up(read).split(layer.gate_up.parts, dim=-1)
        down = layer.down(swiglu(gate, up))
        if name == "two messages":
            return x + comm.all_reduce(out) + comm.all_reduce(down)
        if name == "no message":
            return x + out + down
        if name == "x summed too":
            return comm.all_reduce(x + out + down)
        if name == "x forgotten":
            return comm.all_reduce(out + down)
        if name == "attention not summed":
            return x + out + comm.all_reduce(down)
        if name == "the feed-forward not summed":
            return x + comm.all_reduce(out) + down
        if name == "the mean":
            return x + comm.all_reduce(out + down) / comm.num_ranks
        if name == "in place":
            x += comm.all_reduce(out + down)
            return x
        return x + comm.all_reduce(out + down)

    return part


WRONG_PARALLEL = [
    *("the norm of the feed-forward", "one after the other", "x not normalised", "two messages"),
    *("no message", "x summed too", "x forgotten", "attention not summed"),
    *("the feed-forward not summed", "the mean", "in place"),
]


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
    "choose_all_reduce": Answers(
        right=(way_by_sorting, way_by_branches, wrong_way("nothing")),
        wrong={name: wrong_way(name) for name in WRONG_WAYS},
        equivalent={},
    ),
    "ring_all_reduce": Answers(
        right=(ring_from_the_own_left, ring_with_what_came, wrong_ring("nothing")),
        wrong={name: wrong_ring(name) for name in WRONG_RINGS},
        equivalent={},
    ),
    "fused_rows": Answers(
        right=(rows_by_sums, rows_by_slices, wrong_rows("nothing")),
        wrong={name: wrong_rows(name) for name in WRONG_ROWS},
        equivalent={},
    ),
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
    "run_parallel_layer": Answers(
        right=(parallel_layer_with_x_from_rank_0, wrong_parallel("nothing")),
        wrong={name: wrong_parallel(name) for name in WRONG_PARALLEL},
        equivalent={},
    ),
}
