"""Send load to a running server from a notebook's cell, as `minigen bench serve` does."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from minigen.bench.client import Target, find_model, open_loop, send
from minigen.bench.report import Outcome
from minigen.bench.workload import Planned

T = TypeVar("T")


def put_load(url: str, load: Sequence[Planned], **target: Any) -> list[Outcome]:
    """Send each request at its time, even if earlier ones still run; return all outcomes.

    `target` are further fields of `Target`: endpoint, api_key, ignore_eos.
    """
    return run_apart(_put(Target(url, **target), load))


def run_apart(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread with its own event loop, because notebook cells run in one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, main).result()


async def _put(target: Target, load: Sequence[Planned]) -> list[Outcome]:
    async with target.session() as session:
        target = replace(target, model=await find_model(session, target))
        return await open_loop(load, lambda request, clock: send(session, target, request, clock))


async def load_test(
    send: Callable[[int], Awaitable[object]], times: Sequence[float], percents: Sequence[float]
) -> dict[float, float]:
    """Return percentiles of latency, in seconds, under an open-loop load.

    `send(number)` is started for each request at its time in `times` (seconds after the call), even
    if earlier requests still run. Its latency lasts from that time, even if the start was late,
    until it returns; the latency is infinite if it raises. A percentile is by nearest rank: the
    smallest latency that at least that percentage of all requests did not exceed. Source:
    Schroeder et al. 2006, "Open Versus Closed: A Cautionary Tale".
    """
    clock = asyncio.get_running_loop().time
    started = clock()

    async def latency(number: int) -> float:
        await asyncio.sleep(started + times[number] - clock())
        try:
            await send(number)
        except Exception:
            return math.inf
        return clock() - started - times[number]

    latencies = sorted(await asyncio.gather(*map(latency, range(len(times)))))
    return {each: latencies[math.ceil(each * len(times) / 100) - 1] for each in percents}
