"""A client that does not read what it is sent is cut off after a time.

Who waits for whom: the engine never waits for a client, so a sequence ends, and frees its blocks,
no later for a reader that is slow. uvicorn takes what an app sends until a connection has 64 KiB
that the system does not take; then `send` waits, and the app keeps what comes meanwhile. So a
connection that stays full is closed after a time, and what an app keeps for it is bounded by what
the engine makes for it in that time. Any answer is covered, at no cost for those who read.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol


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
