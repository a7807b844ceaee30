"""Measure the engine without a server: a single request, and many requests together."""

import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minigen import __version__
from minigen.bench.report import NAMES, Spread, check_lengths, print_spreads
from minigen.bench.workload import Span
from minigen.config import written
from minigen.errors import OptionError
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams

TOGETHER = (
    "with speculation, the tokens of one step arrive together: inter-token latency has gaps of "
    "next to nothing, time per output token is the mean over all tokens"
)


@dataclass(frozen=True)
class Workload:
    """A benchmark load: the number of requests, their lengths in tokens, and the repetitions."""

    num_requests: int
    input_tokens: int
    output_tokens: int
    turns: int

    def __post_init__(self) -> None:
        for name, least in (
            ("num_requests", 1),
            ("input_tokens", 1),
            ("output_tokens", 2),
            ("turns", 1),
        ):
            if getattr(self, name) < least:
                shown = name.removeprefix("num_").replace("_", "-")
                raise OptionError(f"--{shown} must be at least {least}.")


@dataclass(frozen=True)
class Turn:
    """One repetition: `first_token` in seconds, the other fields in tokens per second."""

    first_token: float
    prefill: float
    decode: float
    together: float


def run_bench(llm: LLM, load: Workload, json_file: Path | None) -> None:
    """Run the load `turns` times, print the medians, and write all turns to `json_file`."""
    check_lengths(load.input_tokens + load.output_tokens, llm.config.max_positions)
    console = Console(stderr=True)
    rng = random.Random(0)
    few = min(load.num_requests, 2), load.input_tokens, min(load.output_tokens, 4)
    _take_turn(llm, Workload(*few, turns=1), rng)  # warm up, within the limits of the load
    turns = []
    with console.status("measuring") as status:
        for number in range(load.turns):
            status.update(f"measuring, turn {number + 1} of {load.turns}")
            turns.append(_take_turn(llm, load, rng))
    medians = Turn(
        *(
            statistics.median(each)
            for each in zip(*(asdict(turn).values() for turn in turns), strict=True)
        )
    )
    Console().print(_table(llm, load, medians))
    if json_file is not None:
        found = {
            **_about(llm),
            "load": asdict(load),
            "turns": [asdict(turn) for turn in turns],
        }
        with written("json", json_file) as file:
            file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _take_turn(llm: LLM, load: Workload, rng: random.Random) -> Turn:
    """Measure once, with new prompts so that none hits the prefix cache of an earlier turn."""
    params = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    first, *rest = (_random_prompt(llm, load.input_tokens, rng) for _ in range(load.num_requests))
    started = time.perf_counter()
    stamps = [time.perf_counter() for _ in llm.stream_deltas([first], params)]
    alone = stamps[0] - started
    others = [_random_prompt(llm, load.input_tokens, rng), *rest]
    started = time.perf_counter()
    llm.generate(others, params, progress=False)
    seconds = time.perf_counter() - started
    return Turn(
        first_token=alone,
        prefill=load.input_tokens / alone,
        decode=(load.output_tokens - 1) / (stamps[-1] - stamps[0]),
        together=load.num_requests * load.output_tokens / seconds,
    )


def _random_prompt(llm: LLM, num_tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(llm.config.vocab_size) for _ in range(num_tokens)]


def _table(llm: LLM, load: Workload, medians: Turn) -> Table:
    choices = llm.describe()
    table = Table(
        title=f"{choices['weights'].split()[0]}, {choices['threads']} threads, "
        f"{load.input_tokens} tokens in, {load.output_tokens} out, "
        f"median of {load.turns}",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_row("one request: time to the first token", f"{medians.first_token * 1e3:.0f} ms")
    table.add_row("one request: prefill", f"{medians.prefill:,.0f} tokens/s")
    table.add_row("one request: decode", f"{medians.decode:,.1f} tokens/s")
    table.add_row(f"{load.num_requests} requests: output", f"{medians.together:,.1f} tokens/s")
    return table


@dataclass(frozen=True)
class Lengths:
    """The lengths of prompts and outputs in tokens, drawn with a seed."""

    inputs: Span
    outputs: Span
    seed: int

    def draw(self, llm: LLM, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Draw `count` prompts of random tokens, and the sampling parameters of each.

        Raises `OptionError` for lengths that do not fit into the model's context.
        """
        check_lengths(self.inputs.most + self.outputs.most, llm.config.max_positions)
        rng = np.random.default_rng(self.seed)
        sizes = [(self.inputs.draw(rng), self.outputs.draw(rng)) for _ in range(count)]
        prompts = [rng.integers(llm.config.vocab_size, size=size).tolist() for size, _ in sizes]
        return prompts, [
            SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for _, size in sizes
        ]


def run_throughput(llm: LLM, num_requests: int, lengths: Lengths, json_file: Path | None) -> None:
    """Run all requests at once; print requests and tokens per second."""
    prompts, params = lengths.draw(llm, num_requests)
    _warm_up(llm, lengths)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - started
    num_out = sum(len(each.token_ids) for each in outputs)
    found = {
        "requests": num_requests,
        "seconds": seconds,
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": num_out,
        "requests_per_second": num_requests / seconds,
        "output_tokens_per_second": num_out / seconds,
        "tokens_per_second": (sum(map(len, prompts)) + num_out) / seconds,
    }
    table = Table(title=_title(llm, f"{num_requests} requests at once"), title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_row("requests", f"{found['requests_per_second']:,.2f} requests/s")
    table.add_row("output", f"{found['output_tokens_per_second']:,.1f} tokens/s")
    table.add_row("input and output", f"{found['tokens_per_second']:,.1f} tokens/s")
    table.add_row("total time", f"{seconds:,.2f} s")
    Console().print(table)
    _write(llm, lengths, found, json_file)


def run_latency(llm: LLM, turns: int, lengths: Lengths, json_file: Path | None) -> None:
    """Run one request after the other; print the distributions of TTFT, ITL, TPOT and total time.

    The tokens that speculation adds to a step arrive together, so their gaps are next to nothing.
    """
    requests = lengths.draw(llm, turns)
    _warm_up(llm, lengths)
    waits: list[float] = []
    gaps: list[float] = []
    per_token: list[float] = []
    ends: list[float] = []
    with Console(stderr=True).status("measuring"):
        for prompt, params in zip(*requests, strict=True):
            started = time.perf_counter()
            stamps = [time.perf_counter() for _ in llm.stream_deltas([prompt], params)]
            waits.append(stamps[0] - started)
            gaps += [after - before for before, after in pairwise(stamps)]
            per_token += [(stamps[-1] - stamps[0]) / (len(stamps) - 1)] if len(stamps) > 1 else []
            ends.append(stamps[-1] - started)
    found = {"ttft": Spread.of(waits), "itl": Spread.of(gaps), "tpot": Spread.of(per_token)}
    found["e2e"] = Spread.of(ends)
    title = _title(llm, f"one request alone, {turns} times")
    console = print_spreads(title, {NAMES[name]: spread for name, spread in found.items()})
    if llm.options.speculative_config is not None:
        console.print(TOGETHER, soft_wrap=True)
    numbers = {name: asdict(spread) if spread else None for name, spread in found.items()}
    _write(llm, lengths, {"turns": turns, "seconds": numbers}, json_file)


def _warm_up(llm: LLM, lengths: Lengths) -> None:
    """Run two requests with other prompts, because the first run pays for pages and compilers."""
    few = min(2, lengths.outputs.most)  # within the limits of the load
    prompts, params = Lengths(lengths.inputs, Span(few, few), lengths.seed + 1).draw(llm, 2)
    llm.generate(prompts, params, progress=False)


def _about(llm: LLM) -> dict[str, Any]:
    """Return what is measured: minigen's version and the engine's choices, without a path."""
    choices = llm.describe()
    kind, _, path = choices["model"].rpartition(", from ")
    engine = {**choices, "model": f"{kind}, from {Path(path).name}"}
    return {"minigen": __version__, "engine": engine}


def _title(llm: LLM, what: str) -> str:
    choices = llm.describe()
    return f"{choices['weights'].split()[0]}, {choices['threads']} threads, {what}"


def _write(llm: LLM, lengths: Lengths, found: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file is None:
        return
    document = {**_about(llm), "load": asdict(lengths), **found}
    with written("json", json_file) as file:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
