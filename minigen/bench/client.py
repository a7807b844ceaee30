"""An open-loop load generator: requests leave at their time, whatever became of earlier ones.

Each is streamed from any OpenAI-compatible server, and timed. A closed loop, which waits for
answers, asks less of a server the slower it is, and so hides how slow it is. Sources: Schroeder et
al. 2006, "Open Versus Closed: A Cautionary Tale"; OpenAI's API reference (completions and chat
completions, streamed); the HTML standard's "Server-sent events".
"""

import asyncio
import errno
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from minigen.bench.report import Outcome
from minigen.bench.workload import Planned
from minigen.errors import LoadError, OptionError

Clock = Callable[[], float]  # seconds after the load began
Send = Callable[[Planned, Clock], Awaitable[Outcome]]


def stopwatch() -> Clock:
    """A clock that begins at 0 now."""
    started = time.perf_counter()
    return lambda: time.perf_counter() - started


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


KEEP_ALIVE = 2.0  # seconds: less than any server's, so that none closes what we are about to use
PATHS = {"completions": "completions", "chat": "chat/completions"}
MOST_DETAIL = 300  # characters of a server's error that are kept


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how: `url` with or without its /v1; `endpoint` "completions" or "chat".

    `model` may be "" until it is found. A request that takes more than `timeout` seconds is given
    up. `max_connections` are open at once at most, None for no limit; to wait for one counts as
    the server's time. Raises `OptionError` for what cannot be.
    """

    url: str
    model: str = ""
    endpoint: str = "completions"
    api_key: str | None = None
    ignore_eos: bool = True
    timeout: float = 600.0
    max_connections: int | None = None

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]+", self.url):
            raise OptionError(f"--url is as http://127.0.0.1:8000, not {self.url!r}.")
        if self.endpoint not in PATHS:
            raise OptionError(f"--endpoint is {' or '.join(PATHS)}, not {self.endpoint!r}.")
        if not self.timeout > 0:
            raise OptionError(f"--timeout is a number of seconds above 0, not {self.timeout:g}.")

    @property
    def base(self) -> str:
        """The URL that ends in /v1."""
        bare = self.url.rstrip("/")
        return bare if bare.endswith("/v1") else f"{bare}/v1"

    def session(self) -> aiohttp.ClientSession:
        """Connections to it; to be closed, and only for the event loop that runs."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self.max_connections or 0, keepalive_timeout=KEEP_ALIVE
            ),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
        )


class BrokenStreamError(Exception):
    """A stream that is not what was asked for: its kind, and the server's words."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail[:MOST_DETAIL]


async def find_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The model to ask for: the target's, or the only one that the server lists.

    Raises `LoadError` if nobody answers, a key is needed, or the model is not there.
    """
    try:
        async with session.get(f"{target.base}/models") as response:
            status, body = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LoadError(
            f"Nobody answers at {target.url}: start a server there (minigen serve), or say where "
            f"it is with --url ({_words(error)})."
        ) from error
    if status in (401, 403):
        raise LoadError(f"{target.url} wants a key (HTTP {status}): give it with --api-key.")
    if status != 200:  # not every server lists its models
        if target.model:
            return target.model
        raise LoadError(f"{target.url} does not list its models (HTTP {status}): say --model.")
    return _choose(_listed(body), target)


def _listed(body: str) -> list[str]:
    try:
        return [each["id"] for each in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _choose(names: list[str], target: Target) -> str:
    if target.model and (target.model in names or not names):
        return target.model
    if not target.model and len(names) == 1:
        return names[0]
    asked = f"no model {target.model!r}" if target.model else "not one model alone"
    raise LoadError(
        f"{target.url} has {asked}: say --model with one of {', '.join(names) or 'its names'}."
    )


@dataclass
class _Heard:
    """What has come of one stream so far."""

    text_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


async def send(
    session: aiohttp.ClientSession, target: Target, request: Planned, clock: Clock
) -> Outcome:
    """Send a request, and follow its stream to the end; what goes wrong is the outcome's error."""
    sent, heard, error, detail = clock(), _Heard(), None, ""
    try:
        await _follow(session, target, request, clock, heard)
    except BrokenStreamError as broken:
        error, detail = broken.kind, broken.detail
    except TimeoutError:
        error, detail = "timed out", f"after {target.timeout:g} s"
    except aiohttp.ClientConnectorError as failed:
        refused = failed.errno == errno.ECONNREFUSED
        error, detail = "connection refused" if refused else "no connection", _words(failed)
    except aiohttp.ClientPayloadError:
        error, detail = "stream cut off", f"after {len(heard.text_times)} events with text"
    except (aiohttp.ClientError, ConnectionError) as failed:
        error, detail = "connection lost", _words(failed)
    usage = heard.usage
    return Outcome(
        arrived=request.at,
        sent=sent,
        ended=clock(),
        text_times=tuple(heard.text_times),
        output_tokens=usage.get("completion_tokens", len(heard.text_times)),
        prompt_tokens=usage.get("prompt_tokens", 0),
        has_usage=bool(usage),
        error=error,
        detail=detail,
    )


async def _follow(
    session: aiohttp.ClientSession, target: Target, request: Planned, clock: Clock, heard: _Heard
) -> None:
    url = f"{target.base}/{PATHS[target.endpoint]}"
    async with session.post(url, json=_body(target, request)) as response:
        if response.status != 200:
            body = await response.text(errors="replace")
            raise BrokenStreamError(f"HTTP {response.status}", _message(body))
        if response.content_type != "text/event-stream":
            raise BrokenStreamError("no event stream", f"but {response.content_type}")
        async for data in _events(response.content):
            if data == b"[DONE]":
                heard.ended = True
            else:
                _hear(data, clock(), heard)
    if not heard.ended:
        raise BrokenStreamError("stream cut off", f"after {len(heard.text_times)} events with text")
    if not heard.text_times:
        raise BrokenStreamError("no text", "the answer had no text at all")


def _body(target: Target, request: Planned) -> dict[str, Any]:
    """The JSON of a request, greedy, whose stream ends with its usage."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint == "completions":
        return {**body, "prompt": request.prompt}
    is_text = isinstance(request.prompt, str)
    messages = [{"role": "user", "content": request.prompt}] if is_text else request.prompt
    return {**body, "messages": messages}


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as it comes; all of ours are a single line."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _hear(data: bytes, now: float, heard: _Heard) -> None:
    """Take an event: when it brought text, whether the answer ended, and its usage."""
    try:
        event = json.loads(data)
        choices, usage = event.get("choices") or [], event.get("usage")
        if "error" in event:
            raise BrokenStreamError("error in the stream", _message(data.decode()))
        for choice in choices:
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                heard.text_times.append(now)
            heard.ended |= choice.get("finish_reason") is not None
    except (ValueError, TypeError, AttributeError) as error:
        raise BrokenStreamError("no JSON in the stream", repr(data[:100])) from error
    if isinstance(usage, dict):
        heard.usage = {name: count for name, count in usage.items() if isinstance(count, int)}


def _message(body: str) -> str:
    """What a server says was wrong, out of OpenAI's error schema if it is that."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.split())


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
