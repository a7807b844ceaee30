"""Diagnosis as a method: the vital signs of a run, before and after one change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from IPython.display import display

from minigen.bench.report import Report, Slo, report
from minigen.trace.timeline import Timeline
from minigen_course.lab.simulator import Run

SLOS = (Slo("ttft", 0.5), Slo("itl", 0.1))  # what guides recommend, and what people notice


@dataclass(frozen=True)
class Vitals:
    """The vital signs of a run, or of some of its requests: seconds, shares, counts."""

    running: float
    most_waiting: int
    most_kv: float
    preemptions: int
    given_up: int
    hit_rate: float
    refused: int
    found: Report

    @classmethod
    def of(cls, run: Run, slos: Sequence[Slo] = SLOS, tenant: str | None = None) -> "Vitals":
        """Compute them for all requests; with `tenant`, latencies and refusals of that tenant."""
        outcomes = run.outcomes if tenant is None else run.of(tenant)
        times = [0.0, *(each.at for each in run.moments)]
        spans = [after - before for before, after in pairwise(times)]
        served = sum(each.running * span for each, span in zip(run.moments, spans, strict=True))
        counters, lost = run.readings.counters, list[int]()
        timeline = Timeline(on_preempted=lambda _, event: lost.append(event.counts["computed"]))
        timeline.replay(run.events)
        return cls(
            running=served / sum(spans),
            most_waiting=max(each.waiting for each in run.moments),
            most_kv=max(each.kv_used for each in run.moments),
            preemptions=counters["num_preemptions"],
            given_up=sum(lost),
            hit_rate=counters["prefix_cache_hits"] / max(counters["prefix_cache_queries"], 1),
            refused=sum(each.error is not None for each in outcomes),
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
            "waiting, at most": f"{self.most_waiting}",
            "KV cache used, at most": f"{self.most_kv:.0%}",
            "preemptions": f"{self.preemptions}",
            "tokens given up": f"{self.given_up:,}",
            "prefix hit rate": f"{self.hit_rate:.0%}",
            "refused (429)": f"{self.refused}",
            "TTFT p50": f"{1e3 * found.ttft.p50:,.0f} ms",
            "TTFT p99": f"{1e3 * found.ttft.p99:,.0f} ms",
            "ITL p50": f"{1e3 * found.itl.p50:,.0f} ms",
            "ITL p99": f"{1e3 * found.itl.p99:,.0f} ms",
            "tokens a second": f"{found.output_rate:,.0f}",
            "goodput, requests a second": f"{found.goodput:.1f}",
        }


@dataclass(frozen=True)
class Case:
    """A symptom, the saturated resource, the knob that cures it, and runs before and after.

    `signs` are the vital signs that show it. `tenant` limits latencies to one tenant; None means
    all.
    """

    symptom: str
    resource: str
    knob: str
    broken: Run
    cured: Run
    signs: tuple[str, ...]
    tenant: str | None = None

    def vitals(self) -> tuple[Vitals, Vitals]:
        """Return the vital signs before and after the change."""
        return Vitals.of(self.broken, tenant=self.tenant), Vitals.of(self.cured, tenant=self.tenant)

    def tell(self, is_cured: Callable[[Vitals, Vitals], bool]) -> "Case":
        """Print the vital signs side by side, with `signs` marked, and return this case.

        Raises `AssertionError` if `is_cured(before, after)` is false.
        """
        before, after = self.vitals()
        print(f"{self.symptom}: {self.resource}; {self.knob}\n")
        left, right = before.rows(), after.rows()
        print(f"  {'':<28}{'broken':>12}{'cured':>12}")
        for name in left:
            mark = ">" if name in self.signs else " "
            print(f"{mark} {name:<28}{left[name]:>12}{right[name]:>12}")
        assert is_cured(before, after), "the knob does not cure it"
        return self


def table(cases: Sequence[Case]) -> None:
    """Show all cases as one table: symptom, resource and its layer, knob, effect."""
    rows = ["| symptom | saturated, and where | knob | what it did |", "|---|---|---|---|"]
    for each in cases:
        left, right = (vitals.rows() for vitals in each.vitals())
        sign = each.signs[0]
        rows.append(
            f"| {each.symptom} | {each.resource} | {each.knob} "
            f"| {sign}: {left[sign]} to {right[sign]} |"
        )
    text = "\n".join(rows)
    display({"text/markdown": text, "text/plain": text}, raw=True)
