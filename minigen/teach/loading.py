"""A load on a running server from a notebook's cell: `minigen bench serve`'s, as a function."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from minigen.server.load import open_loop
from minigen.server.load_client import Target, find_model, send
from minigen.server.prompts import Planned
from minigen.server.slo import Outcome


def put_load(url: str, load: Sequence[Planned], **target: Any) -> list[Outcome]:
    """Send each request at its time, whatever became of those before; what became of each.

    `target` is further said of `Target`: endpoint, api_key, ignore_eos. Runs in a thread with an
    event loop of its own, since a notebook's cells run in one already.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, _put(Target(url, **target), load)).result()


async def _put(target: Target, load: Sequence[Planned]) -> list[Outcome]:
    async with target.session() as session:
        target = replace(target, model=await find_model(session, target))
        return await open_loop(load, lambda request, clock: send(session, target, request, clock))
