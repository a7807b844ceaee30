"""The middleware between the network and the app, in one order, and the limits that it checks.

From the outside in:
1. `RequestLog`: every answer has an id and a line in the log, also a refusal.
2. CORS: a browser shows a page only answers with these headers, so refusals need them, too; and
   its preflight request (OPTIONS) carries no key.
3. `RequireKey`: a client without a key causes no further cost, and learns nothing of the load.
4. `Admission`: before the body is read, so that memory is bounded by requests in flight times the
   largest body.
5. `Deadline`: bounds everything that a request does once it is admitted.
6. `WholeBody`: an app never holds anything for a client that has not sent its request yet.

All are plain ASGI: a chunk of a stream passes as it is made. Only 1, 2 and 5 look at chunks.
"""

import logging
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from minigen.errors import OptionError
from minigen.server.middleware.access_log import RequestLog, access_logger
from minigen.server.middleware.admission import Admission
from minigen.server.middleware.auth import ApiKeys, RequireKey
from minigen.server.middleware.limits import OPEN, Limits
from minigen.server.middleware.timeouts import Deadline, WholeBody

METHODS = ("GET", "POST", "OPTIONS")
SEEN_BY_PAGES = ("x-request-id", "retry-after")


class MiddlewareStack:
    """An ASGI app behind its guards; whatever is not HTTP (its life span) goes straight to it.

    `draining` and `num_queued` are as `Admission` has them. Raises `OptionError` for a limit per
    key without keys.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        keys: ApiKeys,
        draining: Callable[[], bool] = lambda: False,
        num_queued: Callable[[], int] = lambda: 0,
        logger: logging.Logger = access_logger,
    ):
        if limits.max_in_flight_per_key is not None and not keys:
            raise OptionError("max_in_flight_per_key needs API keys: give some, or leave it out.")
        self.app = app
        guarded: ASGIApp = WholeBody(app, limits.max_body_bytes, limits.body_timeout)
        if limits.request_timeout is not None:
            guarded = Deadline(guarded, limits.request_timeout)
        guarded = Admission(guarded, limits, draining, num_queued)
        if keys:
            metrics = {"/metrics"} if limits.open_metrics else set()
            guarded = RequireKey(guarded, keys, OPEN | metrics)
        if limits.cors_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=limits.cors_origins,
                allow_methods=METHODS,
                allow_headers=("*",),
                expose_headers=SEEN_BY_PAGES,
            )
        self._guarded = RequestLog(guarded, logger)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the app's life span."""
        app = self._guarded if scope["type"] == "http" else self.app
        await app(scope, receive, send)
