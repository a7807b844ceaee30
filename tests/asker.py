"""A client in a separate process: it reads requests from stdin and writes the results.

Each request is sent twice, unstreamed and streamed; sixteen requests run at a time. In the server's
process the client would take turns with the engine's thread at every operation.
"""

import asyncio
import json
import sys
from typing import Any

import httpx


async def ask(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[Any, Any]:
    """Return text and finish reason of each choice: unstreamed, and joined from a stream."""
    whole = (await client.post("/v1/completions", json=asked)).json()["choices"]
    streamed: list[list[Any]] = [["", None] for _ in whole]
    lines = (await client.post("/v1/completions", json={**asked, "stream": True})).text
    for line in lines.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            before = streamed[choice["index"]]
            streamed[choice["index"]] = [before[0] + choice["text"], choice["finish_reason"]]
    return [[each["text"], each["finish_reason"]] for each in whole], streamed


async def main() -> None:
    """Send the requests, and print a JSON list of the results."""
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=sys.argv[1], limits=limits, timeout=60) as client:
        results = await asyncio.gather(*(ask(client, asked) for asked in json.load(sys.stdin)))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
