"""Chapter 52's exercises: the mystery server, a load test, and the capstone."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from minigen_course.ch52_slo.capstone import MUST_KEEP, NEAR, Plan, Score, package_plan, score_of
from minigen_course.ch52_slo.lesson import LAYERS, RESOURCES
from minigen_course.ch52_slo.mystery import (
    Diagnosis,
    goal_of,
    goodput_of,
    layer_of,
    mystery_system,
    package_diagnosis,
    vitals_of,
)
from minigen_course.grading.exercise import Check, Wrong, expect, expect_equal
from minigen_course.lab.simulator import CARD

Send = Callable[[int], Awaitable[object]]
Part = Callable[[Send, Sequence[float], Sequence[float]], Awaitable[dict[float, float]]]


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that no time is spent waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                raise Wrong("waits for ever; it should end when all requests have ended.")
            self.now += timeout
            return look(0)

        selector.select = jump

    def time(self) -> float:
        """Return the time of the loop's own clock, in seconds."""
        return self.now


class Server:
    """Answer request i after `seconds[i]`, one request at a time or all at once.

    A negative number of seconds is a failure after that time. `started` are the times at which the
    requests were sent.
    """

    def __init__(self, seconds: Sequence[float], one_at_a_time: bool = False):
        self.seconds, self.started = seconds, dict[int, float]()
        self.turn = asyncio.Semaphore(1 if one_at_a_time else len(seconds) + 1)

    async def send(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        expect(
            number not in self.started, f"request {number} is sent twice; it should be sent once."
        )
        self.started[number] = loop.time() - 100
        async with self.turn:
            await asyncio.sleep(abs(self.seconds[number]))
        if self.seconds[number] < 0:
            raise ConnectionError("refused")


def _run(part: Part, server: Server, times: Sequence[float], *percents: float) -> dict[float, Any]:
    async def play() -> Any:
        asked = part(server.send, times, percents)
        if not inspect.isawaitable(asked):
            raise Wrong(f"returns {asked!r}; it should return a coroutine, so write async def.")
        return await asked

    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        found = runner.run(play())
    expect(
        isinstance(found, dict), f"returns {found!r}; it should be a dict with percents as keys."
    )
    expect_equal(sorted(found), sorted(percents), "the percents of the result")
    return found


def _expect(found: dict[float, Any], **right: float) -> None:
    for name, seconds in right.items():
        percent = float(name.removeprefix("p").replace("_", "."))
        mine = found[percent]
        number = isinstance(mine, int | float) and not isinstance(mine, bool)
        expect(number, f"p{percent:g} is {mine!r}; it should be a number of seconds.")
        same = mine == seconds or math.isclose(mine, seconds, abs_tol=1e-6)
        expect(same, f"p{percent:g} is {mine:.6g} s; it should be {seconds:.6g} s.")


def one_request_has_its_own_latency(part: Part) -> None:
    """one request at 0 s, answered after 0.25 s:"""
    server = Server([0.25])
    _expect(_run(part, server, [0.0], 1, 50, 100), p1=0.25, p50=0.25, p100=0.25)


def requests_are_sent_at_their_times(part: Part) -> None:
    """requests at 0, 1, 1 and 2.5 s, each answered after 3 s:"""
    server, times = Server([3.0] * 4), [0.0, 1.0, 1.0, 2.5]
    found = _run(part, server, times, 50)
    for number, at in enumerate(times):
        expect(number in server.started, f"request {number} was never sent; it should be.")
        sent = server.started[number]
        expect(
            math.isclose(sent, at, abs_tol=1e-6),
            f"request {number} was sent at {sent:.6g} s; it should be sent at {at:g} s, "
            "independently of the others.",
        )
    _expect(found, p50=3.0)


def latency_counts_from_the_intended_time(part: Part) -> None:
    """a server that serves one request at a time, and takes 4 s for the first:"""
    server = Server([4.0, 0.5, 0.5, 0.5], one_at_a_time=True)
    found = _run(part, server, [0.0, 1.0, 2.0, 3.0], 25, 50, 75, 100)
    _expect(found, p25=2.5, p50=3.0, p75=3.5, p100=4.0)


def being_sent_late_counts_as_latency(part: Part) -> None:
    """the load generator itself was blocked for 2 s when it sent its first request:"""

    class Busy(Server):
        async def send(self, number: int) -> None:
            if number == 0:
                loop: Any = asyncio.get_running_loop()
                loop.now += 2.0  # as if a computation had blocked the loop
            await super().send(number)

    server = Busy([0.1] * 4)
    found = _run(part, server, [0.0, 0.5, 1.0, 3.0], 25, 50, 75, 100)
    _expect(found, p25=0.1, p50=1.1, p75=1.6, p100=2.1)


def percentiles_are_by_nearest_rank(part: Part) -> None:
    """ten answers of 1 to 10 s, in random order:"""
    server = Server([7.0, 3, 10, 1, 5, 9, 2, 8, 4, 6])
    found = _run(part, server, [0.0] * 10, 10, 50, 51, 90, 91, 99, 100)
    _expect(found, p10=1, p50=5, p51=6, p90=9, p91=10, p99=10, p100=10)


def percentiles_are_of_all_requests_together(part: Part) -> None:
    """200 answers, and the slow ones are all at the end:"""
    seconds, times = [0.1] * 180 + [5.0] * 19 + [6.0], [0.5 * number for number in range(200)]
    found = _run(part, Server(seconds), times, 50, 90, 95, 99.5, 100)
    _expect(found, p50=0.1, p90=0.1, p95=5.0, p99_5=5.0, p100=6.0)


def a_failure_is_the_worst_latency(part: Part) -> None:
    """eight answers of 1 s, and two requests that are refused at once:"""
    server = Server([1.0, 1, -0.001, 1, 1, 1, -0.001, 1, 1, 1])
    found = _run(part, server, [0.1 * number for number in range(10)], 50, 80, 90, 99)
    _expect(found, p50=1.0, p80=1.0, p90=math.inf, p99=math.inf)


def _evidence(seed: int, resource: str) -> str:
    """Return what the gauges of a mystery server say of a resource."""
    vitals, knobs = vitals_of(seed), mystery_system(seed).knobs
    said = {
        "batch slots": f"{vitals.most_running} of {knobs.max_num_seqs} batch slots were in use at "
        f"most, and {vitals.running:.1f} on average",
        "blocks": f"{vitals.most_kv:.0%} of the blocks were in use at most",
        "arithmetic": f"{vitals.most_arithmetic:.0%} of the arithmetic was in use at most",
        "token budget": "the gaps between tokens are about as long in the tail as in the median"
        if vitals.kept_itl > 0.9
        else "the gaps between tokens have a long tail",
        "bandwidth": "a step reads all weights for one sequence as for many, so bandwidth is "
        "busy whenever anything runs",
        "nothing": "requests wait, or gaps are too long, because something is full",
    }
    return said[resource]


def diagnosis_of_seed(seed: int) -> Check:
    """Return the check of a diagnosis of the mystery server of this seed."""

    def check_diagnosis(part: Callable[[int], Diagnosis]) -> None:
        found, own = part(seed), package_diagnosis(seed)
        is_one = isinstance(found, Diagnosis)
        expect(is_one, f"returns {found!r}; it should return a Diagnosis(resource, layer, knob).")
        known = found.resource in RESOURCES
        expect(known, f"the resource is {found.resource!r}; it should be one of {RESOURCES}.")
        known = found.layer in LAYERS
        expect(known, f"the layer is {found.layer!r}; it should be one of {LAYERS}.")
        if found.resource != own.resource:
            raise Wrong(
                f"the resource should be another one than {found.resource}: "
                f"{_evidence(seed, found.resource)}."
            )
        try:
            owner = layer_of(found.knob)
            goodput = goodput_of(seed, found.knob)
        except ValueError as error:
            raise Wrong(str(error)) from None
        goal = goal_of(seed)
        if goodput < goal:
            before = goodput_of(seed)
            masked = " It rises, so look: is the value wrong, or does it treat a symptom?"
            raise Wrong(
                f"with {found.knob}, goodput goes from {before:.2f} to {goodput:.2f} requests per "
                f"second; it should reach {goal:.2f}.{masked if goodput > 1.2 * before else ''}"
            )
        expect(
            found.layer == owner,
            f"the layer is {found.layer!r}; it should be the one that owns {found.knob}.",
        )
        expect(
            found.layer == own.layer,
            f"{found.knob} reaches the goal, but the layer should be another one than "
            f"{found.layer}: its knob can serve what this one refuses.",
        )

    check_diagnosis.__doc__ = f"the mystery server of seed {seed}:"
    return check_diagnosis


def _scored(part: Callable[[], Plan], seed: int) -> Score:
    plan = part()
    expect(isinstance(plan, Plan), f"returns {plan!r}; it should return a Plan(...).")
    try:
        return score_of(plan, seed)
    except ValueError as error:
        raise Wrong(str(error)) from None


def the_plan_can_run(part: Callable[[], Plan]) -> None:
    """the plan on the card:"""
    _scored(part, 1)


def the_trace_is_served_within_its_objectives(part: Callable[[], Plan]) -> None:
    """the share of requests that keep their objectives:"""
    for seed in (1, 2):
        kept = _scored(part, seed).kept
        expect(
            kept >= MUST_KEEP,
            f"{kept:.1%} keep their objectives on trace {seed}; it should be at least "
            f"{MUST_KEEP:.0%}. Ask which resource is full.",
        )


def the_cost_is_low(part: Callable[[], Plan]) -> None:
    """good answers for what the GPU read and computed:"""
    for seed in (1, 2):
        found, goal = _scored(part, seed), NEAR * score_of(package_plan(), seed).value
        expect(
            found.value >= goal,
            f"the score is {found.value:.2f} good answers per second of the GPU on trace {seed}; "
            f"it should be at least {goal:.2f}. Bytes cost "
            f"{found.num_bytes / CARD.machine.bandwidth:.1f} s and FLOPs "
            f"{found.flops / CARD.machine.flops:.1f} s.",
        )


CHECKS = {
    "diagnose": tuple(diagnosis_of_seed(seed) for seed in range(1, 7)),
    "load_test": (
        one_request_has_its_own_latency,
        requests_are_sent_at_their_times,
        latency_counts_from_the_intended_time,
        being_sent_late_counts_as_latency,
        percentiles_are_by_nearest_rank,
        percentiles_are_of_all_requests_together,
        a_failure_is_the_worst_latency,
    ),
    "make_plan": (
        the_plan_can_run,
        the_trace_is_served_within_its_objectives,
        the_cost_is_low,
    ),
}
