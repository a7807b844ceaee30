"""Cases of chapter 41's exercises, drawn by a seed."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import WorkerError
from minigen.model.attention import attention
from minigen.model.layers import rotary_frequencies, rotary_tables
from minigen.parallel.comm import Comm, TracedComm, run_ranks
from minigen.trace.events import Event, Trace
from minigen_course.ch41_tensor_parallel.exercises import CONFIG, shard_of
from minigen_course.ch41_tensor_parallel.lesson import LINKS
from minigen_course.grading.exercise import Wrong, expect
from minigen_course.grading.varied import Varied, normal
from minigen_course.lab.small_model import HEAD_DIM, HIDDEN, random_layer

SECONDS = 2.0  # that a rank waits for the others

LAYER_RANKS = 2

CHANGED = "x was changed in place; return a new tensor instead."


def _on_ranks(num_ranks: int, work: Callable[[Comm], Any]) -> list[Any]:
    """Run work on ranks; raise `Wrong` if some wait for messages that never come."""
    try:
        return run_ranks(num_ranks, work, SECONDS)
    except WorkerError as error:
        raise Wrong(f"{error} All ranks should send the same messages in the same order.") from None


def _choose_all_reduce(random: Random) -> dict[str, Any]:
    link = random.choice(list(LINKS.values()))
    return {
        "num_bytes": random.choice((0, 2_000, 50_000, 500_000, 4_000_000, 30_000_000)),
        "num_ranks": random.choice((1, 2, 3, 4, 5, 6, 8, 12, 16)),
        "latency": link.latency,
        "bandwidth": link.bandwidth,
    }


def _chosen(
    part: Any, num_bytes: int, num_ranks: int, latency: float, bandwidth: float
) -> list[Any]:
    """Choose a way, and give its time in microseconds."""
    found = part(num_bytes, num_ranks, latency, bandwidth)
    pair = isinstance(found, tuple | list) and len(found) == 2
    expect(pair, f"got {found!r}; return the pair of a word and seconds.")
    return [found[0], 1e6 * found[1]]


def _ring_all_reduce(random: Random) -> dict[str, Any]:
    num_ranks, piece = random.choice(((2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (5, 1)))
    width = num_ranks * piece
    return {"numbers": [[random.randint(1, 99) for _ in range(width)] for _ in range(num_ranks)]}


def _summed(part: Any, numbers: list[list[int]]) -> Any:
    """Add up float32 tensors of these numbers, one for each rank, and count each rank's messages.

    The ranks are threads. A message must have an n-th of the numbers, and x must stay as it is.
    """
    num_ranks, piece = len(numbers), len(numbers[0]) // len(numbers)
    sent = [0] * num_ranks

    def work(comm: Comm) -> Any:
        def pass_on(given: Tensor) -> Tensor:
            fits = isinstance(given, Tensor) and list(given.shape) == [piece]
            expect(fits, f"a message should be a tensor of {piece} numbers, an n-th of x.")
            sent[comm.rank] += 1
            return comm.all_gather(given.clone()).chunk(num_ranks)[comm.rank - 1]

        x = torch.tensor(numbers[comm.rank], dtype=torch.float32)
        given = x.clone()
        found = part(given, comm.rank, num_ranks, pass_on)
        expect(torch.equal(given, x), CHANGED)
        return found

    return {"sums": _on_ranks(num_ranks, work), "messages": sent}


def _fused_rows(random: Random) -> dict[str, Any]:
    num_ranks = random.choice((2, 3, 4))
    parts = [num_ranks * random.randint(2, 5) for _ in range(random.randint(2, 4))]
    return {"parts": parts, "rank": random.randrange(num_ranks), "num_ranks": num_ranks}


def _shard_tensors(random: Random) -> dict[str, Any]:
    choices = ((2, 2, 1), (2, 2, 2), (2, 4, 2), (3, 3, 1), (3, 3, 3), (4, 4, 2))
    num_ranks, q_heads, kv_heads = random.choice(choices)
    hidden, head_dim, ffn = 2, 2, num_ranks * random.randint(1, 2)
    vocab = num_ranks * random.randint(2, 3) - 1
    prefix = f"model.layers.{random.randrange(30)}."
    outputs = {"q": q_heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    columns = {f"{prefix}self_attn.{each}_proj": rows for each, rows in outputs.items()}
    columns |= {f"{prefix}mlp.gate_proj": ffn, f"{prefix}mlp.up_proj": ffn}
    rows = {f"{prefix}self_attn.o_proj": q_heads * head_dim, f"{prefix}mlp.down_proj": ffn}
    norms = (f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm", "model.norm")
    module, width = random.choice(list(columns.items()))
    summed, inputs = random.choice(list(rows.items()))
    vocabulary = random.choice(("model.embed_tokens", "lm_head"))
    bias = random.choice((True, False))
    shapes: dict[str, list[int]] = {
        f"{vocabulary}.weight": [vocab, hidden],
        f"{module}.{'weight' if bias else 'bias'}": [width, hidden] if bias else [width],
        f"{summed}.{'bias' if bias else 'weight'}": [hidden] if bias else [hidden, inputs],
        f"{random.choice(norms)}.weight": [hidden],
    }
    return {
        "shapes": shapes,
        "sizes": {
            "hidden": hidden,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn": ffn,
            "vocab_size": vocab,
        },
        "rank": random.randrange(num_ranks),
        "num_ranks": num_ranks,
    }


def _shares(
    part: Any, shapes: dict[str, list[int]], sizes: dict[str, Any], rank: int, num_ranks: int
) -> Any:
    """Cut tensors of these shapes, whose elements are 0, 1, 2 and so on, and read the rank's parts.

    The config has these sizes.
    """
    stored = {name: _stored(name, shape) for name, shape in shapes.items()}
    found = part(stored, replace(CONFIG, **sizes), rank, num_ranks)
    expect(isinstance(found, dict), f"returned {type(found).__name__}; return a dictionary.")
    for name, share in found.items():
        what = f"{name} is a {type(share).__name__}; it should be a StoredTensor."
        expect(isinstance(share, StoredTensor), what)
    return {name: share.dequantize() for name, share in found.items()}


def _stored(name: str, shape: list[int]) -> StoredTensor:
    numbers = torch.arange(math.prod(shape), dtype=torch.float32)
    rows = shape[0] if len(shape) == 2 else 1
    return StoredTensor(name, "F32", tuple(shape), numbers.view(rows, -1).view(torch.uint8))


def _layer(random: Random) -> dict[str, Any]:
    return {
        "x": normal(random, random.randint(3, 9), HIDDEN),
        "norm_eps": random.choice((0.05, 0.2, 0.5)),
    }


def _layer_run(part: Any, x: Tensor, norm_eps: float) -> Any:
    """Run `random_layer()` of `minigen_course.lab.small_model` on two ranks; list their messages.

    A rank has its `shard_of` the layer, of `minigen_course.ch41_tensor_parallel.exercises`. A
    message is shown as its kind and its bytes. x must stay as it is.
    """
    rotation = rotary_tables(rotary_frequencies(HEAD_DIM, 100.0), torch.arange(len(x)))
    sent: dict[int, list[Event]] = {rank: [] for rank in range(LAYER_RANKS)}

    def work(comm: Comm) -> Any:
        trace, shard = Trace(), shard_of(random_layer(), comm.rank, LAYER_RANKS)
        trace.subscribe(sent[comm.rank].append)
        given, traced = x.clone(), TracedComm(comm, trace)
        found = part(shard, given, rotation, attention, HEAD_DIM, norm_eps, traced)
        expect(torch.equal(given, x), CHANGED)
        return found

    results = _on_ranks(LAYER_RANKS, work)
    messages = [[(each.kind.value, each.counts["bytes"]) for each in own] for own in sent.values()]
    return {"messages": messages, "results": results}


VARIED = {
    "choose_all_reduce": Varied(
        "bytes, ranks, latency, bandwidth", _choose_all_reduce, _chosen, num_cases=12
    ),
    "ring_all_reduce": Varied("ranks, and the numbers of each", _ring_all_reduce, _summed),
    "fused_rows": Varied("matrices, their rows, rank, number of ranks", _fused_rows),
    "shard_tensors": Varied(
        "tensors, heads, ffn, vocabulary, rank, number of ranks",
        _shard_tensors,
        _shares,
        num_cases=8,
    ),
    "run_split_layer": Varied("x, number of tokens, eps of the norms", _layer, _layer_run),
    "run_parallel_layer": Varied("x, number of tokens, eps of the norms", _layer, _layer_run),
}
