"""`minigen bench`: what this machine does with a model, one request alone and many together."""

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from minigen.errors import OptionError
from minigen.llm import LLM
from minigen.params import SamplingParams
from minigen.terminal.bench_report import check_lengths
from minigen.terminal.files import written


@dataclass(frozen=True)
class Workload:
    """What is asked of the engine: requests of so many tokens in and out, a number of times."""

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
    """One turn's seconds to the first token, and tokens a second."""

    first_token: float
    prefill: float
    decode: float
    together: float


def run_bench(llm: LLM, load: Workload, json_file: Path | None) -> None:
    """Measure by turns, print the medians, and write every turn to `json_file` if there is one."""
    check_lengths(load.input_tokens + load.output_tokens, llm.config.max_positions)
    console = Console(stderr=True)
    rng = random.Random(0)
    _take_turn(llm, Workload(min(load.num_requests, 2), load.input_tokens, 4, 1), rng)  # warm up
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
            "engine": {name: choice for name, choice in llm.describe().items() if name != "model"},
            "load": asdict(load),
            "turns": [asdict(turn) for turn in turns],
        }
        with written("json", json_file):
            json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _take_turn(llm: LLM, load: Workload, rng: random.Random) -> Turn:
    """New prompts every time, so that no turn finds the last one's beginnings in the cache."""
    params = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    first, *rest = (_random_prompt(llm, load.input_tokens, rng) for _ in range(load.num_requests))
    begun = time.perf_counter()
    stamps = [time.perf_counter() for _ in llm.stream_deltas([first], params)]
    alone = stamps[0] - begun
    others = [_random_prompt(llm, load.input_tokens, rng), *rest]
    begun = time.perf_counter()
    llm.generate(others, params, progress=False)
    seconds = time.perf_counter() - begun
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
