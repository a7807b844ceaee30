"""Run the server: open a socket, start uvicorn, print a banner when ready, shut down cleanly.

The engine never waits for a client, so a slow client does not delay the end of its sequence or the
release of its blocks. uvicorn buffers what an app sends until a connection has 64 KiB that the
operating system does not accept. Then `send` waits, and the app stores the tokens that arrive in
the meantime. A connection whose buffer stays full is closed after a timeout, so the memory for it
is bounded. Clients that read their responses have no extra cost.
"""

import asyncio
import socket
import sys
import time
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from minigen.errors import OptionError
from minigen.server.models import ModelHost


class CutsOff:
    """A protocol mixin that closes a connection whose buffer is full for `send_timeout` seconds."""

    send_timeout: float
    _full_for: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer: the send buffer is full because the client does not read."""
        super().pause_writing()  # type: ignore[misc]
        transport = cast(Any, self).transport
        loop = asyncio.get_running_loop()
        self._full_for = loop.call_later(self.send_timeout, transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the send buffer has free space again."""
        self._forget()
        super().resume_writing()  # type: ignore[misc]

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the timer: the connection has ended."""
        self._forget()
        super().connection_lost(error)  # type: ignore[misc]

    def _forget(self) -> None:
        if self._full_for is not None:
            self._full_for.cancel()
            self._full_for = None


def cutting_off(
    seconds: float, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a timeout for clients that do not read.

    It closes a connection whose send buffer stays full for `seconds`. Pass it to
    `uvicorn.Config(http=...)`.
    """
    return type("CuttingOff", (CutsOff, protocol), {"send_timeout": seconds})


CLOSE_TIMEOUT = 5  # seconds for connections to close after the last request has ended
# Seconds that an idle connection stays open. It must be longer than clients keep one (httpx, and so
# the openai and ollama clients: 5 s), or a client may send on a connection that is just closing.
IDLE_TIMEOUT = 60
TICK = 0.05


class Server(uvicorn.Server):
    """A uvicorn server for one `ModelHost`.

    On SIGTERM or Ctrl-C it rejects new requests with 503, waits at most `patience` seconds for
    requests in flight, and exits normally; on a second signal it does not wait. It stops by itself
    if the first model cannot be loaded or a process with a shard of a model ends; `failure` is then
    the reason. With `announces` it prints a banner to stderr once it is ready.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        host: ModelHost,
        url: str,
        patience: float,
        announces: bool = True,
    ):
        super().__init__(config)
        self._host, self._url, self._patience = host, url, patience
        self._announced = not announces
        self.failure: Exception | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first starts the shutdown, the second forces it."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down; uvicorn calls this ten times per second."""
        if self._host.is_ready and not self._announced:
            self._announced = True
            print(banner(self._host, self._url), file=sys.stderr, flush=True)
        self.failure = self._host.failure
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for requests in flight, then close everything."""
        self._host.drain()
        deadline = time.monotonic() + self._patience
        while self._host.num_users and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(TICK)
        await self._host.close()  # requests that are left get an `EngineStoppedError`
        await super().shutdown(sockets)


def run(
    app: ASGIApp,
    host: ModelHost,
    address: str = "127.0.0.1",
    port: int = 8000,
    patience: float = 30,
    send_timeout: float = 60,
    log_level: str = "warning",
) -> None:
    """Serve an app until a signal stops it; port 0 selects a free port.

    Requests in flight then get `patience` seconds to finish. A client that does not read for
    `send_timeout` seconds is disconnected. Raises `OptionError` for an address that cannot be used,
    the error with which the first model failed to load, and `WorkerError` if a process with a shard
    of a model has ended.
    """
    listener = listen(address, port)
    bound_port = listener.getsockname()[1]
    shown = f"[{address}]" if ":" in address else address
    config = uvicorn.Config(
        app,
        http=cutting_off(send_timeout),
        log_level=log_level,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=CLOSE_TIMEOUT,
        timeout_keep_alive=IDLE_TIMEOUT,
    )
    server = Server(config, host, f"http://{shown}:{bound_port}", patience)
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `OptionError` if the address or port cannot be used."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"minigen cannot listen at {address}, port {port}: {reason}; choose another --port or "
            "--host."
        ) from None
    # Connections inherit it. asyncio sets it only for sockets that name their protocol. Without it,
    # the second packet of a response waits for the client's acknowledgement: 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def banner(host: ModelHost, url: str) -> str:
    """Return the text that is printed when the server is ready: its address and an example."""
    first = host.first
    form = "" if first.served is None else first.served.llm.describe()["weights"]
    others = [name for name in host.models if name != first.name]
    more = f"\nOther models, loaded at their first request: {', '.join(others)}." if others else ""
    return f"""minigen serves {first.name} at {url}/v1, weights {form}.{more}

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{first.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

API reference: {url}/docs. Press Ctrl-C to stop.
"""
