"""Checks of chapter 51's queue: requests that end on demand, behind a learner's middleware."""

# ruff: noqa: D400, D401, D403 - a check's docstring names the case, as part of a message

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import Wrong, expect, expect_equal


class Door:
    """A fake app whose requests end on demand, behind a learner's queue."""

    def __init__(self, part: Any, max_running: int, max_waiting: int, seconds: float = 1.0) -> None:
        self.started: list[str] = []
        self.sent: dict[str, list[Any]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._queue = part(self._app, max_running, max_waiting, seconds)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["name"]
        self.started.append(name)
        if name == "lifespan":
            await asyncio.Event().wait()  # as long as the server lives
        expect_equal(await receive(), {"type": name}, f"what request {name!r} receives")
        self._ends[name] = asyncio.get_running_loop().create_future()
        await self._ends[name]
        await send({"type": "done"})

    async def ask(self, name: str, kind: str = "http", method: str = "POST") -> "asyncio.Task[Any]":
        """Start a request, and give it the time to get as far as it can."""
        self.sent[name] = []
        scope = {"type": kind, "name": name, "path": "/", "headers": []}
        if kind == "http":
            scope["method"] = method

        async def receive() -> Any:
            return {"type": name}

        async def send(message: Any) -> None:
            self.sent[name].append(message)

        called = self._queue(scope, receive, send)
        if not inspect.isawaitable(called):
            raise Wrong(f"__call__ returns {called!r}; it should be an `async def`.")
        task = asyncio.ensure_future(called)
        await settle()
        if task.done() and not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]  # it is not None
        return task

    async def end(self, name: str, error: Exception | None = None) -> None:
        expect(name in self._ends, f"request {name!r} should run in the app by now; it does not.")
        end = self._ends[name]
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)
        await settle()

    def expect_started(self, names: str, when: str) -> None:
        expect_equal(self.started, names.split(), f"the requests that reached the app {when}")

    def expect_refused(self, name: str) -> dict[str, str]:
        """Check a request's refusal, and return its headers."""
        messages = self.sent[name]
        first = messages[0] if messages else {}
        expect_equal(first.get("status"), 429, f"the status of {name!r}, which found a full queue")
        body = b"".join(each.get("body", b"") for each in messages[1:])
        try:
            answer = json.loads(body)
        except ValueError:
            raise Wrong(f"the body of the refusal is {body!r}; it should be JSON.") from None
        error = answer.get("error") if isinstance(answer, dict) else None
        said = isinstance(error, dict) and isinstance(error.get("message"), str)
        expect(said, f"the body is {answer!r}; it should have an `error` with a `message`.")
        return {key.decode().lower(): value.decode() for key, value in first.get("headers", ())}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def a_few_run_and_the_others_wait(part: Any) -> None:
    """two may run, two may wait, four come:"""

    async def play() -> None:
        door = Door(part, 2, 2)
        for name in "abcd":
            await door.ask(name)
        door.expect_started("a b", "before one ended")
        await door.end("b")
        door.expect_started("a b c", "when one had ended")
        await door.end("a")
        await door.end("c")
        door.expect_started("a b c d", "at the end, in the order in which they came")
        await door.end("d")
        for name in "abcd":
            expect_equal(door.sent[name], [{"type": "done"}], f"what the client of {name!r} got")
        for name in "efghi":
            await door.ask(name)
        door.expect_started("a b c d e f", "in a second round")
        door.expect_refused("i")

    asyncio.run(play())


def a_full_queue_refuses(part: Any) -> None:
    """one may run, two may wait, and a fourth and fifth come:"""

    async def play() -> None:
        door = Door(part, 1, 2)
        for name in "abcde":
            await door.ask(name)
        for name in "de":
            door.expect_refused(name)
        for name in "abc":
            await door.end(name)
        door.expect_started("a b c", "in all")
        door = Door(part, 1, 0)
        await door.ask("a")
        await door.ask("b")
        door.expect_started("a", "where none may wait")
        door.expect_refused("b")

    asyncio.run(play())


def a_refusal_says_when_to_retry(part: Any) -> None:
    """the header of a refusal:"""

    async def play() -> None:
        cases = ((1, 0, 3.0, "3"), (2, 3, 4.0, "8"), (4, 1, 0.5, "1"), (3, 1, 2.0, "2"))
        for max_running, max_waiting, seconds, expected in cases:
            door = Door(part, max_running, max_waiting, seconds)
            for number in range(max_running + max_waiting + 1):
                await door.ask(str(number))
            headers = door.expect_refused(str(max_running + max_waiting))
            what = (
                f"Retry-After with {max_running} running, {max_waiting} waiting, {seconds} s each"
            )
            expect_equal(headers.get("retry-after"), expected, what)

    asyncio.run(play())


def a_place_is_given_back(part: Any) -> None:
    """the app fails, or a running request is cancelled:"""

    async def play() -> None:
        door = Door(part, 1, 1)
        failing = await door.ask("a")
        await door.ask("b")
        await door.end("a", RuntimeError("the model failed"))
        error = failing.exception() if failing.done() and not failing.cancelled() else None
        expect(isinstance(error, RuntimeError), "the app's error was lost; it should be raised.")
        door.expect_started("a b", "when the first one had failed")
        door = Door(part, 1, 1)
        cancelled = await door.ask("a")
        await door.ask("b")
        cancelled.cancel()
        await settle()
        door.expect_started("a b", "when the first one had been cancelled")

    asyncio.run(play())


def a_waiting_one_may_leave(part: Any) -> None:
    """a waiting request is cancelled:"""

    async def play() -> None:
        door = Door(part, 1, 2)
        await door.ask("a")
        leaving = await door.ask("b")
        await door.ask("c")
        leaving.cancel()
        await settle()
        await door.ask("d")
        expect_equal(door.sent["d"], [], "what was sent to a request for which there was room")
        await door.ask("e")
        door.expect_refused("e")
        await door.end("a")
        await door.end("c")
        door.expect_started("a c d", "when the second one had left")

    asyncio.run(play())


def other_traffic_passes(part: Any) -> None:
    """health checks and the server's own start, while the queue is full:"""

    async def play() -> None:
        door = Door(part, 1, 0)
        await door.ask("lifespan", "lifespan")
        await door.ask("a")
        await door.ask("health", method="GET")
        door.expect_started("lifespan a health", "while one runs, and none may wait")
        await door.ask("b")
        door.expect_refused("b")
        await door.end("a")
        await door.ask("c")
        door.expect_started("lifespan a health c", "when one had ended and a GET still ran")

    asyncio.run(play())


def queues_are_apart(part: Any) -> None:
    """two queues before two apps:"""

    async def play() -> None:
        doors = Door(part, 1, 0), Door(part, 1, 0)
        for door in doors:
            await door.ask("a")
            door.expect_started("a", "of its own queue")

    asyncio.run(play())


QUEUE: tuple[Callable[[Any], None], ...] = (
    a_few_run_and_the_others_wait,
    a_full_queue_refuses,
    a_refusal_says_when_to_retry,
    a_place_is_given_back,
    a_waiting_one_may_leave,
    other_traffic_passes,
    queues_are_apart,
)
