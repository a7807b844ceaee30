"""Admission control: limit the requests in flight, and reject all once the server shuts down."""

import time
from collections import Counter, deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from minigen.server.errors import ApiError
from minigen.server.middleware.limits import Limits, makes_work, record_of

REMEMBERED = 32  # number of latest requests whose durations are averaged
FIRST_GUESS = 5.0  # assumed seconds of a request, before any has ended
LONGEST_WAIT = 60.0  # seconds; older ones of OpenAI's clients ignore longer times


class Turns:
    """Estimates when a rejected client should retry, from the durations of recent requests.

    By Little's law, of `num_running` requests that take `d` seconds each, one ends every
    `d / num_running` seconds. Each rejected client gets the time of the next free slot that no
    other client has got, so that clients rejected together do not retry together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds: deque[float] = deque([FIRST_GUESS], maxlen=REMEMBERED)
        self._measured = False
        self._promised = 0.0

    def ended(self, seconds: float) -> None:
        """Record the duration of a request that has ended."""
        if not self._measured:
            self._seconds.clear()
            self._measured = True
        self._seconds.append(seconds)

    def next(self, num_running: int) -> float:
        """Return the estimated seconds until the next free slot, at most `LONGEST_WAIT`."""
        now = self._clock()
        interval = sum(self._seconds) / len(self._seconds) / max(1, num_running)
        self._promised = min(max(self._promised, now) + interval, now + LONGEST_WAIT)
        return self._promised - now


class Admission:
    """ASGI middleware: rejects work with 503 during shutdown, and with 429 above a limit.

    Both responses have a `Retry-After` header. Only requests that make work count, so health checks
    and metrics respond under full load, too. `draining` returns whether the server is shutting
    down, `num_queued` the number of sequences that wait in the engines. `refused` is called with
    the status of each rejection.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        draining: Callable[[], bool] = lambda: False,
        num_queued: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[int], None] = lambda status: None,
    ):
        self.app, self.limits, self._clock = app, limits, clock
        self._draining, self._num_queued, self._refused = draining, num_queued, refused
        self._turns = Turns(clock)
        self._of_key: Counter[str | None] = Counter()
        self.num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        if not makes_work(scope):
            return await self.app(scope, receive, send)
        key = record_of(scope).key
        refusal = self._refusal(key)
        if refusal is not None:
            self._refused(refusal.status)
            return await refusal.response(scope["path"])(scope, receive, send)
        started = self._clock()
        self._count(key, 1)
        try:
            return await self.app(scope, receive, send)
        finally:
            self._count(key, -1)
            self._turns.ended(self._clock() - started)

    def _refusal(self, key: str | None) -> ApiError | None:
        limits = self.limits
        if self._draining():
            return self._drained()
        if limits.max_in_flight is not None and self.num_in_flight >= limits.max_in_flight:
            return self._full(f"{self.num_in_flight} requests are in flight, the maximum.")
        of_key, most = self._of_key[key], limits.max_in_flight_per_key
        if most is not None and of_key >= most:
            return self._full(f"{of_key} requests with this key are in flight, the maximum.")
        if limits.max_queue is not None and self._num_queued() >= limits.max_queue:
            return self._full("The queue of waiting requests is full.")
        return None

    def _full(self, why: str) -> ApiError:
        return ApiError(
            f"{why} Try again later.",
            status=429,
            kind="requests",
            code="rate_limit_exceeded",
            retry_after=self._turns.next(self.num_in_flight),
        )

    def _drained(self) -> ApiError:
        return ApiError(
            "The server is shutting down: running requests finish, new ones are rejected.",
            status=503,
            kind="server_error",
            code="server_draining",
            retry_after=self.limits.drain_timeout,  # by then it has shut down
        )

    def _count(self, key: str | None, change: int) -> None:
        self.num_in_flight += change
        self._of_key[key] += change
        if not self._of_key[key]:
            del self._of_key[key]
