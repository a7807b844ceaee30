"""An open-loop load generator: each request is sent at its time, finished earlier ones or not.

It streams each response from any OpenAI-compatible server, and measures the times. A closed loop
waits for a response before it sends the next request. The slower the server, the fewer requests it
sends, so it hides how slow the server is. Sources: Schroeder et al. 2006, "Open Versus Closed: A
Cautionary Tale"; OpenAI's API reference (completions and chat completions, streamed); the HTML
standard's "Server-sent events".
"""

import asyncio
import errno
import json
import math
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
    """Return a clock that starts at 0 now."""
    started = time.perf_counter()
    return lambda: time.perf_counter() - started


async def open_loop(
    load: Sequence[Planned],
    send: Send,
    on_sent: Callable[[], None] = lambda: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send each request at its time, and return the outcomes once the last request has ended.

    `load` must be sorted by time. `send(request, clock)` runs in a separate task for each request.
    It must return an outcome and not raise; if it raises, all requests in flight are cancelled.
    """
    clock = stopwatch()

    async def follow(request: Planned) -> Outcome:
        on_sent()
        outcome = await send(request, clock)
        on_outcome(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in load:
            await asyncio.sleep(max(request.at - clock(), 0))
            tasks.append(group.create_task(follow(request)))
    return [task.result() for task in tasks]


KEEP_ALIVE = 2.0  # seconds: shorter than servers', so that none closes a connection we then reuse
PATHS = {"completions": "completions", "chat": "chat/completions"}
TEXTS = (
    "content",
    "reasoning_content",
    "reasoning",
)  # of a delta; servers name reasoning differently
MOST_DETAIL = 300  # characters of a server's error message that are stored


@dataclass(frozen=True)
class Target:
    """The server under load: `url` with or without /v1, `endpoint` "completions" or "chat".

    `model` may be "" until `find_model` has found it. A request fails after `timeout` seconds. At
    most `max_connections` connections are open at once (None: no limit); the time a request waits
    for a connection counts as the server's. Raises `OptionError` for an invalid value.
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
            raise OptionError(f"--url must be like http://127.0.0.1:8000, not {self.url!r}.")
        if self.endpoint not in PATHS:
            raise OptionError(f"--endpoint must be {' or '.join(PATHS)}, not {self.endpoint!r}.")
        if not 0 < self.timeout < math.inf:
            raise OptionError(
                f"--timeout must be more than 0 seconds, and finite, not {self.timeout:g}."
            )
        if self.api_key is not None and not self.api_key.isprintable():
            raise OptionError("--api-key has a character that no HTTP header holds.")

    @property
    def base(self) -> str:
        """The server's URL with /v1 at the end."""
        bare = self.url.rstrip("/")
        return bare if bare.endswith("/v1") else f"{bare}/v1"

    def session(self) -> aiohttp.ClientSession:
        """Open an HTTP session for the running event loop; the caller closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self.max_connections or 0, keepalive_timeout=KEEP_ALIVE
            ),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
        )


class BrokenStreamError(Exception):
    """A response that is not the expected stream: the kind of error and the server's message."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail[:MOST_DETAIL]


async def find_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the target's model, or the only model that the server lists.

    Raises `LoadError` if the server does not respond, requires an API key or lacks the model.
    """
    try:
        async with session.get(f"{target.base}/models") as response:
            status, body = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LoadError(
            f"No server responds at {target.url}: start one there (minigen serve), or give its "
            f"address with --url ({_message_of(error)})."
        ) from error
    if status in (401, 403):
        raise LoadError(f"{target.url} requires a key (HTTP {status}): give it with --api-key.")
    if status != 200:  # not every server lists its models
        if target.model:
            return target.model
        raise LoadError(f"{target.url} does not list its models (HTTP {status}): give --model.")
    return _choose(_listed(body), target)


def _listed(body: str) -> list[str]:
    try:
        return [str(each["id"]) for each in json.loads(body)["data"] if each["id"] is not None]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _choose(names: list[str], target: Target) -> str:
    if target.model and (target.model in names or not names):
        return target.model
    if not target.model and len(names) == 1:
        return names[0]
    problem = f"has no model {target.model!r}" if target.model else "does not list just one model"
    raise LoadError(
        f"{target.url} {problem}: give --model with one of {', '.join(names) or 'its names'}."
    )


@dataclass
class _StreamState:
    """What one stream has delivered so far."""

    text_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


async def send(
    session: aiohttp.ClientSession, target: Target, request: Planned, clock: Clock
) -> Outcome:
    """Send a request and read its stream to the end; a failure becomes the outcome's error.

    An answer without text is one, unless the usage says that it had a token at most: the model may
    have ended it at once.
    """
    sent, state, error, detail = clock(), _StreamState(), None, ""
    try:
        await _follow(session, target, request, clock, state)
    except BrokenStreamError as broken:
        error, detail = broken.kind, broken.detail
    except TimeoutError:
        error, detail = "timed out", f"after {target.timeout:g} s"
    except aiohttp.ClientConnectorError as failed:
        refused = failed.errno == errno.ECONNREFUSED
        error, detail = "connection refused" if refused else "no connection", _message_of(failed)
    except aiohttp.ClientPayloadError:
        error, detail = "stream cut off", f"after {len(state.text_times)} events with text"
    except (aiohttp.ClientError, ConnectionError) as failed:
        error, detail = "connection lost", _message_of(failed)
    usage = state.usage
    return Outcome(
        arrived=request.at,
        sent=sent,
        ended=clock(),
        text_times=tuple(state.text_times),
        output_tokens=usage.get("completion_tokens", len(state.text_times)),
        prompt_tokens=usage.get("prompt_tokens", 0),
        has_usage="completion_tokens" in usage,
        error=error,
        detail=detail,
    )


async def _follow(
    session: aiohttp.ClientSession,
    target: Target,
    request: Planned,
    clock: Clock,
    state: _StreamState,
) -> None:
    url = f"{target.base}/{PATHS[target.endpoint]}"
    async with session.post(url, json=_body(target, request)) as response:
        if response.status != 200:
            body = await response.text(errors="replace")
            raise BrokenStreamError(f"HTTP {response.status}", _message(body))
        if response.content_type != "text/event-stream":
            raise BrokenStreamError("no event stream", f"it is {response.content_type}")
        async for data in _events(response.content):
            if data == b"[DONE]":
                state.ended = True
            else:
                _on_event(data, clock(), state)
    if not state.ended:
        raise BrokenStreamError("stream cut off", f"after {len(state.text_times)} events with text")
    if not state.text_times and state.usage.get("completion_tokens", 2) > 1:
        raise BrokenStreamError("no text", "the response had no text at all")


def _body(target: Target, request: Planned) -> dict[str, Any]:
    """Return the JSON of a greedy, streamed request that asks for a usage chunk at the end."""
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
    """Yield the data of each server-sent event as it arrives; each is expected on one line."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _on_event(data: bytes, now: float, state: _StreamState) -> None:
    """Update the state from an event: the time of its text, the end of the stream, the usage."""
    try:
        event = json.loads(data)
        choices, usage = event.get("choices") or [], event.get("usage")
        if "error" in event:
            raise BrokenStreamError("error in the stream", _message(data.decode()))
        for choice in choices:
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in TEXTS):
                state.text_times.append(now)
            state.ended |= choice.get("finish_reason") is not None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenStreamError("no JSON in the stream", repr(data[:100])) from error
    if isinstance(usage, dict):
        state.usage = {name: count for name, count in usage.items() if isinstance(count, int)}


def _message(body: str) -> str:
    """Return the server's error message, from OpenAI's error object if the body is one."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(body.split())


def _message_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
