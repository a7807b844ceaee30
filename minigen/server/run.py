"""The server's life: a socket, uvicorn, a banner when it is ready, and an orderly shutdown.

A client that does not read its answer is disconnected after a time. The engine never waits for a
client, so a sequence ends, and frees its blocks, no later for a slow reader. uvicorn accepts what
an app sends until a connection has 64 KiB that the system does not take; then `send` waits, and
the app keeps what comes meanwhile. A connection that stays full is closed after a time, so what an
app keeps for it is bounded. Clients that read cost nothing.
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
    """Closes a connection that stays full for `send_timeout` seconds; mixed into a protocol."""

    send_timeout: float
    _full_for: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The connection is full: what was sent is not read."""
        super().pause_writing()  # type: ignore[misc]
        transport = cast(Any, self).transport
        loop = asyncio.get_running_loop()
        self._full_for = loop.call_later(self.send_timeout, transport.abort)

    def resume_writing(self) -> None:
        """The connection has room again."""
        self._forget()
        super().resume_writing()  # type: ignore[misc]

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        self._forget()
        super().connection_lost(error)  # type: ignore[misc]

    def _forget(self) -> None:
        if self._full_for is not None:
            self._full_for.cancel()
            self._full_for = None


def cutting_off(
    seconds: float, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which closes a connection that stays full for so many seconds.

    Give it to `uvicorn.Config(http=...)`.
    """
    return type("CuttingOff", (CutsOff, protocol), {"send_timeout": seconds})


LAST_WORDS = 5  # seconds for connections to close, once nothing runs any more
TICK = 0.05


class Server(uvicorn.Server):
    """uvicorn for one host of models.

    Told to end (SIGTERM or Ctrl-C), it refuses what is new with 503, waits `patience` seconds at
    most for what runs, and ends as a program that did what it should; told twice, it waits for
    nobody. It ends by itself if the first model cannot be loaded, or a process with a share of a
    model ends: `failure` is why. Once it is ready it says so on stderr, if it `announces`
    itself.
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
        """Hear a signal."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._host.is_ready and not self._announced:
            self._announced = True
            print(banner(self._host, self._url), file=sys.stderr, flush=True)
        self.failure = self._host.failure
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let finish what runs, then close everything."""
        self._host.drain()
        deadline = time.monotonic() + self._patience
        while self._host.num_users and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(TICK)
        await self._host.close()  # who is left is told so
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
    """Serve an app until a signal ends it; port 0 takes any that is free.

    What runs has `patience` seconds then; a client that does not read for `send_timeout` seconds is
    cut off.

    Raises `OptionError` for an address that cannot be listened at, whatever the first model could
    not be loaded for, and `WorkerError` if a process that held a share of a model has ended.
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
        timeout_graceful_shutdown=LAST_WORDS,
    )
    server = Server(config, host, f"http://{shown}:{bound_port}", patience)
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `OptionError` if it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"minigen cannot listen at {address}, port {port}: {reason}; choose another --port or "
            "--host."
        ) from None


def banner(host: ModelHost, url: str) -> str:
    """What a person wants to know of a server that has just become ready."""
    first = host.first
    form = "" if first.served is None else first.served.llm.describe()["weights"]
    others = [name for name in host.models if name != first.name]
    more = f"\nAlso, loaded when first asked for: {', '.join(others)}." if others else ""
    return f"""minigen serves {first.name} at {url}/v1, weights {form}.{more}

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{first.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

All that can be asked: {url}/docs. Ctrl-C ends it.
"""
