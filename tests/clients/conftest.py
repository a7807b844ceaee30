"""Where the server is, and a guard that refuses each connection to another machine."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

LOOPBACK = ("127.0.0.1", "::1", "localhost", b"localhost", None)


@dataclass(frozen=True)
class Server:
    """The address of a running server, a key that it takes, and its model."""

    url: str
    key: str
    model: str


class Loopback:
    """An audit hook that refuses the network beyond this machine, and remembers who wanted it."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Raise `PermissionError` for a connection or a name of another machine."""
        host: object = None
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        if host not in LOOPBACK:
            self.refused.append(str(host))
            raise PermissionError(f"a client of this machine's server wants {host}")


loopback_key = pytest.StashKey[Loopback]()


def pytest_configure(config: pytest.Config) -> None:
    """Install the guard, which stays until the process ends."""
    config.stash[loopback_key] = Loopback()
    sys.addaudithook(config.stash[loopback_key])


@pytest.fixture(scope="session")
def server() -> Server:
    """Return the server that `python -m tools.clients` has started."""
    return Server(os.environ["MINIGEN_URL"], os.environ["MINIGEN_KEY"], os.environ["MINIGEN_MODEL"])


@pytest.fixture(autouse=True)
def _named_and_local(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """Put the scenario's name into the report, and fail if it wanted another machine."""
    record_property("scenario", request.function.__doc__.splitlines()[0].removesuffix("."))
    loopback = request.config.stash[loopback_key]
    loopback.refused.clear()
    yield
    assert loopback.refused == [], "the client wanted other machines"
