"""The middleware on a wire: a real uvicorn, and misbehaving clients."""

import asyncio
import socket
import time
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")

import uvicorn
from starlette.types import Receive, Scope, Send

from minigen.server.local import LocalServer
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.middleware.stack import MiddlewareStack
from minigen.server.run import IDLE_TIMEOUT, cutting_off, run
from tests.waiting import wait_until
from tests.wire import connect, listening

POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b"
CHUNK = b"x" * 8192


class Endless:
    """Streams to a POST until its client leaves or `enough` chunks were taken; holds a block."""

    def __init__(self, enough: int = 10**9, pause: float = 0):
        self.enough, self.pause = enough, pause
        self.num_taken = self.num_blocks = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        await receive()
        self.num_blocks += 1
        left = asyncio.create_task(receive())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not left.done() and self.num_taken < self.enough:
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.num_taken += 1
                await asyncio.sleep(self.pause)
            if not left.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            self.num_blocks -= 1


def behind_guards(app: Any, **limits: Any) -> MiddlewareStack:
    return MiddlewareStack(app, Limits(**limits), ApiKeys())


def test_a_client_that_never_reads_is_cut_off_and_frees_its_block() -> None:
    app = Endless()
    with listening(behind_guards(app), http=cutting_off(0.2)) as port:
        with connect(port, receive_buffer=4096) as deaf:
            deaf.sendall(POST % (2, b"{}"))
            wait_until(lambda: app.num_blocks == 1)
            wait_until(lambda: app.num_blocks == 0)
            assert app.num_taken * len(CHUNK) < 16 * 2**20, "what the system buffers, no more"
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200


def test_a_slow_reader_gets_the_whole_answer() -> None:
    app = Endless(enough=200)
    with (
        listening(behind_guards(app), http=cutting_off(1)) as port,
        connect(port, receive_buffer=65536) as slow,
    ):
        slow.sendall(POST % (2, b"{}"))
        got, started = bytearray(), time.monotonic()
        while not got.endswith(b"0\r\n\r\n"):
            got += slow.recv(4096)
            time.sleep(0.004)
        assert time.monotonic() - started > 1, "longer than a full connection would live"
        assert got.count(b"x" * 100) >= 200
    assert app.num_blocks == 0


def test_a_full_connection_that_its_client_closes_is_dropped() -> None:
    app = Endless()
    with listening(behind_guards(app), http=cutting_off(30)) as port:
        with connect(port, receive_buffer=4096) as deaf:
            deaf.sendall(POST % (2, b"{}"))
            wait_until(lambda: app.num_blocks == 1)
            time.sleep(0.1)
        wait_until(lambda: app.num_blocks == 0)


def test_half_a_body_gets_a_408_and_the_connection_ends() -> None:
    app = Endless()
    with (
        listening(behind_guards(app, body_timeout=0.1)) as port,
        connect(port) as stalled,
    ):
        stalled.sendall(POST % (10, b"half"))
        answer = bytearray()
        while chunk := stalled.recv(4096):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer
        assert app.num_blocks == app.num_taken == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_far_too_large_gets_a_413_that_its_client_can_read(chunked: bool) -> None:
    body = b"x" * (20 * 2**20)
    content: Any = iter([body[: 2**20]] * 20) if chunked else body
    with listening(behind_guards(Endless(), max_body_bytes=2**20)) as port, httpx.Client() as http:
        url = f"http://127.0.0.1:{port}"
        assert http.post(f"{url}/v1/completions", content=content).status_code == 413
        assert http.get(f"{url}/health").status_code == 200, "on the same connection"


def test_a_request_that_takes_too_long_frees_its_block() -> None:
    app = Endless(pause=0.01)
    with listening(behind_guards(app, request_timeout=0.2)) as port:
        with pytest.raises(httpx.RemoteProtocolError):  # not a stream of events, so it is cut off
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"{}")
        assert app.num_blocks == 0


def test_an_idle_connection_stays_open_longer_than_clients_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a client may send on a connection that the server is just closing."""
    assert httpx.Limits().keepalive_expiry < IDLE_TIMEOUT
    with LocalServer(Endless()) as local:
        assert local._server.config.timeout_keep_alive == IDLE_TIMEOUT
    served: list[uvicorn.Config] = []

    class Recorded:
        failure = None

        def __init__(self, config: uvicorn.Config, *_: object):
            served.append(config)

        def run(self, sockets: list[socket.socket]) -> None:
            sockets[0].close()

    monkeypatch.setattr("minigen.server.run.Server", Recorded)
    run(Endless(), Any, port=0)
    assert [each.timeout_keep_alive for each in served] == [IDLE_TIMEOUT]
