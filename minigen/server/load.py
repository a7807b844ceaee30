"""An open loop: requests leave when it is their time, whatever became of those before them.

Source: Schroeder et al. 2006, "Open Versus Closed: A Cautionary Tale". A closed loop, which waits
for answers, asks less of a server the slower it is, and so hides how slow it is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from minigen.server.prompts import Planned
from minigen.server.slo import Outcome

Clock = Callable[[], float]  # seconds after the load began
Send = Callable[[Planned, Clock], Awaitable[Outcome]]


def stopwatch() -> Clock:
    """A clock that begins at 0 now."""
    begun = time.perf_counter()
    return lambda: time.perf_counter() - begun


async def open_loop(
    load: Sequence[Planned],
    send: Send,
    tell_sent: Callable[[], None] = lambda: None,
    tell_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send each request at its time, in order of time, and wait for the last of the outcomes.

    `send(request, clock)` is called for each in a task of its own, and is to return its outcome
    and raise nothing; if it raises, all that is under way is cancelled.
    """
    clock = stopwatch()

    async def follow(request: Planned) -> Outcome:
        tell_sent()
        outcome = await send(request, clock)
        tell_outcome(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in load:
            await asyncio.sleep(max(request.at - clock(), 0))
            tasks.append(group.create_task(follow(request)))
    return [task.result() for task in tasks]
