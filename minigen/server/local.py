"""Run a server in a thread of this process, for notebooks and tests."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from minigen.errors import OptionError
from minigen.llm import LLM
from minigen.server.app import DEFAULT_LIMITS, create_service
from minigen.server.metrics import Metrics, MetricsPage, metrics_router
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost
from minigen.server.run import IDLE_TIMEOUT, Server, listen

PATIENCE = 60.0  # seconds for a server to shut down: far more than it needs, on a busy machine too
LOOK = 0.002  # seconds between checks of whether it is ready


def _nothing() -> None:
    """Do nothing."""


class LocalServer:
    """Serves an ASGI app at `url`, on a free port, from its creation until `close`.

    `host` has the models behind the app, if it is one of minigen's; the constructor then returns
    once the first model is loaded. Use the server as a context manager, or call `close`. Raises the
    error with which the first model failed to load.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: ModelHost | None = None,
        at_the_end: Callable[[], None] = _nothing,
    ):
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._at_the_end = at_the_end
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="auto" if host is None else "on",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=IDLE_TIMEOUT,
        )
        self._server = (
            uvicorn.Server(config)
            if host is None
            else Server(config, host, self.url, patience=1, announces=False)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        while self._thread.is_alive() and not self._is_ready(host):
            time.sleep(LOOK)
        if host is not None and host.first_error is not None:
            self.close()
            raise host.first_error

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server; requests in flight get one second. The model is then free again."""
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not stop"
        at_the_end, self._at_the_end = self._at_the_end, _nothing
        at_the_end()

    def _is_ready(self, host: ModelHost | None) -> bool:
        if host is None:
            return self._server.started
        return host.is_ready or host.first_error is not None


def serving(
    llm: LLM,
    name: str = "minigen",
    limits: Limits = DEFAULT_LIMITS,
    api_keys: Iterable[str] = (),
) -> LocalServer:
    """Serve a loaded model, as `minigen serve` does; use it as `with serving(llm) as server:`.

    The server is at `server.url`, the model's name is `name`, and /metrics has its metrics. Until
    the server is closed, the engine runs in its thread, and no other code may step it. No client
    can unload the model, because it is the caller's.
    """
    page, metrics = MetricsPage(), Metrics(name, lambda: llm.kv_usage)
    page.add(metrics)
    llm.trace.subscribe(metrics)
    host = ModelHost({name: lambda: llm}, stay=True)
    keys, routers = ApiKeys(api_keys), [metrics_router(page)]
    app = create_service(host, limits, keys, routers, page.count_refusal)
    return LocalServer(app, host, lambda: llm.trace.unsubscribe(metrics))


@contextmanager
def serve_command(*arguments: str | Path) -> Generator[str, None, None]:
    """Run `minigen serve` with these arguments in a separate process, and yield its URL.

    The process ends with the `with` block. Raises `OptionError` with the command's error message if
    it exits before it is ready.
    """
    command = [sys.executable, "-m", "minigen", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        output, found = "", None
        for line in process.stderr:
            output += line
            found = found or re.search(r"at (http://\S+)/v1", line)
            if "Press Ctrl-C to stop" in line:
                break
        reading = threading.Thread(target=process.stderr.read)  # so that the pipe never fills up
        reading.start()
        try:
            if found is None:
                raise OptionError(output.strip())
            yield found[1]
        finally:
            process.terminate()
            process.wait(PATIENCE)
            reading.join()
