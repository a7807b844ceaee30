"""A loaded model of a server: what is kept of it, and how it ends."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from minigen.engine.thread import EngineThread
from minigen.llm import LLM
from minigen.server.streams import Bridge


@dataclass(frozen=True)
class Served:
    """A model that is loaded, with its engine's thread, and the way from there to the loop."""

    name: str
    llm: LLM
    thread: EngineThread
    bridge: Bridge
    loaded_at: datetime = field(default_factory=lambda: datetime.now(UTC))


# Called with a model that has just been loaded; what it returns is called before it is unloaded.
Watcher = Callable[[Served], Callable[[], None]]


async def end(last: list[Served], before: "asyncio.Task[None] | None", for_good: bool) -> None:
    """End a model after `before`, and, `for_good`, the processes that hold shares of it.

    `last` is where the model is mentioned last, so that its memory is free thereafter.
    """
    if before is not None:
        await before
    await asyncio.to_thread(_close, last, for_good)


def _close(last: list[Served], for_good: bool) -> None:
    served = last.pop()
    served.thread.close()
    if for_good:
        served.llm.close()
    del served
    gc.collect()  # an engine's parts know each other
