"""`minigen bench serve`: plan a load, send it to a server, and report the results."""

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

from minigen import __version__
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
from minigen.config import check_outputs, written
from minigen.errors import LoadError, OptionError

DEFAULT_RATE, DEFAULT_REQUESTS, DEFAULT_TOKENS = 4.0, 200, "64"


@dataclass(frozen=True)
class RequestMix:
    """The load that the command-line options describe; None means the default."""

    arrivals: str
    rate: float | None
    requests: int | None
    input_tokens: str | None
    output_tokens: str | None
    dataset: Path | None
    seed: int

    def plan(self, endpoint: str) -> list[Planned]:
        """Return the requests in order of time.

        Raises `OptionError` for options that contradict each other, `LoadError` for invalid files.
        """
        if self.dataset is None:
            return plan(self._arrivals(), self.seed)
        if self.arrivals.endswith(".jsonl"):
            raise OptionError(
                "A trace sets the lengths and the shared prefixes of its prompts: leave --dataset "
                "out."
            )
        if self.input_tokens is not None:
            raise OptionError("--dataset provides the prompts: leave --input-tokens out.")
        prompts = read_prompts(self.dataset)
        if endpoint == "completions" and not all(isinstance(each, str) for each in prompts):
            raise OptionError(f"{self.dataset} contains messages: they need --endpoint chat.")
        return plan_with(self._arrivals(), prompts)

    def words(self) -> str:
        """Describe the arrival times in words."""
        if self.arrivals in ("poisson", "constant"):
            return f"{self.arrivals} arrivals, {self._rate():g} per second"
        return "all at once" if self.arrivals == "burst" else f"as in {self.arrivals}"

    def _arrivals(self) -> list[Arrival]:
        if self.arrivals.endswith(".jsonl"):
            if (self.rate, self.input_tokens, self.output_tokens) != (None, None, None):
                raise OptionError(
                    "A trace sets the times and lengths of its requests: leave --rate, "
                    "--input-tokens and --output-tokens out."
                )
            arrivals = read_trace(Path(self.arrivals))
            if self.requests is not None and self.requests > len(arrivals):
                raise OptionError(
                    f"--requests {self.requests} is more than the {len(arrivals)} requests of the "
                    f"trace {self.arrivals}."
                )
            return arrivals[: self.requests]
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
                raise OptionError("A burst arrives all at once: leave --rate out.")
        raise OptionError(
            f"--arrivals must be poisson, constant, burst, or a file that ends in .jsonl, not "
            f"{self.arrivals!r}."
        )

    def _rate(self) -> float:
        rate = DEFAULT_RATE if self.rate is None else self.rate
        if not 0 < rate < 1e6:
            raise OptionError(
                "--rate must be more than 0 and less than 1,000,000 requests per second, not "
                f"{rate:g}."
            )
        return rate


def run_serve(
    target: Target,
    mix: RequestMix,
    slos: Sequence[Slo],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Send the load to the server, print the report to stdout, and write the requested files.

    Raises `LoadError` if no request succeeded.
    """
    check_outputs(
        {"--json": json_file, "--plot": plot},
        {"--dataset": mix.dataset, "--arrivals": Path(mix.arrivals)},
    )
    load = mix.plan(target.endpoint)
    started = time.process_time()
    target, outcomes = asyncio.run(_run_load(target, load))
    cpu_seconds = time.process_time() - started
    found = report(outcomes, slos)
    if found.num_answered:  # before files are written, which may fail
        usage = all(each.has_usage for each in outcomes if each.error is None)
        title = f"{target.model} at {target.url}: {mix.words()}"
        print_report(title, found, usage, cpu_seconds)
    if json_file is not None:
        document = _as_json(target, mix, slos, found, cpu_seconds, outcomes)
        with written("json", json_file) as file:
            file.write_text(json.dumps(document) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(outcomes, slos, plot)
    if not found.num_answered:
        (kind, count), *_ = found.errors.items()
        raise LoadError(
            f"None of {found.num_requests} requests succeeded; {count} failed with: {kind} "
            f"({found.details[kind]})."
        )


async def _run_load(target: Target, load: Sequence[Planned]) -> tuple[Target, list[Outcome]]:
    """Find the model and send the load, with a progress bar on stderr."""
    bar = Progress(
        TextColumn("{task.fields[in_flight]} in flight, completed"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,  # the bar's thread takes CPU time from the server
    )
    async with target.session() as session:
        target = replace(target, model=await find_model(session, target))
        task = bar.add_task("load", total=len(load), in_flight=0)
        counts = {"sent": 0, "ended": 0}

        def count(event: str) -> None:
            counts[event] += 1
            in_flight = counts["sent"] - counts["ended"]
            bar.update(task, completed=counts["ended"], in_flight=in_flight)

        with bar:
            outcomes = await open_loop(
                load,
                lambda request, clock: send(session, target, request, clock),
                lambda: count("sent"),
                lambda outcome: count("ended"),
            )
    return target, outcomes


def _draw(outcomes: Sequence[Outcome], slos: Sequence[Slo], plot: Path) -> None:
    from minigen.bench.figures import load_figure

    with written("plot", plot) as file:
        load_figure(outcomes, slos).savefig(file, dpi=150, format="png")
    print(f"plot written: {plot}", file=sys.stderr)


def _as_json(
    target: Target,
    mix: RequestMix,
    slos: Sequence[Slo],
    found: Report,
    cpu_seconds: float,
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """Return all results, without the API key; times are seconds after the start of the load."""
    target_fields = {name: value for name, value in asdict(target).items() if name != "api_key"}
    load_fields = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(mix).items()
    }
    return {
        "target": target_fields,
        "load": load_fields,
        "slos": [asdict(each) for each in slos],
        "client": {
            "minigen": __version__,
            "aiohttp": version("aiohttp"),
            "cpu_seconds": cpu_seconds,
        },
        "report": found.as_dict(),
        "requests": [asdict(each) for each in outcomes],
    }
