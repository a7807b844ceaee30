"""Questions on chapter 41 that need no code."""

from random import Random
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch41_tensor_parallel.lesson import LINKS, Link
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


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
