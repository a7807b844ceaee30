"""`minigen bench serve`: a load is planned, put on a server, and told of."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minigen.bench.client import Target, find_model, open_loop, send
from minigen.bench.report import Outcome, Report, Slo, print_report, report
from minigen.bench.workload import (
    Arrival,
    Planned,
    Span,
    burst,
    constant,
    plan,
    plan_with,
    poisson,
    read_prompts,
    read_trace,
)
from minigen.config import written
from minigen.errors import LoadError, OptionError

DEFAULT_RATE, DEFAULT_REQUESTS, DEFAULT_TOKENS = 4.0, 200, "64"


@dataclass(frozen=True)
class RequestMix:
    """The load that was asked for, as the options have it; None is what was left to the default."""

    arrivals: str
    rate: float | None
    requests: int | None
    input_tokens: str | None
    output_tokens: str | None
    dataset: Path | None
    seed: int

    def plan(self, endpoint: str) -> list[Planned]:
        """The requests in order of time.

        Raises `OptionError` for options that contradict each other, `LoadError` for broken files.
        """
        if self.dataset is None:
            return plan(self._arrivals(), self.seed)
        if self.input_tokens is not None:
            raise OptionError("--dataset has its own prompts: leave --input-tokens out.")
        prompts = read_prompts(self.dataset)
        if endpoint == "completions" and not all(isinstance(each, str) for each in prompts):
            raise OptionError(f"{self.dataset} has messages: they need --endpoint chat.")
        return plan_with(self._arrivals(), prompts)

    def words(self) -> str:
        """When requests come, in words."""
        if self.arrivals in ("poisson", "constant"):
            return f"{self.arrivals} arrivals, {self._rate():g} a second"
        return "all at once" if self.arrivals == "burst" else f"as in {self.arrivals}"

    def _arrivals(self) -> list[Arrival]:
        if self.arrivals.endswith(".jsonl"):
            if (self.rate, self.input_tokens, self.output_tokens) != (None, None, None):
                raise OptionError(
                    "A trace says when its requests come and how long they are: leave --rate, "
                    "--input-tokens and --output-tokens out."
                )
            return read_trace(Path(self.arrivals))[: self.requests]
        rng = np.random.default_rng(self.seed)
        inputs = Span.parse("input-tokens", self.input_tokens or DEFAULT_TOKENS)
        outputs = Span.parse("output-tokens", self.output_tokens or DEFAULT_TOKENS)
        return [Arrival(at, inputs.draw(rng), outputs.draw(rng)) for at in self._times(rng)]

    def _times(self, rng: np.random.Generator) -> list[float]:
        count = self.requests or DEFAULT_REQUESTS
        match self.arrivals:
            case "poisson":
                return poisson(self._rate(), count, rng)
            case "constant":
                return constant(self._rate(), count)
            case "burst" if self.rate is None:
                return burst(count)
            case "burst":
                raise OptionError("A burst comes all at once: leave --rate out.")
        raise OptionError(
            f"--arrivals is poisson, constant, burst, or a file that ends in .jsonl, not "
            f"{self.arrivals!r}."
        )

    def _rate(self) -> float:
        rate = DEFAULT_RATE if self.rate is None else self.rate
        if not 0 < rate < 1e6:
            raise OptionError(f"--rate is a number of requests a second above 0, not {rate:g}.")
        return rate


def run_serve(
    target: Target,
    asked: RequestMix,
    slos: Sequence[Slo],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Put the load on the server; the table goes to stdout, the rest where it was asked for.

    Raises `LoadError` if no request at all was answered.
    """
    for name, path in (("json", json_file), ("plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"--{name} {path} cannot be written: there is no such folder.")
    load = asked.plan(target.endpoint)
    started = time.process_time()
    target, outcomes = asyncio.run(_put(target, load))
    cpu_seconds = time.process_time() - started
    found = report(outcomes, slos)
    if json_file is not None:
        told = _as_json(target, asked, slos, found, cpu_seconds, outcomes)
        with written("json", json_file):
            json_file.write_text(json.dumps(told) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(outcomes, slos, plot)
    if not found.num_answered:
        (kind, count), *_ = found.errors.items()
        raise LoadError(
            f"None of {found.num_requests} requests was answered; {count} of them: {kind} "
            f"({found.details[kind]})."
        )
    usage = all(each.has_usage for each in outcomes if each.error is None)
    title = f"{target.model} at {target.url}: {asked.words()}"
    print_report(title, found, usage, cpu_seconds)


async def _put(target: Target, load: Sequence[Planned]) -> tuple[Target, list[Outcome]]:
    """Find the model, and send it the load, with a bar on stderr."""
    bar = Progress(
        TextColumn("{task.fields[under_way]} under way, answered"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,  # the bar's own thread costs the server time, too
    )
    async with target.session() as session:
        target = replace(target, model=await find_model(session, target))
        task = bar.add_task("load", total=len(load), under_way=0)
        counts = {"sent": 0, "ended": 0}

        def tell(what: str) -> None:
            counts[what] += 1
            under_way = counts["sent"] - counts["ended"]
            bar.update(task, completed=counts["ended"], under_way=under_way)

        with bar:
            outcomes = await open_loop(
                load,
                lambda request, clock: send(session, target, request, clock),
                lambda: tell("sent"),
                lambda outcome: tell("ended"),
            )
    return target, outcomes


def _draw(outcomes: Sequence[Outcome], slos: Sequence[Slo], plot: Path) -> None:
    from minigen.bench.figures import load_figure

    with written("plot", plot):
        load_figure(outcomes, slos).savefig(plot, dpi=150, format="png")
    print(f"drawn: {plot}", file=sys.stderr)


def _as_json(
    target: Target,
    asked: RequestMix,
    slos: Sequence[Slo],
    found: Report,
    cpu_seconds: float,
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """All of it but the key; a request's times in seconds after the load began."""
    whom = {name: value for name, value in asdict(target).items() if name != "api_key"}
    what = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(asked).items()
    }
    return {
        "target": whom,
        "load": what,
        "slos": [asdict(each) for each in slos],
        "client": {"aiohttp": version("aiohttp"), "cpu_seconds": cpu_seconds},
        "report": found.as_dict(),
        "requests": [asdict(each) for each in outcomes],
    }
