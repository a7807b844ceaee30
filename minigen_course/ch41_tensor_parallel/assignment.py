"""What may be assigned of chapter 41: cases by seed for its exercises, and questions."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import WorkerError
from minigen.model.attention import attention
from minigen.model.layers import rotary_frequencies, rotary_tables
from minigen.parallel.comm import Comm, TracedComm, run_ranks
from minigen.trace.events import Event, Trace
from minigen_course.ch41_tensor_parallel.exercises import CONFIG, shard_of
from minigen_course.ch41_tensor_parallel.lesson import LINKS, Link
from minigen_course.figures import style
from minigen_course.grading.exercise import Wrong, expect
from minigen_course.grading.question import Question, Written
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


def _eight_cards(random: Random) -> dict[str, Any]:
    return {
        "step_ms": random.choice((24, 28, 32, 36, 40)),
        "layers": random.choice((40, 48, 60, 80)),
        "ranks": random.choice((6, 8)),
        "message_us": random.choice((40, 50, 60, 80)),
    }


def _times_as_fast(step_ms: int, layers: int, ranks: int, message_us: int) -> float:
    return step_ms / (step_ms / ranks + (2 * layers + 1) * message_us / 1000)


def _prompt(random: Random) -> dict[str, Any]:
    return {
        "tokens": random.choice((500, 1000, 2000, 3000)),
        "hidden": random.choice((2048, 4096, 5120, 8192)),
        "ranks": random.choice((4, 5, 8)),
    }


def _sent_megabytes(tokens: int, hidden: int, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * tokens * hidden * 2 / 1e6


def _pipeline(random: Random) -> dict[str, Any]:
    return {"stages": random.choice((4, 6, 8, 12)), "percent": random.choice((4, 5, 10, 20))}


def _micro_batches(stages: int, percent: int) -> float:
    return -(-(stages - 1) * (100 - percent) // percent)


def _measured_ring(random: Random) -> dict[str, Any]:
    return {
        "ranks": random.choice((4, 5, 6, 8)),
        "latency_us": random.choice((8, 10, 12, 15, 18, 24)),
        "gigabytes": random.choice((2, 3, 5)),
    }


def _turn_latency(ranks: int, latency_us: int, gigabytes: int) -> float:
    return latency_us


def _all_reduces(ranks: int, latency_us: int, gigabytes: int) -> Figure:
    """Draw the time of an all-reduce by its bytes, each with its number."""
    made, axes = style.figure(8, 3.6)
    link = Link("", latency_us / 1e6, gigabytes * 1e9)
    sizes = [4**exponent for exponent in range(4, 13)]
    times = [1e6 * link.ring_seconds(size, ranks) for size in sizes]
    axes.plot(sizes, times, marker="o", color=style.BLUE)
    for size, time in zip(sizes, times, strict=True):
        text = f"{time:,.0f}"
        axes.annotate(text, (size, time), (2, 7), textcoords="offset points", ha="right", size=9)
    axes.set(xscale="log", yscale="log", ylim=(min(times) / 2, 3 * max(times)))
    axes.set_xlabel("bytes of the tensor (log scale)")
    axes.set_ylabel("µs (log scale)")
    style.title(axes, f"All-reduces on {ranks} ranks, which form a ring")
    return made


SLOW, LATENCY, BYTES, WORK = "a slow rank", "latency", "bandwidth", "own work"
WIDE = 8192  # numbers in a token's vector


def _split_step(random: Random) -> dict[str, Any]:
    cause = random.choice((SLOW, LATENCY, BYTES, WORK))
    link = random.choice([LINKS["NVLink 4"], LINKS["PCIe 5 x16"], LINKS["InfiniBand 400 Gbit/s"]])
    ranks, layers = random.choice((4, 8)), random.choice((60, 80))
    tokens = random.choice((2048, 4096)) if cause == BYTES else random.choice((1, 2, 4))
    moving = 1e3 * (2 * layers + 1) * link.ring_seconds(2 * WIDE * tokens, ranks)
    times = {LATENCY: 0.4, BYTES: 0.4, WORK: 5.0, SLOW: 1.5}[cause]
    work = [moving * times * random.uniform(0.98, 1.02) for _ in range(ranks)]
    if cause == SLOW:
        work[random.randrange(ranks)] *= random.uniform(3.5, 4.5)
    return {
        "tokens": tokens,
        "messages": 2 * layers + 1,
        "latency_us": round(1e6 * link.latency),
        "gigabytes": round(link.bandwidth / 1e9),
        "work_ms": work,
        "moving_ms": moving,
    }


def _what_costs(
    tokens: int,
    messages: int,
    latency_us: int,
    gigabytes: int,
    work_ms: list[float],
    moving_ms: float,
) -> str:
    if max(work_ms) > 2 * median(work_ms):
        return SLOW
    if median(work_ms) > moving_ms:
        return WORK
    bytes_us = 2 * WIDE * tokens / len(work_ms) / gigabytes / 1e3
    return LATENCY if latency_us > bytes_us else BYTES


def _step_by_rank(
    tokens: int,
    messages: int,
    latency_us: int,
    gigabytes: int,
    work_ms: list[float],
    moving_ms: float,
) -> Figure:
    """Draw a bar for each rank: its own work, and its time inside all-reduces."""
    made, axes = style.figure(8, 1.6 + 0.28 * len(work_ms))
    names = [f"rank {rank}" for rank in range(len(work_ms))]
    inside = [max(work_ms) + moving_ms - own for own in work_ms]
    axes.barh(names, work_ms, color=style.BLUE, label="outside all messages")
    axes.barh(names, inside, left=work_ms, color=style.ORANGE, label="inside all-reduces")
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step, all of its parts added up")
    made.legend(loc="outside lower center", ncols=2, frameon=False)
    style.title(axes, "A step of a split model, as each rank spends it")
    return made


QUESTIONS = {
    "times_as_fast": Question(
        "estimate",
        "A decode step of a model with {layers} layers takes {step_ms} ms on one card. {ranks} "
        "cards share the model by tensor parallelism, and an all-reduce among them takes "
        "{message_us} µs. Count the all-reduces of the layers and that of the embedding, and leave "
        "out the gather of the logits. How many times as fast is the step on {ranks} cards?",
        "time of a step, layers, ranks, time of a message",
        _eight_cards,
        _times_as_fast,
        "The step takes {step_ms} / {ranks} ms and 2 x {layers} + 1 messages of {message_us} µs: "
        "each layer sends two, which do not get fewer with more cards.",
        within=1.02,
    ),
    "sent_by_ring": Question(
        "estimate",
        "A prompt of {tokens} tokens runs on {ranks} ranks. A token's vector has {hidden} numbers "
        "in bfloat16. How many MB (10^6 bytes) does each rank send in one ring all-reduce of all "
        "these vectors?",
        "tokens, numbers in a vector, ranks",
        _prompt,
        _sent_megabytes,
        "In 2 x ({ranks} - 1) turns a rank passes on 1 / {ranks} of {tokens} x {hidden} x 2 bytes "
        "each.",
        within=1.02,
        points=3,
    ),
    "micro_batches": Question(
        "estimate",
        "A prompt passes a pipeline of {stages} stages once, in micro-batches. Every stage takes "
        "equally long for each, and transfers take no time. A stage should be idle for at most "
        "{percent} % of the time from the first stage's start to the last one's end. What is the "
        "smallest number of micro-batches for this?",
        "stages, idle time that is allowed",
        _pipeline,
        _micro_batches,
        "With p = {stages}, the bubble (p - 1) / (m + p - 1) must be at most {percent} / 100.",
        within=1.0,
        points=3,
    ),
    "latency_of_a_turn": Question(
        "reading",
        "The figure shows how long all-reduces take on {ranks} ranks, by the bytes of the tensor. "
        "They are rings. How many µs is the latency of a single turn?",
        "ranks, latency, bandwidth",
        _measured_ring,
        _turn_latency,
        "Small tensors cost nothing but latency, in each of 2 x ({ranks} - 1) turns.",
        figure=_all_reduces,
    ),
    "slow_split_step": Question(
        "diagnosis",
        "The figure shows one step of a model on several ranks. The step has {tokens} tokens and "
        "{messages} all-reduces; each sums the vectors of all tokens, with 8,192 numbers of 2 "
        "bytes for a token, in a ring. A turn costs {latency_us} µs of latency, and the link moves "
        "{gigabytes} GB/s (10^9 bytes). What costs most? It is 'a slow rank' if the others spend "
        "most of the step waiting for it, 'own work' if all ranks spend most of it outside "
        "messages, and otherwise 'latency' or 'bandwidth', whichever part of a turn is longer.",
        "the cause, ranks, tokens, messages, link, and each rank's times",
        _split_step,
        _what_costs,
        "Ranks that wait for a slow one are inside messages longer than it is; if all bars are "
        "alike and mostly messages, compare {latency_us} µs with {tokens} x 8,192 x 2 bytes / "
        "ranks / {gigabytes} GB/s.",
        choices=(SLOW, LATENCY, BYTES, WORK),
        figure=_step_by_rank,
        minutes=8,
    ),
}
WRITTEN = {
    "columns_then_rows": Written(
        "In y = x W, tensor parallelism cuts gate and up by columns, and down by rows. Say what "
        "each rank has after each of the two cuts, why nothing must be sent between them, why "
        "gate and up may not be cut by rows without a message before SwiGLU, and how many "
        "all-reduces a whole layer takes.",
        "After the column split each rank knows some units of the feed-forward layer completely. "
        "SwiGLU works on each unit alone, so it needs no message, and these units are just the "
        "inputs that the rank's rows of down need. After the row split each rank has a part of "
        "every output's sum, so an all-reduce follows. If gate and up were cut by rows, each rank "
        "would have partial sums, and SwiGLU is not linear: the sum of its results is not its "
        "result for the sum. A layer takes two all-reduces, one after attention and one after the "
        "feed-forward layer.",
        {
            "a column split gives each rank some complete outputs": 2,
            "they are the inputs of its rows of down, and SwiGLU works on each alone": 2,
            "a row split gives partial sums of all outputs, so an all-reduce follows": 2,
            "SwiGLU is not linear, so it may not be applied to partial sums": 2,
            "two all-reduces for a layer: after attention and after the feed-forward layer": 2,
        },
    ),
    "inside_and_between_nodes": Written(
        "A model needs two nodes of eight cards each. Inside a node there is NVLink, between the "
        "nodes only a slower network. Which cut would you use inside a node and which between the "
        "nodes, and why? Say for each of the two cuts whether it makes a single sequence's tokens "
        "faster.",
        "Inside a node I use tensor parallelism: each card reads an eighth of the node's weights "
        "at the same time, so a token becomes faster. It sends two all-reduces for every layer, "
        "all ranks wait for them, and they get no fewer with more cards, so it needs the fast "
        "links. Between the nodes I use a pipeline: each node has half of the layers, and a "
        "micro-batch is sent on once, not twice for every layer, so a slower network is enough. "
        "The pipeline gives memory, but no faster token for one sequence, because the token still "
        "passes all layers one after another.",
        {
            "tensor parallelism inside a node, a pipeline between the nodes": 2,
            "tensor parallelism sends two all-reduces a layer, so it needs fast links": 3,
            "a pipeline sends little: once between stages for each micro-batch": 2,
            "tensor parallelism makes a single sequence's tokens faster": 1,
            "a pipeline does not, since a token still passes all layers in turn": 2,
        },
    ),
}
