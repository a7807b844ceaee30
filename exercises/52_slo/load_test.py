"""Exercise load_test of chapter 52 (core, 10 points, about 30 minutes).

Write the load test. Send each request at its time, independently of the requests before it. Its
latency counts from that time. A failure has infinite latency. Percentiles are by nearest rank,
over all requests together.

Check it:     minigen check exercises/52_slo/load_test.py
With a hint:  minigen check exercises/52_slo/load_test.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    import httpx

    from minigen_course import load_model
    from minigen_course.lab.load import run_apart
    from minigen.server.local import serving

    server = serving(load_model(weights="int4"))


    async def measure():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def send(number):
                asked = {"prompt": f"Tea number {number} is", "max_tokens": 16}
                (await client.post("/v1/completions", json=asked)).raise_for_status()

            return await mine(send, [0.1 * number for number in range(20)], (50, 90, 99))


    found = run_apart(measure())
    server.close()
    print({percent: f"{1e3 * seconds:.0f} ms" for percent, seconds in found.items()})

Harder: How certain is a p99 of 200 requests, of which only two lie above it? Draw 200 of your
latencies with replacement (one may be drawn more than once), many times, and report the bounds
that contain 95 % of the p99 values.
"""

# exercise: minigen_course.lab.load.load_test
from collections.abc import Awaitable, Callable, Sequence


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
    raise NotImplementedError  # your turn
