"""Questions on chapter 42 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch42_pipeline.lesson.timeline import pass_once
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _interleaved(random: Random) -> dict[str, Any]:
    stages = random.choice((4, 6, 8))
    return {
        "stages": stages,
        "batches": stages * random.choice((1, 2, 3)),
        "groups": random.choice((2, 3, 4)),
    }


def _idle_percent(stages: int, batches: int, groups: int) -> float:
    return 100 * (stages - 1) / (groups * batches + stages - 1)


def _dealt(random: Random) -> dict[str, Any]:
    return {
        "layers": random.choice((28, 30, 32, 36)),
        "stages": random.choice((2, 3, 4)),
        "head": random.choice((5, 6, 8)),
    }


def _slowest(layers: int, stages: int, head: int) -> float:
    return max(-(-(layers + head) // stages), head + 1)


def _ring(random: Random) -> dict[str, Any]:
    return {
        "teraflops": random.choice((150, 300, 400, 900)),
        "gigabytes": random.choice((10, 25, 50, 100)),
        "queries_per_kv": random.choice((1, 4, 8)),
    }


def _least_tokens(teraflops: int, gigabytes: int, queries_per_kv: int) -> float:
    return teraflops * 1e12 / (gigabytes * 1e9) / queries_per_kv


def _stages(random: Random) -> dict[str, Any]:
    milliseconds = [random.choice((4, 5, 6)) for _ in range(4)]
    milliseconds[random.randrange(4)] = random.choice((8, 9, 10))
    return {"milliseconds": milliseconds, "batches": random.randint(5, 7)}


def _number_of_slowest(milliseconds: list[int], batches: int) -> float:
    return max(milliseconds)


def _chart(milliseconds: list[int], batches: int) -> Figure:
    """Draw a row per stage over time, with a box per micro-batch."""
    made, axes = style.figure(9, 2.8)
    timeline = pass_once([each / 1e3 for each in milliseconds], batches)
    for each in timeline.spans:
        color = style.CYCLE[each.batch % len(style.CYCLE)]
        axes.barh(
            each.rank, 1e3 * each.seconds, left=1e3 * each.start, color=color, edgecolor="white"
        )
    axes.set(yticks=range(4), ylim=(3.5, -0.5), xlabel="ms")
    axes.set_yticklabels([f"stage {number}" for number in range(4)])
    axes.set_xticks(range(0, int(1e3 * timeline.end) + 5, 5))
    axes.tick_params(axis="x", labelsize=7)
    style.title(axes, "Micro-batches that pass four stages once")
    return made


FEW, UNEVEN, BARRIER, LINK = (
    "too few micro-batches",
    "uneven stages",
    "a barrier after each step",
    "slow transfers",
)


def _log(random: Random) -> dict[str, Any]:
    cause = random.choice((FEW, UNEVEN, BARRIER, LINK))
    stages = 4
    busy = [random.uniform(9.5, 10.5) for _ in range(stages)]
    batches, transfer, waits = 4, random.uniform(0.1, 0.3), random.uniform(0.0, 0.4)
    if cause == FEW:
        batches = random.choice((1, 2))
    if cause == UNEVEN:
        busy[random.randrange(stages)] *= random.uniform(1.9, 2.4)
    if cause == BARRIER:
        waits = random.uniform(27.0, 32.0)
    if cause == LINK:
        transfer = random.uniform(8.0, 12.0)
    return {"batches": batches, "busy_ms": busy, "transfer_ms": transfer, "barrier_ms": waits}


def _cause(batches: int, busy_ms: list[float], transfer_ms: float, barrier_ms: float) -> str:
    if batches < len(busy_ms):
        return FEW
    if max(busy_ms) > 1.5 * min(busy_ms):
        return UNEVEN
    return BARRIER if barrier_ms > transfer_ms else LINK


def _log_text(batches: int, busy_ms: list[float], transfer_ms: float, barrier_ms: float) -> str:
    lines = [f"micro-batches in flight: {batches}", "stage  ms for a micro-batch"]
    lines += [f"{stage:5}  {each:19.1f}" for stage, each in enumerate(busy_ms)]
    lines.append(f"a transfer to the next stage: {transfer_ms:.1f} ms")
    lines.append("the last stage's first result of a step waits for its other results:")
    lines.append(f"  {barrier_ms:.1f} ms, before the next step begins")
    return "\n".join(lines)


QUESTIONS = {
    "interleaved_bubble": Question(
        "estimate",
        "A pipeline has {stages} devices, and each holds {groups} groups of layers, so that a "
        "micro-batch goes round {groups} times. {batches} micro-batches pass it once. All groups "
        "take equally long, and transfers take no time. What percentage of the time is a device "
        "idle?",
        "devices, groups, micro-batches",
        _interleaved,
        _idle_percent,
        "A device waits for {stages} - 1 groups and works on {groups} x {batches} of them.",
        within=1.02,
    ),
    "slowest_stage": Question(
        "estimate",
        "A model has {layers} equal layers and an output head that takes as long as {head} of "
        "them. It is dealt out to {stages} stages as evenly as whole layers allow; the head is on "
        "the last stage, which has at least one layer. How many layers' time does the slowest "
        "stage take?",
        "layers, stages, the head",
        _dealt,
        _slowest,
        "All work is {layers} + {head} layers: divide by {stages} and round up.",
        within=1.0,
        points=3,
    ),
    "tokens_of_a_block": Question(
        "estimate",
        "Ring attention hides its messages if a turn computes for longer than it sends. A device "
        "computes {teraflops} TFLOP/s and sends {gigabytes} GB/s. Keys and values have 2 bytes per "
        "number, {queries_per_kv} query heads share a KV head, and nothing is masked. How many "
        "tokens must a rank have at least? (Scores and mixtures take 4 FLOPs for each pair of "
        "tokens and each number of a query head.)",
        "FLOPs, bandwidth, heads",
        _ring,
        _least_tokens,
        "c tokens take 4 c² · heads · d FLOPs and send 4 c · KV heads · d bytes, so c must be at "
        "least FLOP/s divided by bytes/s, divided by {queries_per_kv}.",
        within=1.05,
    ),
    "pace_of_a_pipeline": Question(
        "reading",
        "The figure shows {batches} micro-batches that pass four stages. Once the pipeline is "
        "full, how many ms lie between two micro-batches that leave the last stage?",
        "the time of each stage, micro-batches",
        _stages,
        _number_of_slowest,
        "The slowest stage sets the pace: read the length of its boxes.",
        within=1.12,
        figure=_chart,
    ),
    "why_idle": Question(
        "diagnosis",
        "A pipeline of four stages decodes, and its devices are idle for much of the time. What "
        "costs most?",
        "micro-batches, the time of each stage, transfers, waits between steps",
        _log,
        _cause,
        "Compare the micro-batches with the stages, the stages with each other, and the two waits.",
        choices=(FEW, UNEVEN, BARRIER, LINK),
        figure=_log_text,
    ),
}

WRITTEN = {
    "which_cut": Written(
        "A company has two machines with 8 cards each (NVLink inside, Ethernet of 25 Gbit/s "
        "between them), and a model of 200 GB that does not fit into one card of 80 GB. It wants "
        "(a) fast answers for few users, and (b) many tokens per second for many users. Which cuts "
        "do you choose for (a) and for (b), and why not the others? What would change if the model "
        "did not fit into one machine?",
        "(a) Tensor parallelism over the 8 cards of a machine: each reads an eighth of the "
        "weights, and NVLink makes the two all-reduces of each layer short. The second machine "
        "is a replica. (b) The same, or fewer cards per tensor group with more replicas, or "
        "stages, as long as weights and caches fit: all-reduces grow with the batch, so fewer "
        "of them help. Between the machines nothing but requests (replicas) or one transfer per "
        "micro-batch (stages) may pass: 2 all-reduces per layer over Ethernet would take longer "
        "than reading the weights. A tensor split over both machines is the wrong choice. If "
        "the model did not fit into one machine: two stages, one per machine, with tensor "
        "parallelism inside; one answer gets no faster than on one machine, and two or more "
        "micro-batches keep both machines busy.",
        {
            "tensor parallelism inside a machine for fast answers": 3,
            "replicas for the second machine, since the model fits into one": 3,
            "no all-reduces over Ethernet": 2,
            "two stages, one per machine, if the model does not fit into one": 2,
        },
    ),
    "bubble_in_decode": Written(
        "A prompt passes 4 stages in 4 micro-batches, and the stages are idle for 43 % of the "
        "time. In decode with 4 micro-batches, stages of equal length and free transfers, they can "
        "be idle for 0 % of it. Why? Which two things in an engine can bring the bubble back?",
        "A prompt's micro-batches pass once: the pipeline must fill and run empty, which costs p - "
        "1 turns. In decode each micro-batch comes back with its next token, and enters the first "
        "stage at once. With as many micro-batches as stages, each stage has one at any time, so "
        "the pipeline fills once and stays full. The bubble comes back if the engine waits for all "
        "micro-batches at the end of each step, before it schedules the next one, and if there are "
        "fewer micro-batches than stages, for example with one request. (Uneven stages, slow "
        "transfers, and a prompt's long chunk among decodes make stages idle as well.)",
        {
            "a prompt passes once, so that the pipeline fills and runs empty": 3,
            "in decode a micro-batch enters again when it has its token": 3,
            "a barrier at the end of each step brings the bubble back": 2,
            "fewer micro-batches than stages, or uneven ones, bring it back": 2,
        },
    ),
}
