"""Retries: clients that give up and send again, before a server that stood still for a while."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from minigen.bench.workload import poisson

RATE, SERVICE, PATIENCE = 7.0, 0.1, 3.0  # requests per second; seconds per answer; seconds
STALLS_AT, SECONDS = 20.0, 120.0


@dataclass(frozen=True)
class Clients:
    """How clients behave: they give up after `PATIENCE` seconds and send at most `tries` times.

    Before try number k + 1 they wait `backoff` times 2^(k-1) seconds, times a random factor from
    0.5 to 1.5 (jitter). `budget` limits all retries together to this share of the first tries.
    With `cancels`, the server stops a request as soon as its client gives up.
    """

    tries: int = 1
    backoff: float = 0.0
    budget: float | None = None
    cancels: bool = False


@dataclass
class Storm:
    """The times in seconds at which tries arrived, and at which answers came in time."""

    sent: list[float] = field(default_factory=list)
    good: list[float] = field(default_factory=list)


def rate_of(times: Sequence[float], width: float = 5.0) -> list[float]:
    """Return the number of `times` per second, in windows of `width` seconds."""
    edges = np.arange(0, SECONDS + width, width)
    return [float(each) / width for each in np.histogram(times, edges)[0]]


def storm(clients: Clients, stall: float = 4.0, seed: int = 52) -> Storm:
    """Serve `SECONDS` of requests one after the other, in the order of arrival.

    New requests arrive at `RATE` per second, as a Poisson process. Every try costs the server
    `SERVICE` seconds, whether its client still waits or not (except with `clients.cancels`). At
    `STALLS_AT` the server stands still for `stall` seconds.
    """
    rng = np.random.default_rng(seed)
    count = int(1.5 * RATE * SECONDS)
    waiting = [(at, 1) for at in poisson(RATE, count, rng) if at < SECONDS]
    heapify(waiting)
    found, free_at, num_first, num_again = Storm(), 0.0, 0, 0
    while waiting and waiting[0][0] < SECONDS:
        at, tries = heappop(waiting)
        found.sent.append(at)
        num_first += tries == 1
        begin = max(at, free_at)
        if STALLS_AT <= begin < STALLS_AT + stall:
            begin = STALLS_AT + stall
        end, gives_up = begin + SERVICE, at + PATIENCE
        free_at = end if not clients.cancels else max(free_at, min(end, gives_up))
        if end <= gives_up:
            found.good.append(end)
        elif tries < clients.tries and _may(clients.budget, num_again, num_first):
            num_again += 1
            wait = clients.backoff * 2 ** (tries - 1) * rng.uniform(0.5, 1.5)
            heappush(waiting, (gives_up + wait, tries + 1))
    return found


def _may(budget: float | None, num_again: int, num_first: int) -> bool:
    return budget is None or num_again < budget * num_first
