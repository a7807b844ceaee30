"""Cases of chapter 52's exercises, drawn by a seed."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

from minigen_course.ch52_slo.capstone import Plan, Score, package_plan, score_of
from minigen_course.ch52_slo.exercises import QuickLoop, Send, Server
from minigen_course.ch52_slo.lesson import Vitals
from minigen_course.ch52_slo.mystery import (
    FLAGS,
    Diagnosis,
    layer_of,
    mystery_system,
    package_diagnosis,
    read_knob,
)
from minigen_course.grading.exercise import Wrong
from minigen_course.grading.varied import Varied, outcome
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import simulate

ENOUGH = 0.5  # of the goodput that the course's knob gives with the same traffic

NEAR, MUST_KEEP = 0.85, 0.9  # less than the checks ask for, because the traffic is another one


def _mystery(random: Random) -> dict[str, Any]:
    return {"seed": random.randint(1, 6), "order": random.randint(1, 99)}


def _verdicts(part: Any, seed: int, order: int) -> dict[str, Any]:
    """Judge the diagnoses of all six mystery servers, and turn the knob of server `seed`.

    Its requests come in another order, which `order` seeds. Goodput must reach half of what the
    package's knob gives with the same traffic.
    """
    diagnoses = [part(number) for number in range(1, 7)]
    for number, found in enumerate(diagnoses, 1):
        if not isinstance(found, Diagnosis):
            raise Wrong(f"of seed {number} returns {found!r}; it should return a Diagnosis(...).")
    resources = [
        "right" if found.resource == package_diagnosis(number).resource else "another one"
        for number, found in enumerate(diagnoses, 1)
    ]
    owners = [outcome(partial(layer_of, found.knob)) for found in diagnoses]
    layers = [
        "owns the knob" if found.layer == owner else "does not own the knob"
        for found, owner in zip(diagnoses, owners, strict=True)
    ]
    goal = ENOUGH * _goodput(seed, order, package_diagnosis(seed).knob)
    goodput = outcome(lambda: _goodput(seed, order, diagnoses[seed - 1].knob))
    if isinstance(goodput, float):
        goodput = "enough" if goodput >= goal else f"{goodput:.2f}, less than {goal:.2f}"
    return {"resources": resources, "layers": layers, "goodput": goodput}


@cache
def _goodput(seed: int, order: int, knob: str) -> float:
    system, card, (flag, value) = mystery_system(seed), Card(), read_knob(knob)
    changed: dict[str, Any] = {FLAGS[flag][1]: value}
    if flag == "--kv-cache-dtype":
        card, changed = Card(kv_bits=8), {"num_blocks": 2 * system.knobs.num_blocks}
    mixed = Random(order).sample(system.load, len(system.load))
    load = [replace(ask, at=was.at) for ask, was in zip(mixed, system.load, strict=True)]
    goodput = Vitals.of(simulate(load, replace(system.knobs, **changed), card)).found.goodput
    assert goodput is not None
    return goodput


PERCENTS = (25, 40, 50, 60, 75, 80, 90, 95, 99, 100)


def _load(random: Random) -> dict[str, Any]:
    count = random.randint(5, 9)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + random.choice((0.25, 0.5, 1.0, 1.5)))
    one_at_a_time = random.random() < 0.5
    fit = [each for each in PERCENTS if each * count % 100 or each in (25, 50, 75, 100)]
    return {
        "times": times,
        "seconds": [random.choice((0.3, 0.6, 0.8, 1.3, 2.2, 4.0)) for _ in times],
        "failing": sorted(random.sample(range(count), random.choice((0, 1, 1, 2)))),
        "one_at_a_time": one_at_a_time,
        "blocked": 0.0 if one_at_a_time else random.choice((1.2, 2.1)),
        "percents": sorted(random.sample(fit, 4)),
    }


class _Blocking(Server):
    """A server whose first request blocks the loop of the load test for a while."""

    def __init__(self, seconds: Sequence[float], one_at_a_time: bool, blocked: float) -> None:
        super().__init__(seconds, one_at_a_time)
        self.blocked = blocked

    async def send(self, number: int) -> None:
        if number == 0:
            loop: Any = asyncio.get_running_loop()
            loop.now += self.blocked
        await super().send(number)


def _tested(
    part: Any,
    times: list[float],
    seconds: list[float],
    failing: list[int],
    one_at_a_time: bool,
    blocked: float,
    percents: list[float],
) -> Any:
    """Put a load on a fake server that answers request i after `seconds[i]`.

    The requests whose numbers are in `failing` fail after that time. The server serves all requests
    at once, or `one_at_a_time`. Sending the first request blocks the load test for `blocked`
    seconds, as a computation would.
    """
    signed = [-each if number in failing else each for number, each in enumerate(seconds)]
    server = _Blocking(signed, one_at_a_time, blocked)
    send: Send = server.send
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        found = runner.run(part(send, times, percents))
    sent = [server.started.get(number, math.inf) for number in range(len(times))]
    return {"percentiles": found, "sent at": sent}


def _trace(random: Random) -> dict[str, Any]:
    return {"seed": random.randint(3, 22)}


def _scored(part: Any, seed: int) -> dict[str, str]:
    """Serve the capstone's trace of another seed by the plan.

    At least 90 % of the requests must keep their objectives, and the score must reach 85 % of the
    package's on that trace.
    """
    plan = part()
    if not isinstance(plan, Plan):
        raise Wrong(f"returns {plan!r}; it should return a Plan(...).")
    found = outcome(lambda: score_of(plan, seed))
    if not isinstance(found, Score):
        return {"plan": found}
    goal = NEAR * score_of(package_plan(), seed).value
    return {
        "kept": "enough" if found.kept >= MUST_KEEP else f"{found.kept:.0%}",
        "score": "near" if found.value >= goal else f"{found.value:.2f}, less than {goal:.2f}",
    }


VARIED = {
    "diagnose": Varied(
        "which mystery servers run, the order of requests", _mystery, _verdicts, num_cases=2
    ),
    "load_test": Varied(
        "times, seconds, failures, a server that serves one at a time, a load test that is late, "
        "percents",
        _load,
        _tested,
    ),
    "make_plan": Varied("the trace", _trace, _scored, num_cases=1),
}
