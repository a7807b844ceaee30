"""Diagnosis as a method: broken systems, and the vital signs of a run before and after a change."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise

import numpy as np
from IPython.display import display

from minigen.bench.report import Outcome, Report, Slo, report
from minigen.bench.workload import burst, constant, poisson
from minigen.trace.events import Event
from minigen.trace.timeline import Request, Timeline
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import CARD, Ask, Knobs, Run, asks, simulate

RESOURCES = ("batch slots", "token budget", "blocks", "arithmetic", "bandwidth", "nothing")
LAYERS = ("client", "gateway", "batching", "engine", "runtime", "silicon")
SLOS = (Slo("ttft", 0.5), Slo("itl", 0.1))  # what guides recommend, and what people notice


@dataclass(frozen=True)
class Rates:
    """What a server gives per second: requests answered, good ones, and the tokens of good ones.

    A good request met every objective.
    """

    answered: float
    good: float
    good_tokens: float

    @classmethod
    def of(
        cls, outcomes: Sequence[Outcome], slos: Sequence[Slo], window: tuple[float, float]
    ) -> "Rates":
        """Count the requests that end in the window, whose begin and end are in seconds."""
        begin, end = window
        ended = [each for each in outcomes if each.error is None and begin <= each.ended < end]
        good = [each for each in ended if all(slo.is_met(each) for slo in slos)]
        counts = len(ended), len(good), sum(each.output_tokens for each in good)
        return cls(*(count / (end - begin) for count in counts))


def rates_by_length(
    outcomes: Sequence[Outcome], slos: Sequence[Slo]
) -> tuple[list[float], list[float]]:
    """Return the requests per second, all and good ones, of a load's first 1, 2, 3, ... requests.

    The seconds last from the first arrival to the last answer of these requests, as in `report`.
    No request may have failed.
    """
    good = np.cumsum([all(slo.is_met(each) for slo in slos) for each in outcomes])
    seconds = np.maximum.accumulate([each.ended for each in outcomes]) - outcomes[0].arrived
    answered = np.arange(1, len(outcomes) + 1) / seconds
    return answered.tolist(), (good / seconds).tolist()


@dataclass(frozen=True)
class Vitals:
    """The vital signs of a run, or of some of its requests: seconds, shares, counts.

    `running_beside_waiting` is the mean of the requests that run while others wait, 0 if none does.
    `most_arithmetic` is the share of the card's FLOPs per second in the busiest ten seconds.
    `kept` is the share of all requests that met every objective; `kept_ttft` and `kept_itl` are the
    shares that met that objective. A refused request meets none.
    """

    running: float
    running_beside_waiting: float
    most_running: int
    most_waiting: int
    most_kv: float
    most_arithmetic: float
    preemptions: int
    given_up: int
    hit_rate: float
    refused: int
    kept: float
    kept_ttft: float
    kept_itl: float
    found: Report

    @classmethod
    def of(cls, run: Run, slos: Sequence[Slo] = SLOS, tenant: str | None = None) -> "Vitals":
        """Compute them for all requests; with `tenant`, latencies and refusals of that tenant."""
        outcomes = run.outcomes if tenant is None else run.of(tenant)
        times = [0.0, *(each.at for each in run.moments)]
        spans = [after - before for before, after in pairwise(times)]
        lasting = list(zip(run.moments, spans, strict=True))
        served = sum(each.running * span for each, span in lasting)
        waits = [(each.running, span) for each, span in lasting if each.waiting]
        lost, hit_rate = _lost_and_hit_rate(run)
        answered = [each for each in outcomes if each.error is None]
        met = [{slo: slo.is_met(each) for slo in slos} for each in answered]

        def share(latency: str) -> float:
            wanted = [slo for slo in slos if latency in (slo.latency, "")]
            return sum(all(each[slo] for slo in wanted) for each in met) / len(outcomes)

        return cls(
            running=served / sum(spans),
            running_beside_waiting=sum(n * span for n, span in waits)
            / max(sum(span for _, span in waits), 1e-9),
            most_running=max(each.running for each in run.moments),
            most_waiting=max(each.waiting for each in run.moments),
            most_kv=max(each.kv_used for each in run.moments),
            most_arithmetic=most_arithmetic(run),
            preemptions=len(lost),
            given_up=sum(lost),
            hit_rate=hit_rate,
            refused=sum(each.error is not None for each in outcomes),
            kept=share(""),
            kept_ttft=share("ttft"),
            kept_itl=share("itl"),
            found=report(outcomes, slos),
        )

    def rows(self) -> dict[str, str]:
        """Return the signs as texts, by their names in the table."""
        found = self.found
        assert found.ttft is not None
        assert found.itl is not None
        assert found.goodput is not None
        return {
            "running, on average": f"{self.running:.1f}",
            "the same while others wait": f"{self.running_beside_waiting:.1f}",
            "running, at most": f"{self.most_running}",
            "waiting, at most": f"{self.most_waiting}",
            "KV cache used, at most": f"{self.most_kv:.0%}",
            "arithmetic used, at most": f"{self.most_arithmetic:.0%}",
            "preemptions": f"{self.preemptions}",
            "tokens given up": f"{self.given_up:,}",
            "prefix hit rate": f"{self.hit_rate:.0%}",
            "refused (429)": f"{self.refused}",
            "TTFT p50": f"{1e3 * found.ttft.p50:,.0f} ms",
            "TTFT p99": f"{1e3 * found.ttft.p99:,.0f} ms",
            "ITL p50": f"{1e3 * found.itl.p50:,.0f} ms",
            "ITL p99": f"{1e3 * found.itl.p99:,.0f} ms",
            "tokens per second": f"{found.output_rate:,.0f}",
            "goodput, requests per second": f"{found.goodput:.1f}",
            "kept TTFT below 500 ms": f"{self.kept_ttft:.0%}",
            "kept ITL below 100 ms": f"{self.kept_itl:.0%}",
            "kept both": f"{self.kept:.0%}",
        }


def _lost_and_hit_rate(run: Run) -> tuple[list[int], float]:
    """Return the tokens that each preemption gave up, and the prefix cache's share of the prompts.

    As in the metrics, a prompt counts when it first runs, and not again after a preemption.
    """
    lost, hits, queries = list[int](), list[int](), list[int]()

    def add(request: Request, event: Event) -> None:
        if request.preemptions == 0 and request.prompt_tokens is not None:
            queries.append(request.prompt_tokens)
            hits.append(event.counts["computed"])

    Timeline(
        times_only=True,
        on_running=add,
        on_preempted=lambda _, event: lost.append(event.counts["computed"]),
    ).replay(run.events)
    return lost, sum(hits) / max(sum(queries), 1)


def most_arithmetic(run: Run, card: Card = CARD, seconds: float = 10.0) -> float:
    """Return the share of the card's FLOP/s that the busiest `seconds` used, without attention's.

    Also known as model FLOPs utilisation (MFU). A run that is shorter counts as a whole.
    """
    times = np.array([0.0, *(each.at for each in run.moments)])
    computed = np.cumsum([0, *(each.tokens for each in run.moments)])
    first = np.maximum(np.searchsorted(times, times - seconds, side="right") - 1, 0)
    spans = np.maximum(times - times[first], min(seconds, times[-1]))
    rate = float(np.max((computed - computed[first]) / spans))
    return rate * card.shape.flops(0) / card.machine.flops


@dataclass(frozen=True)
class Case:
    """A symptom, the saturated resource, the knob, and runs before and after turning it.

    `answer` is the resource in one of the words of `RESOURCES`, `layer` that of the knob that
    mends it. `why` and `moved` explain the diagnosis, and whether the bottleneck has moved.
    `signs` are the vital signs that show it. `tenant` limits latencies to one tenant; None means
    all. `further` is a run after a second change, which `then` names, for the resource that
    saturates once the first one does not.
    """

    symptom: str
    answer: str
    layer: str
    knob: str
    broken: Run
    changed: Run
    signs: tuple[str, ...]
    tenant: str | None = None
    then: str = ""
    further: Run | None = None
    why: str = ""
    moved: str = ""

    @property
    def runs(self) -> dict[str, Run]:
        """The runs by the title of their column."""
        runs = {"broken": self.broken, "changed": self.changed}
        return runs if self.further is None else {**runs, "and then": self.further}

    @cached_property
    def vitals(self) -> tuple[Vitals, ...]:
        """The vital signs before the change, after it, and after the second one if there is one."""
        return tuple(Vitals.of(run, tenant=self.tenant) for run in self.runs.values())

    def text(self) -> str:
        """Return the diagnosis, the vital signs side by side with `signs` marked, and goodput."""
        columns = [each.rows() for each in self.vitals]
        lines = [f"Saturated: {self.answer}. Layer: {self.layer}. Knob: {self.knob}."]
        lines += [f"And then: {self.then}."] if self.further else []
        lines += ["", " " * 30 + "".join(f"{name:>12}" for name in self.runs)]
        for name in columns[0]:
            mark = ">" if name in self.signs else " "
            lines.append(f"{mark} {name:<28}" + "".join(f"{each[name]:>12}" for each in columns))
        goodputs = " to ".join(column["goodput, requests per second"] for column in columns)
        kept = " to ".join(column["kept both"] for column in columns)
        lines += ["", f"Goodput: {goodputs} requests per second; kept both: {kept}."]
        return "\n".join(lines)

    def show(self, number: int, saturated: str | None) -> None:
        """Show the diagnosis of system `number`; it is folded if `saturated`, your answer, is None.

        Raises `ValueError` for an answer that is not one of `RESOURCES`.
        """
        if saturated is not None and saturated not in RESOURCES:
            raise ValueError(f"The answer is {saturated!r}; it should be one of {RESOURCES}.")
        if saturated is None:
            said = f"System {number}: not tried yet. Write one of the six words instead of None."
        else:
            right = "right." if saturated == self.answer else f"not this time: {self.answer}."
            said = f"System {number}: you said {saturated}, {right}"
        why = [self.why, f"Has the bottleneck moved? {self.moved}"]
        prose = "".join(f"<p>{escape(each)}</p>" for each in why)
        html = (
            f"<p>{escape(said)}</p><details{'' if saturated is None else ' open'}><summary>"
            f"Diagnosis of system {number}</summary><pre>{escape(self.text())}</pre>{prose}"
            "</details>"
        )
        plain = "\n\n".join([said, self.text(), *why])
        display({"text/plain": plain, "text/html": html}, raw=True)


def table(cases: Sequence[Case]) -> None:
    """Show all cases as one table: symptom, resource and its layer, knob, effect."""
    rows = [
        "| symptom | saturated, and the knob's layer | knob | what it did | kept both objectives |",
        "|---|---|---|---|---|",
    ]
    for each in cases:
        columns = [vitals.rows() for vitals in each.vitals]
        sign = each.signs[0]
        knob = f"{each.knob}; then {each.then}" if each.further else each.knob
        did, kept = (
            " to ".join(column[name] for column in columns) for name in (sign, "kept both")
        )
        where = f"{each.answer} ({each.layer})"
        rows.append(f"| {each.symptom} | {where} | {knob} | {sign}: {did} | {kept} |")
    text = "\n".join(rows)
    display({"text/markdown": text, "text/plain": text}, raw=True)


@dataclass(frozen=True)
class System:
    """A load and the settings that serve it; `tenant` limits the latencies to one tenant's."""

    load: tuple[Ask, ...]
    knobs: Knobs
    tenant: str | None = None


NUM_SHARED = 1500  # tokens of the instructions in system 5
NUM_NAMES = 4  # tokens that differ, and stand before them


def _chat(rate: float, count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Ask]:
    return asks(poisson(rate, count, np.random.default_rng(1)), prompt, output)


def in_order(*loads: Sequence[Ask]) -> tuple[Ask, ...]:
    """Return the requests of all loads, in the order of their arrival."""
    return tuple(sorted((ask for load in loads for ask in load), key=lambda ask: ask.at))


def broken_system(number: int) -> System:
    """Return one of the chapter's eight broken systems, 1 to 8; each has one fault."""
    rng = np.random.default_rng
    if number == 1:
        return System(in_order(_chat(2, 70, (50, 200), (50, 100))), Knobs(max_num_seqs=4))
    if number == 2:
        documents = asks(constant(0.4, 16), (6000, 8000), (20, 40), seed=2, tenant="document")
        talk = asks(poisson(2, 90, rng(1)), (50, 100), (80, 160), tenant="chat")
        return System(in_order(talk, documents), Knobs(max_num_batched_tokens=8192), "chat")
    if number == 3:  # with all the blocks that the card holds
        load = _chat(3, 80, (700, 1100), (250, 400))
        return System(in_order(load), Knobs(max_num_batched_tokens=512))
    if number == 4:
        load = asks(burst(100), (50, 200), (10, 200))
        return System(in_order(load), Knobs("static", max_num_seqs=16))
    if number == 5:
        shared = range(NUM_SHARED)
        load = asks(poisson(6, 80, rng(1)), (30, 60), (30, 80), shared=shared)
        ends = [each.prompt_ids[NUM_SHARED:] for each in load]
        prompts = [(*end[:NUM_NAMES], *shared, *end[NUM_NAMES:]) for end in ends]
        named = [
            Ask(each.at, prompt, each.output_tokens)
            for each, prompt in zip(load, prompts, strict=True)
        ]
        return System(in_order(named), Knobs(max_num_batched_tokens=512))
    if number == 6:
        chat = asks(poisson(1.5, 110, rng(1)), (50, 100), (40, 80), tenant="chat")
        job = asks([20.0] * 30, (400, 600), (100, 150), seed=2, tenant="job")
        return System(in_order(chat, job), Knobs(max_num_seqs=12), "chat")
    if number == 7:
        load = _chat(16, 160, (400, 800), (20, 60))
        return System(in_order(load), Knobs(max_num_batched_tokens=512))
    if number == 8:
        flood = asks(poisson(12, 120, rng(3)), (100, 300), (100, 160), seed=2, tenant="flood")
        others = asks(poisson(1, 30, rng(1)), (50, 200), (40, 80), tenant="other")
        return System(in_order(flood, others), Knobs(max_num_seqs=32), "other")
    raise ValueError(f"There are systems 1 to 8, and no {number}.")


def symptoms(*numbers: int) -> list[Run]:
    """Run these broken systems; print their vital signs side by side, and return the runs."""
    systems = [broken_system(number) for number in numbers]
    runs = [simulate(each.load, each.knobs) for each in systems]
    columns = [
        Vitals.of(run, tenant=each.tenant).rows() for run, each in zip(runs, systems, strict=True)
    ]
    print(" " * 30 + "".join(f"{f'system {number}':>12}" for number in numbers))
    for name in columns[0]:
        print(f"  {name:<28}" + "".join(f"{column[name]:>12}" for column in columns))
    return runs


def num_equal(load: Sequence[Ask]) -> int:
    """Return the number of tokens with which all prompts begin alike."""
    count = 0
    for tokens in zip(*(ask.prompt_ids for ask in load), strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def traffic_shapes() -> dict[str, list[Ask]]:
    """Return twenty seconds of each of five shapes of traffic, by name."""
    rng = np.random.default_rng
    bursts = [*np.linspace(2, 2.6, 14), *np.linspace(12, 12.6, 14)]
    shared = asks(poisson(1.5, 30, rng(4)), (30, 120), (60, 160), seed=4, shared=range(1500))
    talk = asks(poisson(2, 40, rng(5)), (50, 200), (80, 200), seed=5)
    loads = {
        "many short": asks(poisson(5, 100, rng(1)), (40, 160), (20, 80), seed=1),
        "few long": asks(poisson(0.4, 8, rng(2)), (2000, 3000), (300, 600), seed=2),
        "bursts": asks(bursts, (100, 400), (80, 200), seed=3),
        "one system prompt": shared,
        "mixed": [*talk, *asks([4.0, 9.0, 15.0], (2500, 3000), (20, 60), seed=6)],
    }
    return {name: [ask for ask in load if ask.at <= 20] for name, load in loads.items()}


QUERIES = {  # what it says -> PromQL
    "TTFT p99, of all servers": "histogram_quantile(0.99, sum by (le) "
    "(rate(minigen:time_to_first_token_seconds_bucket[2m])))",
    "ITL p99": "histogram_quantile(0.99, sum by (le) "
    "(rate(minigen:inter_token_latency_seconds_bucket[2m])))",
    "share of first tokens within 500 ms": "sum(rate(minigen:time_to_first_token_seconds_bucket"
    '{le="0.5"}[2m])) / sum(rate(minigen:time_to_first_token_seconds_count[2m]))',
    "mean time in the queue, of answered requests": "sum(rate("
    "minigen:request_queue_time_seconds_sum[2m])) / "
    "sum(rate(minigen:request_queue_time_seconds_count[2m]))",
    "requests that wait": "sum(minigen:num_requests_waiting)",
    "requests that run": "sum(minigen:num_requests_running)",
    "fullest KV cache": "max(minigen:kv_cache_usage_perc)",
    "preemptions per second": "sum(rate(minigen:num_preemptions_total[2m]))",
    "requests refused per second": "sum(rate(minigen:requests_refused_total[2m]))",
    "share refused, failed or given up": "(sum(rate(minigen:requests_refused_total[2m])) + "
    'sum(rate(minigen:request_success_total{finished_reason=~"error|abort"}[2m]))) / '
    "(sum(rate(minigen:requests_refused_total[2m])) + "
    "sum(rate(minigen:request_success_total[2m])))",
    "output tokens per second": "sum(rate(minigen:generation_tokens_total[2m]))",
    "prefix cache hit rate": "sum(rate(minigen:prefix_cache_hits_total[2m])) / "
    "sum(rate(minigen:prefix_cache_queries_total[2m]))",
}
METRIC = re.compile(r"minigen:\w+")


def queries(page: str) -> None:
    """Show `QUERIES` as a table. Raises `ValueError` if one names a metric that `page` lacks."""
    exported = set(re.findall(r"^(minigen:\w+)[ {]", page, re.MULTILINE))
    for query in QUERIES.values():
        for name in METRIC.findall(query):
            if name not in exported:
                raise ValueError(f"The server exports no {name}, which {query} names.")
    table = markdown_table(QUERIES)
    display({"text/markdown": table, "text/plain": table.replace(r"\|", "|")}, raw=True)


def markdown_table(queries: Mapping[str, str]) -> str:
    """Return a table of queries; a bar in one is escaped, because it would end the cell."""
    escaped = {what: query.replace("|", r"\|") for what, query in queries.items()}
    rows = [f"| {what} | `{query}` |" for what, query in escaped.items()]
    return "\n".join(["| what | PromQL |", "|---|---|", *rows])
