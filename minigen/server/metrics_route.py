"""The metrics page as a route, and its models those that the server has loaded."""

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from minigen.server.metrics_page import MetricsPage
from minigen.server.served import Served, Watcher


def metrics_router(page: MetricsPage) -> APIRouter:
    """`GET /metrics`, for Prometheus."""
    router = APIRouter(tags=["state"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """What every loaded model's engine does, in Prometheus's text format."""
        return Response(page.render(), media_type=page.content_type)

    return router


def metrics_watcher(page: MetricsPage) -> Watcher:
    """Shows a model's numbers on the page from when it is loaded until it is unloaded."""

    def watch(served: Served) -> Callable[[], None]:
        return page.follow(served.name, served.llm.trace, lambda: served.llm.kv_usage)

    return watch
