"""A client in a process of its own: reads requests from stdin, writes what came of them.

Each is asked twice, unstreamed and streamed; sixteen at a time. In the server's process it would
take turns with the engine's thread at every operation.
"""

import asyncio
import json
import sys
from typing import Any

import httpx


async def ask(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[Any, Any]:
    """Text and finish reason of each choice: unstreamed, and put together from a stream."""
    whole = (await client.post("/v1/completions", json=asked)).json()["choices"]
    streamed: list[list[Any]] = [["", None] for _ in whole]
    lines = (await client.post("/v1/completions", json={**asked, "stream": True})).text
    for line in lines.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            told = streamed[choice["index"]]
            streamed[choice["index"]] = [told[0] + choice["text"], choice["finish_reason"]]
    return [[each["text"], each["finish_reason"]] for each in whole], streamed


async def main() -> None:
    """Ask, and print a JSON list of what came."""
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=sys.argv[1], limits=limits, timeout=60) as client:
        told = await asyncio.gather(*(ask(client, asked) for asked in json.load(sys.stdin)))
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
