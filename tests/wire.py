"""Any ASGI app on a wire: a real uvicorn in a thread, and raw connections to it."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.waiting import PATIENCE, wait_until


@contextmanager
def listening(
    app: Any, send_buffer: int | None = None, **settings: Any
) -> Generator[int, None, None]:
    """Serve an ASGI app on a free port of 127.0.0.1, which it yields.

    With a small `send_buffer` a connection fills up soon.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
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
    """Open a raw connection; with a small receive buffer a slow reader blocks the sender early."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(PATIENCE)
    raw.connect(("127.0.0.1", port))
    return raw
