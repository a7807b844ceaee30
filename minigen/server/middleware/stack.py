"""The middleware between the network and the app, and the reasons for its order.

From the outside in:
1. `RequestLog`: every response has an id and a line in the log, including rejections.
2. CORS: a browser gives a web page only responses with these headers, so rejections need them, too;
   and the browser's preflight request (OPTIONS) has no key.
3. `RequireKey`: a client without a key causes no further cost, and learns nothing about the load.
4. `Admission`: it comes before the body is read, so that memory is bounded by the number of
   requests in flight times the largest body.
5. `Deadline`: limits the time of everything that a request does after its admission.
6. `WholeBody`: the app allocates nothing for a client that has not sent its whole request.

All are plain ASGI, so each chunk of a stream passes without buffering. Only 1, 2 and 5 inspect
chunks.
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
    """An ASGI app behind the middleware; messages other than HTTP (lifespan) bypass the middleware.

    `Admission` documents `draining`, `num_queued` and `refused`. Raises `OptionError` for a limit
    per key without keys.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        keys: ApiKeys,
        draining: Callable[[], bool] = lambda: False,
        num_queued: Callable[[], int] = lambda: 0,
        logger: logging.Logger = access_logger,
        refused: Callable[[int], None] = lambda status: None,
    ):
        if limits.max_in_flight_per_key is not None and not keys:
            raise OptionError(
                "max_in_flight_per_key needs API keys: give at least one, or leave it out."
            )
        self.app = app
        guarded: ASGIApp = WholeBody(app, limits.max_body_bytes, limits.body_timeout)
        if limits.request_timeout is not None:
            guarded = Deadline(guarded, limits.request_timeout)
        guarded = Admission(guarded, limits, draining, num_queued, refused=refused)
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
        """Handle one request, or the app's lifespan."""
        app = self._guarded if scope["type"] == "http" else self.app
        await app(scope, receive, send)
