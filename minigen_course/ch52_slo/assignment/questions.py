"""Questions on chapter 52 that need no code."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from minigen.bench.workload import poisson
from minigen_course.ch52_slo.figures import Buckets, estimate_percentile
from minigen_course.ch52_slo.lesson import Vitals, num_equal
from minigen_course.ch52_slo.mystery import (
    command_of,
)
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.lab.simulator import CARD, Ask, Knobs, Run, asks, simulate

MOST_TTFT, MOST_ITL = 500, 100  # ms

FAULTS = ("batch slots", "token budget", "blocks", "arithmetic", "nothing")

SPAN = 2.0  # seconds over which the arithmetic in use is averaged


def _faulty(random: Random) -> dict[str, Any]:
    return {
        "fault": random.choice(FAULTS),
        "traffic": random.randint(1, 999),
        "few": random.randint(11, 16),
        "many": random.choice((40, 44, 48, 56, 64)),
    }


@cache
def _faulty_run(fault: str, traffic: int, few: int, many: int) -> Run:
    rng = np.random.default_rng(traffic)
    knobs = Knobs(max_num_seqs=many, max_num_batched_tokens=512, enable_prefix_caching=False)
    if fault == "batch slots":
        load = asks(poisson(2.5, 70, rng), (80, 300), (120, 220), traffic)
        return simulate(load, replace(knobs, max_num_seqs=few))
    if fault == "token budget":
        load = asks(poisson(1.0, 40, rng), (1500, 2600), (60, 120), traffic)
        return simulate(load, replace(knobs, max_num_batched_tokens=8192))
    if fault == "blocks":
        load = asks(poisson(1.8, 60, rng), (600, 1000), (150, 250), traffic)
        return simulate(load, replace(knobs, num_blocks=64 * few))
    if fault == "arithmetic":
        return simulate(asks(poisson(9, 120, rng), (1000, 1500), (15, 40), traffic), knobs)
    load = asks(poisson(2, 60, rng), (60, 200), (10, 200), traffic)
    return simulate(load, replace(knobs, scheduler="static"))


def _fault(fault: str, traffic: int, few: int, many: int) -> str:
    return fault


def _gauges(fault: str, traffic: int, few: int, many: int) -> Figure:
    """Draw requests, blocks, arithmetic and the time of each step, in time."""
    run = _faulty_run(fault, traffic, few, many)
    slots = few if fault == "batch slots" else many
    made, rows = style.figure(9, 7, nrows=4, sharex=True, height_ratios=(1.5, 1, 1, 1.2))
    requests, blocks, arithmetic, steps = rows
    times = [each.at for each in run.moments]
    for values, colour, name in (
        ([each.running for each in run.moments], style.BLUE, "running"),
        ([each.waiting for each in run.moments], style.AMBER, "waiting"),
    ):
        requests.step(times, values, where="post", color=colour, linewidth=1.4, label=name)
    requests.axhline(slots, color=style.INK, linestyle="--", linewidth=1, label="batch slots")
    requests.legend(
        frameon=False, labelcolor=style.INK, ncols=3, loc="lower right", bbox_to_anchor=(1, 1)
    )
    used = [100 * each.kv_used for each in run.moments]
    blocks.step(times, used, where="post", color=style.PINK, linewidth=1.4)
    peak = CARD.machine.flops / CARD.shape.flops(0)  # tokens per second
    computed = np.histogram(
        times, np.arange(0, times[-1] + SPAN, SPAN), weights=[each.tokens for each in run.moments]
    )[0]
    arithmetic.stairs(100 * computed / SPAN / peak, SPAN * np.arange(len(computed) + 1), lw=1.4)
    for each in (blocks, arithmetic):
        each.axhline(100, color=style.INK, linestyle="--", linewidth=1)
        each.set(ylim=(0, 112), ylabel="%")
    took = [(end.at, end.at - begin.at) for begin, end in pairwise(run.moments) if begin.running]
    steps.plot(*zip(*took, strict=True), ".", color=style.GREEN, markersize=4)
    steps.set(xlabel="seconds", ylabel="seconds", xlim=(0, None))
    steps.set_ylim(0, max(0.2, 1.1 * max(seconds for _, seconds in took)))
    requests.set(ylim=(0, None), ylabel="requests")
    names = ("Requests", "Blocks in use", "Arithmetic in use, over 2 s", "Time of each step")
    for axes, name in zip(rows, names, strict=True):
        style.title(axes, name)
    return made


FLAG_OF = {
    "slots": "--max-num-seqs",
    "steps": "--max-num-batched-tokens",
    "blocks": "--num-blocks",
    "repeated": "--enable-prefix-caching",
    "one key": "--max-in-flight-per-key",
}


def _cured_by(random: Random) -> dict[str, Any]:
    return {
        "fault": random.choice(list(FLAG_OF)),
        "traffic": random.randint(1, 999),
        "few": random.randint(11, 16),
        "many": random.choice((32, 40, 48)),
        "blocks": random.choice((2400, 2800, 3300)),
    }


def _served(fault: str, traffic: int, few: int, many: int, blocks: int) -> tuple[list[Ask], Knobs]:
    """Return the requests and the settings of a server with a fault."""
    rng = np.random.default_rng(traffic)
    knobs = Knobs(
        max_num_seqs=many,
        max_num_batched_tokens=512,
        num_blocks=blocks,
        enable_prefix_caching=False,
    )
    if fault == "slots":
        load = asks(poisson(2.5, 70, rng), (80, 300), (120, 220), traffic)
        return load, replace(knobs, max_num_seqs=few, max_num_batched_tokens=8192)
    if fault == "steps":
        load = asks(poisson(1.0, 50, rng), (1500, 2600), (60, 120), traffic)
        return load, replace(knobs, max_num_batched_tokens=8192)
    if fault == "blocks":
        load = asks(poisson(1.8, 60, rng), (600, 1000), (150, 250), traffic)
        return load, replace(knobs, num_blocks=64 * few)
    if fault == "repeated":
        same = range(1200)
        return asks(poisson(7, 100, rng), (20, 80), (30, 60), traffic, shared=same), knobs
    people = asks(poisson(2, 60, rng), (80, 300), (60, 120), traffic)
    named = [replace(each, tenant=f"user {number % 20}") for number, each in enumerate(people)]
    crawler = asks(poisson(1.6, 45, rng), (5000, 7000), (10, 30), traffic, tenant="crawler")
    return sorted([*named, *crawler], key=lambda ask: ask.at), knobs


def _flag(fault: str, traffic: int, few: int, many: int, blocks: int) -> str:
    return FLAG_OF[fault]


def _vital_signs(fault: str, traffic: int, few: int, many: int, blocks: int) -> str:
    """Return the flags, the traffic and the vital signs of a server."""
    load, knobs = _served(fault, traffic, few, many, blocks)
    lengths = [len(ask.prompt_ids) for ask in load]
    by_key = {key: sum(_lengths_of(load, key)) for key in {ask.tenant for ask in load}}
    rows = {
        "requests": f"{len(load)}",
        "arrivals per second": f"{len(load) / max(ask.at for ask in load):.1f}",
        "prompt tokens, p50": f"{np.percentile(lengths, 50):,.0f}",
        "prompt tokens, p99": f"{np.percentile(lengths, 99):,.0f}",
        "answer tokens, mean": f"{np.mean([ask.output_tokens for ask in load]):.0f}",
        "equal first tokens": f"{num_equal(load):,}",
        "API keys": f"{len(by_key)}",
        "prompt tokens, largest key": f"{max(by_key.values()) / sum(lengths):.0%}",
        **Vitals.of(simulate(load, knobs)).rows(),
    }
    table = "\n".join(f"{name:<30}{value:>10}" for name, value in rows.items())
    return "\n".join(["minigen serve", *(f"  {each}" for each in command_of(knobs)), "", table])


def _lengths_of(load: list[Ask], key: str) -> list[int]:
    return [len(ask.prompt_ids) for ask in load if ask.tenant == key]


def _limits(random: Random) -> dict[str, Any]:
    while True:
        drawn: dict[str, Any] = {
            "slots": random.choice((16, 24, 32, 48, 64)),
            "step_ms": random.choice((40, 50, 60)),
            "prompt": random.choice((300, 500, 800, 1200, 2000)),
            "output": random.choice((50, 100, 150, 200)),
            "tokens": random.choice((6000, 8000, 10_000)),
        }
        slots, arithmetic = _rates(**drawn)
        if not 1 / 1.4 < slots / arithmetic < 1.4:
            return drawn


def _rates(slots: int, step_ms: int, prompt: int, output: int, tokens: int) -> tuple[float, float]:
    """Return how many requests per second the slots and the arithmetic allow."""
    return slots / (output * step_ms / 1e3), tokens / (prompt + output)


def _most_rate(slots: int, step_ms: int, prompt: int, output: int, tokens: int) -> float:
    return min(_rates(slots, step_ms, prompt, output, tokens))


def _visits(random: Random) -> dict[str, Any]:
    return {
        "slow": random.choice((2, 3, 4, 5, 6)),
        "requests": random.choice((8, 10, 12, 15, 20)),
    }


def _slow_visits(slow: int, requests: int) -> float:
    return 100 * (1 - (1 - slow / 100) ** requests)


def _rented(random: Random) -> dict[str, Any]:
    return {
        "dollars": random.choice((0.8, 1.2, 2.4, 3.2, 8.4)),
        "rate": random.choice((3, 4, 6, 8, 9)),
        "tokens": random.choice((80, 100, 150, 250)),
        "kept": random.choice((45, 55, 65, 70, 80)),
    }


def _price(dollars: float, rate: int, tokens: int, kept: int) -> float:
    return dollars / (0.0036 * rate * tokens * kept / 100)


BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5)  # seconds, upper bounds of buckets


def _histograms(random: Random) -> dict[str, Any]:
    """Return the requests in each bucket of two servers, the last one without a bound."""
    while True:
        quick = [random.randint(*span) for span in ((300, 500), (200, 400), (20, 60), (5, 20))]
        slow = [random.randint(*span) for span in ((20, 60), (50, 150), (60, 120), (40, 120))]
        share = random.choice((0.3, 1, 3))  # of its requests, so that p95 is not in one bucket
        late = [*slow, random.randint(20, 40), 0]
        drawn = {
            "first": [*quick, random.randint(1, 5), 0],
            "second": [round(share * each) for each in late],
        }
        right = _p95_of_both(**drawn) / 1e3
        alone = [estimate_percentile((), _buckets(each), 95) for each in drawn.values()]
        assert alone[0] is not None
        assert alone[1] is not None
        wrong = ((alone[0] + alone[1]) / 2, *alone, *BOUNDS)
        if all(each is not None and abs(each / right - 1) > 0.1 for each in wrong):
            return drawn


def _buckets(counts: Sequence[int]) -> Buckets:
    """Return the cumulative counts by upper bound, as Prometheus stores them."""
    totals = np.cumsum(counts).tolist()
    return tuple(zip((*BOUNDS, math.inf), totals, strict=True))


def _p95_of_both(first: list[int], second: list[int]) -> float:
    both = [one + other for one, other in zip(first, second, strict=True)]
    seconds = estimate_percentile((), _buckets(both), 95)
    assert seconds is not None
    return 1e3 * seconds


def _metrics_pages(first: list[int], second: list[int]) -> str:
    """Return the lines of both servers' metrics."""
    lines = []
    for number, counts in enumerate((first, second), 1):
        lines.append(f"# server {number}")
        for bound, count in _buckets(counts):
            le = "+Inf" if bound == math.inf else f"{bound}"
            name = f'minigen:time_to_first_token_seconds_bucket{{le="{le}"}}'
            lines.append(f"{name:<56}{count:>6}")
    return "\n".join(lines)


def _points(random: Random) -> dict[str, Any]:
    """Return TTFT and ITL of some requests, in ms, apart from each other and from the limits."""
    points: list[tuple[int, int]] = []
    quick, late = (60, 440), (560, 1150)
    flowing, stuttering = (35, 90), (110, 190)
    counts = random.randint(5, 9), random.randint(2, 4), random.randint(1, 3), random.randint(1, 3)
    spans = ((quick, flowing), (late, flowing), (quick, stuttering), (late, stuttering))
    for count, (of_ttft, of_itl) in zip(counts, spans, strict=True):
        while count:
            point = random.randint(*of_ttft), random.randint(*of_itl)
            if all(math.hypot((point[0] - x) / 60, (point[1] - y) / 12) > 1 for x, y in points):
                points.append(point)
                count -= 1
    return {"points": points, "window": random.choice((4, 5, 8, 10))}


def _goodput_of_points(points: list[tuple[int, int]], window: int) -> float:
    return sum(ttft <= MOST_TTFT and itl <= MOST_ITL for ttft, itl in points) / window


def _scattered(points: list[tuple[int, int]], window: int) -> Figure:
    """Draw a point for each request, and the two objectives."""
    made, axes = style.figure(8, 4)
    axes.plot(*zip(*points, strict=True), "o", color=style.BLUE)
    axes.axvline(MOST_TTFT, color=style.INK, linestyle="--", linewidth=1)
    axes.axhline(MOST_ITL, color=style.INK, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 1200), ylim=(0, 200))
    axes.set(xlabel="time to first token, ms", ylabel="p95 of the gaps, ms")
    style.title(axes, f"Each point is a request that ended in a window of {window} s")
    return made


QUESTIONS = {
    "what_runs_out": Question(
        "diagnosis",
        "The figure shows the gauges of a mystery server that misses its objectives. The dashed "
        "lines are the number of batch slots, all blocks, and the peak of the arithmetic. What "
        "runs out? The choices: batch slots; token budget (name it if it is so large that one long "
        "step makes all others wait); blocks; arithmetic; nothing (requests wait, and yet no "
        "resource is full).",
        "the fault, the traffic, the limits",
        _faulty,
        _fault,
        "Look for the gauge that is at its limit while requests wait; if none is, look at the "
        "longest steps, and then ask what keeps batch slots empty.",
        choices=FAULTS,
        figure=_gauges,
        points=8,
    ),
    "which_knob": Question(
        "diagnosis",
        "The text shows the flags of a server, its traffic and its vital signs, of all keys "
        "together. The card's memory holds 3,300 blocks. Which one of the five flags, with a "
        "better value, lets most requests keep both objectives (TTFT 500 ms, ITL 100 ms)?",
        "the fault, the traffic, the limits",
        _cured_by,
        _flag,
        "Name the resource that is full (or the steps that are too long), then ask who fills it: "
        "more of a small limit helps, unless the same tokens are computed again and again, or one "
        "key has most of them.",
        choices=tuple(FLAG_OF.values()),
        figure=_vital_signs,
        points=8,
    ),
    "most_requests": Question(
        "estimate",
        "A server has {slots} batch slots, and enough blocks. Prompts have {prompt} tokens and "
        "answers {output} tokens on average. A step gives every running request one token and "
        "takes {step_ms} ms; leave out prefill, so that a request runs for as many steps as its "
        "answer has tokens. The arithmetic can compute {tokens:,} tokens per second, of prompts "
        "and answers together. How many requests per second can the server answer at most, in the "
        "long run?",
        "slots, time of a step, tokens, arithmetic",
        _limits,
        _most_rate,
        "The slots allow {slots} / ({output} x {step_ms} ms) per second (Little's law), the "
        "arithmetic {tokens:,} / ({prompt} + {output}); the smaller one counts.",
        within=1.03,
    ),
    "slow_visits": Question(
        "estimate",
        "Of a server's requests, {slow} % take longer than a second, independently of each other. "
        "A visit makes {requests} requests. What percentage of the visits meet at least one "
        "request that takes longer than a second?",
        "the share of slow requests, the requests of a visit",
        _visits,
        _slow_visits,
        "A visit is quick if all its requests are, which has the probability (1 - {slow} / 100) to "
        "the power {requests}.",
        within=1.02,
        points=3,
        minutes=3,
    ),
    "price_of_good_tokens": Question(
        "estimate",
        "A GPU costs {dollars} dollars per hour. It answers {rate} requests per second, with "
        "{tokens} output tokens each, and {kept} % of them keep every objective. What does a "
        "million good tokens cost, in dollars?",
        "price, requests per second, tokens, share that keeps the objectives",
        _rented,
        _price,
        "An hour has 3600 x {rate} x {tokens} x {kept} / 100 good tokens, and costs {dollars} "
        "dollars.",
        within=1.02,
    ),
    "p95_of_two_servers": Question(
        "reading",
        "The text shows the same histogram of two servers, since both were started. What is the "
        "p95 of the time to first token of all their requests together, in ms, as "
        "`histogram_quantile` estimates it (by linear interpolation within a bucket)?",
        "the counts of the buckets",
        _histograms,
        _p95_of_both,
        "Add the counts of both servers bucket by bucket, find the bucket that holds 95 % of the "
        "total, and go as far into it as the rank goes into its own count.",
        within=1.02,
        figure=_metrics_pages,
        minutes=8,
    ),
    "goodput": Question(
        "reading",
        "The figure shows all requests that ended in a window of {window} s. The objectives are a "
        "TTFT of at most 500 ms, and gaps whose p95 is at most 100 ms (dashed). What is the "
        "goodput, in requests per second?",
        "the latencies, the window",
        _points,
        _goodput_of_points,
        "A request is good if it keeps both objectives, so count the points below and left of the "
        "dashed lines, and divide by {window} s.",
        within=1.0,
        figure=_scattered,
        points=3,
        minutes=3,
    ),
}

WRITTEN = {
    "a_mask": Written(
        "A server with full batch slots, free blocks and arithmetic used to 10 % lets people wait "
        "for many seconds. A colleague adds `--max-queue 4`, and now all requests that are "
        "answered are in time. Use the chapter's method to say what is wrong with this cure, what "
        "you would change instead, and what you would look at after that.",
        "The saturated resource is the batch slots, which belong to batching. The queue limit "
        "belongs to the gateway. It hides the symptom: the refused clients have the problem now, "
        "and latencies of those who are served do not show it, but refusals per second and goodput "
        "do. The machine could serve them, because blocks and arithmetic are free. So raise "
        "`--max-num-seqs` alone, and measure again with the same load. Then ask whether the "
        "bottleneck has moved: do requests still wait, and if so, are blocks, arithmetic or again "
        "the slots at their limit? A queue limit is right when arithmetic is full.",
        {
            "the full resource (batch slots) and its layer are named; the cure is in another": 3,
            "refused requests get nothing, which latencies of the served do not show": 3,
            "one change in the right layer (more batch slots), measured with the same load": 2,
            "then: has the bottleneck moved, and which gauge would show it": 2,
        },
    ),
    "closed_loop": Written(
        "A script sends a request, waits for the answer, and sends the next. In its test of an "
        "hour, the server stands still once, for 20 seconds. What does the script's p99 say about "
        "this, what did users feel, and how must a load test send and measure instead?",
        "The script sends nothing while the server stands still, so it sees one slow answer among "
        "many quick ones, and its p99 does not show it. Users do not wait for each other: all who "
        "asked during these 20 seconds waited, and those behind them until the queue was gone. "
        "Leaving them out is called coordinated omission. A load test must be an open loop: it "
        "sends each request at its planned time, whether or not earlier ones have been answered, "
        "and counts latency from that time, even if it was itself late. Failures stay in the "
        "list, as the worst latency.",
        {
            "the script sees one slow request only, and p99 hides it": 3,
            "all users who asked meanwhile waited": 2,
            "open loop: requests are sent at planned times, independently of answers": 3,
            "latency counts from the planned time": 2,
        },
    ),
}
