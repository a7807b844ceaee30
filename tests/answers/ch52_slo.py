"""Answers to the exercises of chapter 52."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np

from minigen_course.ch52_slo.capstone import Plan, package_plan
from minigen_course.ch52_slo.mystery import Diagnosis, package_diagnosis
from tests.answers import Answers


async def with_tasks(send: Any, times: Any, percents: Any) -> dict[float, float]:
    """Right, with tasks that are started one by one, and numpy's nearest-rank method."""
    loop = asyncio.get_running_loop()
    start, found = loop.time(), [math.inf] * len(times)

    async def one(number: int) -> None:
        await send(number)
        found[number] = loop.time() - (start + times[number])

    tasks = []
    for number in sorted(range(len(times)), key=lambda each: times[each]):
        wait = start + times[number] - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(loop.create_task(one(number)))
    await asyncio.gather(*tasks, return_exceptions=True)
    ranks = np.sort(found)
    return {p: float(np.percentile(ranks, p, method="inverted_cdf")) for p in percents}


async def with_timers(send: Any, times: Any, percents: Any) -> dict[float, float]:
    """Right, with the loop's timers, and percentiles by counting."""
    loop = asyncio.get_running_loop()
    start, latencies, done = loop.time(), [], asyncio.Event()

    async def one(number: int) -> None:
        try:
            await send(number)
            latencies.append(loop.time() - start - times[number])
        except Exception:
            latencies.append(float("inf"))
        if len(latencies) == len(times):
            done.set()

    tasks: list[Any] = []
    for number, at in enumerate(times):
        loop.call_at(start + at, lambda number=number: tasks.append(loop.create_task(one(number))))
    await done.wait()
    kept = {}
    for p in percents:
        kept[p] = min(
            each
            for each in latencies
            if 100 * sum(other <= each for other in latencies) >= p * len(latencies)
        )
    return kept


def wrong(name: str) -> Any:
    """Return the answer with one mistake."""

    def percentile(values: list[float], p: float) -> float:
        n = len(values)
        place = math.ceil(p * n / 100) - 1
        if name == "no interpolation is too coarse":
            return float(np.percentile(values, p))
        if name == "percent rounded down":
            place = max(int(p * n / 100) - 1, 0)
        if name == "one rank too high":
            place = min(place + 1, n - 1)
        if name == "always the largest":
            place = n - 1
        if name == "percent as a share":
            place = min(math.ceil(p * n) - 1, n - 1)
        if name == "from the other end":
            place = n - 1 - place
        return values[place]

    async def measure(send: Any, times: Any, percents: Any) -> Any:
        clock = asyncio.get_running_loop().time
        started, failed = clock(), [False]

        async def one(number: int) -> float | None:
            if name != "all at once":
                await asyncio.sleep(max(started + times[number] - clock(), 0))
            if name == "sleeps once more":
                await asyncio.sleep(0.01)
            sent = clock()
            try:
                await send(number)
            except Exception:
                failed[0] = True
                if name == "failures raise":
                    raise
                if name == "failures left out":
                    return None
                if name == "failures are quick answers":
                    return clock() - sent
                if name == "failures are zero":
                    return 0.0
                return math.inf
            if name == "from when it was sent":
                return clock() - sent
            if name == "from the beginning of all":
                return clock() - started
            if name == "milliseconds":
                return 1e3 * (clock() - started - times[number])
            return clock() - started - times[number]

        found: list[float | None] = []
        if name in ("one after the other", "closed loop"):
            for number in range(len(times)):
                if name == "closed loop":
                    sent = clock()
                    try:
                        await send(number)
                        found.append(clock() - sent)
                    except Exception:
                        found.append(math.inf)
                else:
                    found.append(await one(number))
        elif name == "two at a time":
            for first in range(0, len(times), 2):
                pair = range(first, min(first + 2, len(times)))
                found += await asyncio.gather(*map(one, pair))
        else:
            found = list(await asyncio.gather(*map(one, range(len(times)))))
        values = [each for each in found if each is not None]
        if name != "not sorted":
            values.sort()
        if name == "mean of percentiles":
            parts = [[each for each in found[k : k + 50] if each is not None] for k in (0, 50, 150)]
            parts = [sorted(part) for part in parts if part]
            return {p: sum(percentile(q, p) for q in parts) / len(parts) for p in percents}
        if name == "the mean":
            return dict.fromkeys(percents, sum(values) / len(values))
        if name == "outliers left out" and len(values) > 4:
            values = values[:-1]
        if name == "a list":
            return [percentile(values, p) for p in percents]
        if name == "names as text":
            return {f"p{p}": percentile(values, p) for p in percents}
        return {p: percentile(values, p) for p in percents}

    async def forgets_the_last(send: Any, times: Any, percents: Any) -> Any:
        return await measure(send, times[:-1] or times, percents)

    async def warms_up(send: Any, times: Any, percents: Any) -> Any:
        await send(0)
        return await measure(send, times, percents)

    def no_coroutine(send: Any, times: Any, percents: Any) -> Any:
        return dict.fromkeys(percents, 0.0)

    whole = {
        "last request forgotten": forgets_the_last,
        "warms up with a request": warms_up,
        "not a coroutine": no_coroutine,
    }
    return whole.get(name, measure)


WRONG = [
    *("no interpolation is too coarse", "percent rounded down", "one rank too high"),
    *("always the largest", "percent as a share", "from the other end", "all at once"),
    *("sleeps once more", "failures raise", "failures left out", "failures are quick answers"),
    *("failures are zero", "from when it was sent", "from the beginning of all", "milliseconds"),
    *("one after the other", "closed loop", "two at a time", "not sorted"),
    *("mean of percentiles", "the mean", "outliers left out", "a list", "names as text"),
    *("last request forgotten", "warms up with a request", "not a coroutine"),
]


def by_numbers(seed: int) -> Diagnosis:
    """Right, with other values and other knobs where they help as much."""
    found = {
        1: ("batch slots", "batching", "--max-num-seqs 128"),
        2: ("arithmetic", "engine", "--enable-prefix-caching"),
        3: ("arithmetic", "gateway", "--max-in-flight-per-key 2"),
        4: ("token budget", "batching", "--max-num-batched-tokens 640"),
        5: ("nothing", "batching", "--scheduler continuous"),
        6: ("blocks", "engine", "--kv-cache-dtype int8"),
    }
    return Diagnosis(*found[seed])


def with_keywords(seed: int) -> Diagnosis:
    """Right, one case after the other."""
    if seed == 1:
        return Diagnosis(resource="batch slots", knob="--max-num-seqs 48", layer="batching")
    if seed == 6:
        return Diagnosis(resource="blocks", knob="--num-blocks 3000", layer="engine")
    return package_diagnosis(seed)


def other(seed: int, *changed: Any) -> Any:
    """Return the package's diagnoses with that of one seed replaced."""

    def diagnose(number: int) -> Any:
        if number != seed:
            return package_diagnosis(number)
        return changed[0] if len(changed) == 1 else Diagnosis(*changed)

    return diagnose


def another_plan(**changed: Any) -> Any:
    """Return the package's plan with some fields changed."""
    return lambda: replace(package_plan(), **changed)


ANSWERS = {
    "diagnose": Answers(
        right=(by_numbers, with_keywords),
        wrong={
            "full queue refused": other(1, "batch slots", "gateway", "--max-queue 4"),
            "more blocks for free blocks": other(1, "blocks", "engine", "--kv-cache-dtype int8"),
            "fewer slots": other(1, "batch slots", "batching", "--max-num-seqs 8"),
            "engine owns the slots": other(1, "batch slots", "engine", "--max-num-seqs 64"),
            "queue for repeated work": other(2, "arithmetic", "gateway", "--max-queue 4"),
            "more slots for full arithmetic": other(
                *(2, "arithmetic", "batching", "--max-num-seqs 128")
            ),
            "free memory given away": other(3, "blocks", "engine", "--kv-cache-dtype int8"),
            "queue for one tenant": other(3, "arithmetic", "gateway", "--max-queue 4"),
            "larger steps": other(
                *(4, "token budget", "batching", "--max-num-batched-tokens 16384")
            ),
            "arithmetic for long gaps": other(
                *(4, "arithmetic", "batching", "--max-num-batched-tokens 512")
            ),
            "more slots for empty slots": other(
                *(5, "batch slots", "batching", "--max-num-seqs 128")
            ),
            "dynamic batches": other(5, "nothing", "batching", "--scheduler dynamic"),
            "more blocks than memory": other(6, "blocks", "engine", "--num-blocks 6000"),
            "bandwidth": other(6, "bandwidth", "silicon", "--num-blocks 3300"),
            "an unknown flag": other(6, "blocks", "engine", "--more-memory 3300"),
            "a flag without a value": other(6, "blocks", "engine", "--num-blocks"),
            "a flag with a wrong value": other(5, "nothing", "batching", "--scheduler fair"),
            "another word": other(6, "memory", "engine", "--num-blocks 3300"),
            "another layer's word": other(6, "blocks", "L3", "--num-blocks 3300"),
            "a tuple": other(6, ("blocks", "engine", "--num-blocks 3300")),
            "the same for all": lambda seed: package_diagnosis(1),
            "nothing at all": lambda seed: None,
        },
        equivalent={},
    ),
    "load_test": Answers(
        right=(with_tasks, with_timers, wrong("nothing")),
        wrong={name: wrong(name) for name in WRONG},
        equivalent={},
    ),
    "make_plan": Answers(
        right=(
            another_plan(max_num_seqs=128, num_blocks=3000),
            another_plan(max_num_batched_tokens=640, kv_bits=16),
        ),
        wrong={
            "all as it is": Plan,
            "too few slots": another_plan(max_num_seqs=16),
            "too few blocks": another_plan(num_blocks=300),
            "too many blocks": another_plan(num_blocks=20_000),
            "blocks of narrow weights beside wide ones": another_plan(
                weight_bits=16, num_blocks=8000
            ),
            "wide weights": another_plan(weight_bits=16),
            "four bits": another_plan(weight_bits=4),
            "no prefix cache": another_plan(enable_prefix_caching=False),
            "names first": another_plan(instructions_first=False),
            "whole documents at once": another_plan(max_num_batched_tokens=2048),
            "tiny chunks": another_plan(max_num_batched_tokens=64),
            "the job first": another_plan(job_priority=-1),
            "no slots": another_plan(max_num_seqs=0),
            "knobs as a dict": lambda: {"max_num_seqs": 64},
            "nothing at all": lambda: None,
        },
        equivalent={
            "64 -> 65": "a batch slot more is as good",
            "512 -> 513": "a token more per step is as good",
            "6000 -> 6001": "a block more is as good",
            "1 -> 2": "any priority behind the others is the same",
        },
    ),
}
