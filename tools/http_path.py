"""The way of an HTTP request through the modules: `python -m tools.http_path`.

It records the calls of one completion that a real server answers with a tiny random model. A
**room** is what it is in `tools.request_path`: a module that passes the request on, because it has
a frame on the call stack when the prompt becomes a sequence, or when that is queued. On the way
back, it has one when the token is handed to its request, or when the response is sent. The packages
that compute are not rooms. Neither are the middleware, which looks at every request alike, and the
loops of the threads, which are below every call.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from minigen import LLM
from minigen.server.app import create_app
from minigen.server.local import LocalServer
from minigen.server.models import ModelHost
from tools.request_path import WORK, callers, module_of, save_model

NO_ROOMS = (*WORK, "server.middleware", "server.local", "server.run", "engine.engine_thread")
IN = {("sequence", "__post_init__"), ("engine.scheduler", "add")}
BACK = {("outputs", "push")}
ASKED = {"prompt": "abc", "max_tokens": 1, "temperature": 0, "ignore_eos": True}


class Rooms:
    """The rooms of one request on its way in and back, in the order of their first arrival."""

    def __init__(self) -> None:
        self.inward, self.back = dict[str, None](), dict[str, None]()

    @contextmanager
    def recorded(self) -> Generator[None, None, None]:
        """Record the calls of all threads that are started while the block runs."""
        threading.setprofile(self._on_event)
        try:
            yield
        finally:
            threading.setprofile(None)

    def on_response(self, send: Send) -> Send:
        """Return a `send` that counts as the arrival of the response."""

        async def sent(message: Message) -> None:
            self.back |= _rooms(callers(sys._getframe()))
            await send(message)

        return sent

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        called = (module_of(frame), frame.f_code.co_name)
        if event == "call" and called in IN:
            self.inward |= _rooms([each for each in callers(frame) if each != called[0]])
        if event == "call" and called in BACK:
            self.back |= _rooms(["outputs", *callers(frame)])

    def forget(self) -> None:
        """Forget what was recorded: a server makes requests of its own when it loads a model."""
        self.inward.clear()
        self.back.clear()


def _rooms(names: list[str]) -> dict[str, None]:
    return dict.fromkeys(name for name in reversed(names) if not name.startswith(NO_ROOMS))


@cache
def record() -> Rooms:
    """Record the second of two completions over HTTP."""
    rooms = Rooms()
    with TemporaryDirectory() as folder, rooms.recorded():
        save_model(Path(folder))
        host = ModelHost({"tiny": partial(LLM.load, folder, weights="float32")})
        app = create_app(host)

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, rooms.on_response(send))

        with LocalServer(watched, host) as server:
            for _ in range(2):  # the first one waits until the model is loaded
                rooms.forget()
                answer = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", **ASKED})
                answer.raise_for_status()
    return rooms


if __name__ == "__main__":
    found = record()
    sys.stdout.write(f"in: {', '.join(found.inward)}\nback: {', '.join(found.back)}\n")
