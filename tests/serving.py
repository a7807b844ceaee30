"""A real uvicorn in a thread, for tests that need a wire."""

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

PATIENCE = 20  # seconds for what should take few


def wait_until(holds: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for a condition; fails if it does not come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@contextmanager
def listening(app: Any, **settings: Any) -> Generator[int, None, None]:
    """Serve an ASGI app on a free port of 127.0.0.1, which it yields."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, **settings)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server does not end"


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """A raw connection; a small receive buffer makes a reader slow at once."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(PATIENCE)
    raw.connect(("127.0.0.1", port))
    return raw
