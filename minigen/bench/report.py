"""The report of a load test: latency percentiles, throughput and goodput, and their table.

Source: goodput as in DistServe (Zhong et al. 2024): the requests per second that meet every service
level objective (SLO).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minigen.errors import OptionError

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e")
ITL_PERCENTILE = 95  # of a request's gaps, which must meet the objective for ITL


@dataclass(frozen=True)
class Outcome:
    """The result of one request; all times are seconds after the start of the load.

    `arrived` is the planned time, `sent` the time at which the request was sent. `text_times` has
    one time for each event of the stream that contained text; an event may contain several tokens.
    `ended` is the time of the stream's end, or of the error. `output_tokens` is the count in the
    server's usage, or the number of events if the server sent no usage (`has_usage` is False).
    `error` is None or the kind of error, and `detail` its message.
    """

    arrived: float
    sent: float
    ended: float
    text_times: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    has_usage: bool = False
    error: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to first token (TTFT): seconds from the planned time to the first text."""
        return self.text_times[0] - self.arrived if self.text_times else None

    @property
    def e2e(self) -> float:
        """End-to-end latency: seconds from the planned time to the end."""
        return self.ended - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies (ITL): seconds between each event with text and the next."""
        return [after - before for before, after in pairwise(self.text_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token (TPOT) after the first, in seconds; None for a single token."""
        if len(self.text_times) < 2 or self.output_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Slo:
    """A service level objective: `latency` (one of `LATENCIES`) is at most `seconds`."""

    latency: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse "ttft=500ms", "itl=50ms", "tpot=40ms" or "e2e=5s". Else raises `OptionError`.

        >>> Slo.parse("ttft=500ms")
        Slo(latency='ttft', seconds=0.5)
        """
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
        if found is None or found[1] not in LATENCIES or float(found[2]) == 0:
            known = ", ".join(LATENCIES)
            raise OptionError(
                f"--slo must be a latency ({known}) and a time, as in ttft=500ms or e2e=5s, "
                f"not {text!r}."
            )
        return cls(found[1], float(found[2]) / (1000 if found[3] == "ms" else 1))

    def is_met(self, outcome: Outcome) -> bool:
        """Return whether a request met the objective; for "itl", whether the p95 of its gaps did.

        That p95 is interpolated between two gaps, as in the report.
        A request that lacks the latency (a single token has no TPOT) meets the objective. A failed
        request does not.
        """
        if outcome.error is not None:
            return False
        if self.latency == "itl":
            gaps = outcome.gaps
            return not gaps or float(np.percentile(gaps, ITL_PERCENTILE)) <= self.seconds
        seconds = getattr(outcome, self.latency)
        return seconds is None or seconds <= self.seconds


@dataclass(frozen=True)
class Spread:
    """A distribution: mean, percentiles (linearly interpolated) and maximum."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of the values; None if there are none."""
        if not values:
            return None
        p50, p90, p95, p99 = np.percentile(values, PERCENTILES).tolist()
        return cls(float(np.mean(values)), p50, p90, p95, p99, max(values))


@dataclass(frozen=True)
class Report:
    """The numbers of a load test; all times are in seconds.

    `seconds` is the time from the first arrival to the last end. The latencies cover the requests
    that succeeded; `itl` covers all of their gaps. `lateness` is how long after its planned time
    each request was sent. `goodput` is the rate of requests that met all objectives, in requests
    per second (None without objectives), and `met` has the count for each objective.
    """

    num_requests: int
    num_answered: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_event: float | None
    goodput: float | None
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    lateness: Spread | None
    errors: dict[str, int] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    @property
    def request_rate(self) -> float:
        """Successful requests per second."""
        return self.num_answered / self.seconds

    @property
    def output_rate(self) -> float:
        """Output tokens per second, of successful requests."""
        return self.output_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        rates = {"requests_per_second": self.request_rate, "tokens_per_second": self.output_rate}
        return {**asdict(self), **rates}


def report(outcomes: Sequence[Outcome], slos: Sequence[Slo] = ()) -> Report:
    """Compute the report of a load's outcomes. Raises `ValueError` if there are none."""
    if not outcomes:
        raise ValueError("There are no requests to report on.")
    answered = [each for each in outcomes if each.error is None]
    failed = [each for each in outcomes if each.error is not None]
    ended, started = max(each.ended for each in outcomes), min(each.arrived for each in outcomes)
    seconds = max(ended - started, 1e-9)
    num_good = sum(all(slo.is_met(each) for slo in slos) for each in answered)
    output_tokens = sum(each.output_tokens for each in answered)
    num_events = sum(len(each.text_times) for each in answered)
    return Report(
        num_requests=len(outcomes),
        num_answered=len(answered),
        seconds=seconds,
        prompt_tokens=sum(each.prompt_tokens for each in answered),
        output_tokens=output_tokens,
        tokens_per_event=output_tokens / num_events if num_events else None,
        goodput=num_good / seconds if slos else None,
        ttft=Spread.of(_known(each.ttft for each in answered)),
        itl=Spread.of([gap for each in answered for gap in each.gaps]),
        tpot=Spread.of(_known(each.tpot for each in answered)),
        e2e=Spread.of([each.e2e for each in answered]),
        lateness=Spread.of([each.sent - each.arrived for each in outcomes]),
        errors=dict(Counter(each.error for each in failed if each.error).most_common()),
        met={f"{slo.latency}={slo.seconds:g}s": sum(map(slo.is_met, answered)) for slo in slos},
        details={each.error: each.detail for each in reversed(failed) if each.error},
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


NAMES = {"ttft": "time to first token", "itl": "inter-token latency"}
NAMES |= {"tpot": "time per output token", "e2e": "end to end"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
TOO_LATE = 0.010  # seconds: if requests are sent later than this, the load was not as requested


def print_report(title: str, found: Report, has_usage: bool, cpu_seconds: float) -> None:
    """Print a report; `cpu_seconds` is the CPU time of the load generator itself."""
    console = print_spreads(title, {NAMES[each]: getattr(found, each) for each in LATENCIES})
    for sentence in _sentences(found, has_usage, cpu_seconds):
        console.print(sentence, markup=False, soft_wrap=True)


def check_lengths(most: int, context: int) -> None:
    """Raise `OptionError` if prompt plus output, `most` tokens, exceed the context length."""
    if most > context:
        raise OptionError(
            f"--input-tokens and --output-tokens add up to {most} tokens, but this model's context "
            f"holds {context}."
        )


def print_spreads(title: str, rows: dict[str, Spread | None]) -> Console:
    """Print a table of latencies in milliseconds, and return the console for what follows.

    A dash means that there are no values. A terminal that is too narrow for the numbers wraps the
    lines, so no digit is lost.
    """
    console, table = Console(highlight=False), Table(title=escape(title), title_justify="left")
    table.add_column("milliseconds", overflow="fold", min_width=len("milliseconds"))
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, spread in rows.items():
        cells = ("-" if spread is None else _amount(getattr(spread, each)) for each in COLUMNS)
        table.add_row(name, *cells)
    least = console.measure(table, options=console.options.update(max_width=1000)).minimum
    console.width = max(console.width, least)
    console.print(table)
    return console


def _amount(seconds: float) -> str:
    milliseconds = seconds * 1e3
    decimals = 0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:,.{decimals}f}"


def _sentences(found: Report, has_usage: bool, cpu_seconds: float) -> Iterator[str]:
    yield (
        f"completed {found.num_answered} of {found.num_requests} in {found.seconds:.1f} s: "
        f"{found.request_rate:.2f} requests/s, {found.output_rate:,.1f} output tokens/s "
        f"({found.prompt_tokens:,} tokens in, {found.output_tokens:,} out)"
    )
    if found.goodput is not None:
        met = ", ".join(f"{name} {count}" for name, count in found.met.items())
        yield f"goodput: {found.goodput:.2f} requests/s met every objective; met each: {met}"
    for kind, count in found.errors.items():
        yield f"error: {kind}, {count} times ({found.details[kind]})"
    if not has_usage:
        yield "the server sent no usage: each event with text counts as a token"
    elif found.tokens_per_event and abs(found.tokens_per_event - 1) > 0.02:
        yield (
            f"an event had {found.tokens_per_event:.2f} tokens on average: inter-token latency is "
            "measured between events, time per output token counts tokens"
        )
    yield (
        f"the load generator used {cpu_seconds / found.seconds:.1%} of a core, "
        f"{cpu_seconds / max(found.output_tokens, 1) * 1e6:,.0f} µs per token"
    )
    if found.lateness is not None and found.lateness.p99 > TOO_LATE:
        yield (
            f"the load generator could not keep up: 1 % of the requests were sent more than "
            f"{found.lateness.p99 * 1e3:,.0f} ms late, and their latencies include that delay"
        )
