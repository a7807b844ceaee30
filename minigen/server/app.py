"""The ASGI application: the routes of all APIs, which share one `ModelHost`, and the middleware."""

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import JSONResponse, Response

from minigen import __version__
from minigen.outputs import RequestState
from minigen.server.anthropic.routes import anthropic_router
from minigen.server.errors import add_error_handlers
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.middleware.stack import MiddlewareStack
from minigen.server.models import ModelHost
from minigen.server.ollama.routes import ollama_router
from minigen.server.openai.routes import Check, openai_router
from minigen.server.responses_api.routes import responses_router
from minigen.server.token_routes import token_router

DESCRIPTION = """
An LLM inference engine behind the APIs of OpenAI, Anthropic and Ollama. It accepts only the fields
that are listed here. A request with any other field gets an error that names the field.
"""


def _accept_all(answers: SequenceOf[RequestState]) -> None:
    """Accept every request."""


def create_app(
    host: ModelHost, check: Check = _accept_all, routers: SequenceOf[APIRouter] = ()
) -> FastAPI:
    """Create the FastAPI app; it loads the host's first model at startup, and closes all at exit.

    `check(answers)` may refuse a request by raising a `MinigenError`; `routers` add further APIs.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(host.load_first())
        yield
        loading.cancel()
        await host.close()

    app = FastAPI(
        title="minigen",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
    )
    own = (openai_router(host, check), responses_router(host, check), token_router(host))
    for router in (*own, _state_router(host), *routers):
        app.include_router(router)
    add_error_handlers(app)
    return app


def _state_router(host: ModelHost) -> APIRouter:
    """Create the routes that report the server's state."""
    router = APIRouter(tags=["state"])

    @router.get("/health")
    async def health() -> dict[str, Any]:
        """Liveness: any response means that the server runs."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "Still loading, or shutting down."}})
    async def ready() -> Response:
        """Readiness: the first model is loaded, and the server is not shutting down."""
        if host.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not host.is_ready:
            return JSONResponse({"status": "loading"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of minigen."""
        return {"version": __version__}

    return router


DEFAULT_LIMITS, NO_KEYS = Limits(), ApiKeys()


def create_service(
    host: ModelHost,
    limits: Limits = DEFAULT_LIMITS,
    keys: ApiKeys = NO_KEYS,
    routers: SequenceOf[APIRouter] = (),
    refused: Callable[[int], None] = lambda status: None,
) -> MiddlewareStack:
    """Create the complete ASGI app: the APIs of OpenAI, Anthropic and Ollama, and the middleware.

    `routers` add further APIs.
    `refused` is called with the status (429 or 503) of each request that is not admitted. Raises
    `OptionError` for limits that contradict each other.
    """
    check = limits.check
    apis = [anthropic_router(host, check), ollama_router(host, check), *routers]
    return MiddlewareStack(
        create_app(host, check, apis),
        limits,
        keys,
        draining=lambda: host.draining,
        num_queued=lambda: host.num_waiting,
        refused=refused,
    )
