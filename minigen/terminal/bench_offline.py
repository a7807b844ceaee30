"""`minigen bench throughput` and `latency`: the engine by itself, many requests or one alone."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minigen.llm import LLM
from minigen.params import SamplingParams
from minigen.server.arrivals import Span
from minigen.server.slo import Spread
from minigen.terminal.bench_report import NAMES, check_lengths, spreads
from minigen.terminal.files import written


@dataclass(frozen=True)
class Lengths:
    """How long prompts and answers are, in tokens, drawn by a seed."""

    inputs: Span
    outputs: Span
    seed: int

    def draw(self, llm: LLM, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """So many prompts of random tokens, no two alike, and what is asked of each.

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
    """Answer all requests at once; print requests and tokens a second."""
    prompts, params = lengths.draw(llm, num_requests)
    _warm_up(llm, lengths)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begun
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
    table.add_row("all of it", f"{seconds:,.2f} s")
    Console().print(table)
    _write(llm, lengths, found, json_file)


def run_latency(llm: LLM, turns: int, lengths: Lengths, json_file: Path | None) -> None:
    """Answer one request after the other; print how their first tokens and gaps spread."""
    requests = lengths.draw(llm, turns)
    _warm_up(llm, lengths)
    waits: list[float] = []
    gaps: list[float] = []
    ends: list[float] = []
    with Console(stderr=True).status("measuring"):
        for prompt, params in zip(*requests, strict=True):
            begun = time.perf_counter()
            stamps = [time.perf_counter() for _ in llm.stream_deltas([prompt], params)]
            waits.append(stamps[0] - begun)
            gaps += [after - before for before, after in pairwise(stamps)]
            ends.append(stamps[-1] - begun)
    found = {"ttft": Spread.of(waits), "itl": Spread.of(gaps), "e2e": Spread.of(ends)}
    title = _title(llm, f"one request alone, {turns} times")
    Console(highlight=False).print(
        spreads(title, {NAMES[name]: spread for name, spread in found.items()})
    )
    numbers = {name: asdict(spread) if spread else None for name, spread in found.items()}
    _write(llm, lengths, {"turns": turns, "seconds": numbers}, json_file)


def _warm_up(llm: LLM, lengths: Lengths) -> None:
    """Two requests of other prompts, since what runs first pays for pages and compilers."""
    prompts, params = Lengths(lengths.inputs, Span(2, 2), lengths.seed + 1).draw(llm, 2)
    llm.generate(prompts, params, progress=False)


def _title(llm: LLM, what: str) -> str:
    choices = llm.describe()
    return f"{choices['weights'].split()[0]}, {choices['threads']} threads, {what}"


def _write(llm: LLM, lengths: Lengths, found: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file is None:
        return
    engine = {name: choice for name, choice in llm.describe().items() if name != "model"}
    told = {"engine": engine, "load": asdict(lengths), **found}
    with written("json", json_file):
        json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
