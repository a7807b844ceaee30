"""The mystery server: unlabelled runs with one fault each, and knobs to try.

The faults stand below. Open this file after you have tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from minigen.bench.workload import poisson
from minigen.errors import RequestError
from minigen_course.ch52_slo.lesson import (
    System,
    Vitals,
    in_order,
    num_equal,
)
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import MOST_SEQS, Ask, Knobs, Run, asks, simulate

MEMORY_BLOCKS = Knobs().num_blocks  # as many as the card holds beside weights and working memory
NEAR = 0.8  # of the goodput that the course's own knob reaches
GOALS = {
    1: 1.59,
    2: 4.01,
    3: 0.93,
    4: 1.07,
    5: 1.3,
    6: 1.02,
}  # `NEAR` times the cures' goodput; a test computes them
NUM_FIXED = 1200  # tokens of the instructions that the prompts of seed 2 share

FLAGS = {  # flag of `minigen serve` -> the layer that owns it, the setting of the simulator
    "--max-num-seqs": ("batching", "max_num_seqs"),
    "--max-num-batched-tokens": ("batching", "max_num_batched_tokens"),
    "--scheduler": ("batching", "scheduler"),
    "--num-blocks": ("engine", "num_blocks"),
    "--kv-cache-dtype": ("engine", "kv_cache_dtype"),
    "--enable-prefix-caching": ("engine", "enable_prefix_caching"),
    "--no-enable-prefix-caching": ("engine", "enable_prefix_caching"),
    "--max-queue": ("gateway", "max_queue"),
    "--max-in-flight-per-key": ("gateway", "max_in_flight_per_key"),
}


@dataclass(frozen=True)
class Diagnosis:
    """A saturated resource, the layer whose knob mends it, and the knob: `--max-num-seqs 64`.

    `resource` is one of `RESOURCES`, `layer` one of `LAYERS`, and `knob` one of `FLAGS` with its
    value.
    """

    resource: str
    layer: str
    knob: str


def diagnose(seed: int) -> Diagnosis:
    """Return the diagnosis of the mystery server of this seed, 1 to 6.

    Its resource is the one that is saturated, its layer owns the knob, and the knob is one flag of
    `minigen serve`, with its value if it takes one, as in
    `Diagnosis("blocks", "engine", "--num-blocks 2000")`.
    """
    answers = (
        Diagnosis("batch slots", "batching", "--max-num-seqs 64"),
        Diagnosis("arithmetic", "engine", "--enable-prefix-caching"),
        Diagnosis("arithmetic", "gateway", "--max-in-flight-per-key 1"),
        Diagnosis("token budget", "batching", "--max-num-batched-tokens 512"),
        Diagnosis("nothing", "batching", "--scheduler continuous"),
        Diagnosis("blocks", "engine", "--num-blocks 3300"),
    )
    return answers[seed - 1]


package_diagnosis = diagnose  # a learner's own may replace the name


@cache
def mystery_system(seed: int) -> System:
    """Return the load and the settings of the mystery server of a seed, 1 to 6.

    Raises `ValueError` for any other seed.
    """
    rng = np.random.default_rng
    if seed == 1:
        load = asks(poisson(2.5, 80, rng(21)), (80, 300), (120, 240), seed=21)
        return started(load, slots=16, budget=8192, blocks=1200, prefix_cache=False)
    if seed == 2:
        load = asks(poisson(6, 100, rng(22)), (20, 80), (30, 90), seed=22, shared=range(NUM_FIXED))
        return started(load, slots=32, budget=512, prefix_cache=False)
    if seed == 3:
        people = asks(poisson(2, 80, rng(23)), (80, 300), (60, 120), seed=23)
        named = [replace(ask, tenant=f"user {number}") for number, ask in enumerate(people)]
        crawler = asks(poisson(1.3, 48, rng(33)), (5000, 7000), (10, 30), seed=33, tenant="crawler")
        return started(named, crawler, slots=32, budget=512, prefix_cache=False)
    if seed == 4:
        load = asks(poisson(1.5, 80, rng(24)), (1200, 2000), (60, 120), seed=24)
        return started(load, slots=24, budget=8192, blocks=2000)
    if seed == 5:
        load = asks(poisson(2, 80, rng(25)), (60, 200), (10, 200), seed=25)
        return started(
            load, scheduler="static", slots=32, budget=8192, blocks=1200, prefix_cache=False
        )
    if seed == 6:
        load = asks(poisson(1.6, 95, rng(26)), (600, 1000), (150, 300), seed=26)
        return started(load, slots=32, budget=512, blocks=1200, prefix_cache=False)
    raise ValueError(f"There are mystery servers of seed 1 to 6, and no {seed}.")


def started(
    *loads: Sequence[Ask],
    scheduler: str = "continuous",
    slots: int,
    budget: int,
    blocks: int = MEMORY_BLOCKS,
    prefix_cache: bool = True,
) -> System:
    """Return the loads and a server; an odd setting is a fault in one seed, harmless in others."""
    knobs = Knobs(scheduler, slots, budget, blocks, enable_prefix_caching=prefix_cache)
    return System(in_order(*loads), knobs)


def layer_of(knob: str) -> str:
    """Return the layer that owns a knob. Raises `ValueError` for an unknown one."""
    return FLAGS[read_knob(knob)[0]][0]


@cache
def treated(seed: int, knob: str | None = None) -> Run:
    """Return a run of a mystery server, with one knob turned if `knob` names one.

    Raises `ValueError` for a knob that is unknown, has a wrong value, needs more memory than the
    card has, or leaves too few blocks for a request.
    """
    system, card = mystery_system(seed), Card()
    if knob is None:
        return simulate(system.load, system.knobs, card)
    flag, value = read_knob(knob)
    knobs = system.knobs
    if flag == "--kv-cache-dtype":
        knobs, card = replace(knobs, num_blocks=2 * knobs.num_blocks), Card(kv_bits=8)
    else:
        changed: dict[str, Any] = {FLAGS[flag][1]: value}
        knobs = replace(knobs, **changed)
    try:
        return simulate(system.load, knobs, card)
    except RequestError as error:
        raise ValueError(str(error)) from error


@cache
def vitals_of(seed: int, knob: str | None = None) -> Vitals:
    """Return the vital signs of `treated(seed, knob)`."""
    return Vitals.of(treated(seed, knob))


def goodput_of(seed: int, knob: str | None = None) -> float:
    """Return the requests per second that met both objectives, with one knob turned if given."""
    found = vitals_of(seed, knob).found.goodput
    assert found is not None
    return found


def goal_of(seed: int) -> float:
    """Return the goodput that a knob must reach: `NEAR` times that of the course's diagnosis."""
    return GOALS[seed]


def command_of(knobs: Knobs) -> list[str]:
    """Return the flags with which a server was started, those that matter here."""
    cached = "" if knobs.enable_prefix_caching else "no-"
    return [
        f"--scheduler {knobs.scheduler}",
        f"--max-num-seqs {knobs.max_num_seqs}",
        f"--max-num-batched-tokens {knobs.max_num_batched_tokens}",
        f"--num-blocks {knobs.num_blocks}",
        f"--{cached}enable-prefix-caching",
    ]


def mystery(*seeds: int) -> None:
    """Print the flags, the traffic and the vital signs of mystery servers, side by side."""
    for seed in seeds:
        print(f"{seed}: minigen serve {' '.join(command_of(mystery_system(seed).knobs))}")
    columns = [{**_traffic(seed), **vitals_of(seed).rows()} for seed in seeds]
    print("\n" + " " * 30 + "".join(f"{f'seed {seed}':>11}" for seed in seeds))
    for name in columns[0]:
        print(f"  {name:<28}" + "".join(f"{column[name]:>11}" for column in columns))
    print("\nThe signs are of all keys together; a refused request keeps no objective.")
    print(f"Knobs: {', '.join(FLAGS)} (the cache: int8).")


def try_knob(seed: int, knob: str) -> None:
    """Turn one knob of a mystery server, and print the vital signs before and after.

    Raises `ValueError` as `treated` does.
    """
    before, after = vitals_of(seed).rows(), vitals_of(seed, knob).rows()
    print(f"seed {seed}, {knob}\n")
    print(" " * 30 + f"{'before':>12}{'after':>12}")
    for name, value in before.items():
        mark = "*" if value != after[name] else " "
        print(f"{mark} {name:<28}{value:>12}{after[name]:>12}")
    goal, found = goal_of(seed), goodput_of(seed, knob)
    said = "reached" if found >= goal else "not reached"
    print(f"\nGoodput should reach {goal:.2f} requests per second: {said} ({found:.2f}).")


def _traffic(seed: int) -> dict[str, str]:
    """Return what a gateway's log says of the requests, by its name in the table."""
    load = mystery_system(seed).load
    prompts = [len(ask.prompt_ids) for ask in load]
    by_key: dict[str, int] = {}
    for ask in load:
        by_key[ask.tenant] = by_key.get(ask.tenant, 0) + len(ask.prompt_ids)
    seconds = max(ask.at for ask in load)
    return {
        "arrivals per second": f"{len(load) / seconds:.1f}",
        "prompt tokens, p50": f"{np.percentile(prompts, 50):,.0f}",
        "prompt tokens, p99": f"{np.percentile(prompts, 99):,.0f}",
        "answer tokens, mean": f"{np.mean([ask.output_tokens for ask in load]):.0f}",
        "equal first tokens": f"{num_equal(load):,}",
        "API keys": f"{len(by_key)}",
        "prompt tokens, largest key": f"{max(by_key.values()) / sum(prompts):.0%}",
    }


def read_knob(knob: str) -> tuple[str, str | int | bool]:
    """Return a knob's flag and its value. Raises `ValueError` for a knob that does not exist."""
    words = knob.split() if isinstance(knob, str) else []
    flag = words[0] if words else ""
    if flag not in FLAGS:
        raise ValueError(f"The knob is {knob!r}; it should be one of {', '.join(FLAGS)}.")
    if flag.endswith("enable-prefix-caching"):
        if len(words) > 1:
            raise ValueError(f"{flag} has no value; it should stand alone, not {knob!r}.")
        return flag, flag == "--enable-prefix-caching"
    if len(words) != 2:
        raise ValueError(f"{flag} should have one value, as in `{flag} 64`, not {knob!r}.")
    value = words[1]
    if flag == "--scheduler":
        known: tuple[str, ...] = ("continuous", "static", "dynamic")
    elif flag == "--kv-cache-dtype":
        known = ("int8",)
    else:
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{flag} should be a number of 1 or more, not {value!r}.")
        if flag == "--max-num-seqs" and int(value) > MOST_SEQS:
            raise ValueError(f"{flag} should be at most {MOST_SEQS}, not {value}.")
        if flag == "--num-blocks" and int(value) > MEMORY_BLOCKS:
            raise ValueError(
                f"{flag} should be at most {MEMORY_BLOCKS:,}, because the card's memory holds no "
                f"more, not {int(value):,}."
            )
        return flag, int(value)
    if value not in known:
        raise ValueError(f"{flag} should be {' or '.join(known)}, not {value!r}.")
    return flag, value
