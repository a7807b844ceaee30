"""API keys. Only their digests are stored, and they are compared in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minigen.errors import OptionError
from minigen.server.errors import ApiError
from minigen.server.middleware.limits import OPEN, header, record_of

KEY = re.compile(r"[!-~]{1,512}")  # visible ASCII, which is what a header can contain
BEARER = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE)
MISSING = (
    "This server requires an API key: send it in the header 'Authorization: Bearer KEY' or "
    "'x-api-key: KEY'."
)
WRONG = "The API key is not valid."


class ApiKeys:
    """A set of API keys, stored as SHA-256 digests.

    Raises `OptionError`, without quoting the key, for a key that is not visible ASCII.
    """

    def __init__(self, keys: Iterable[str] = ()):
        checked = [_checked(key, f"API key {place}") for place, key in enumerate(keys, start=1)]
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in checked)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, key: bytes) -> str | None:
        """Return the short hash of a valid key for the logs, 8 hex digits; None for an invalid key.

        All keys are compared, each in constant time, so the response time reveals neither which
        key is similar nor how long any key is.
        """
        digest = hashlib.sha256(key).digest()
        valid = False
        for each in self._digests:
            valid |= hmac.compare_digest(each, digest)
        return digest.hex()[:8] if valid else None


def read_keys(path: Path) -> list[str]:
    """Read API keys from a file, one per line; empty lines and lines that start with # are skipped.

    Raises `OptionError` for a file that cannot be read or has no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"The API keys cannot be read from {path}: {error}.") from None
    keys = {place: line for place, line in enumerate(lines, start=1) if line and line[0] != "#"}
    if not keys:
        raise OptionError(f"{path} has no API key: write one key per line.")
    return [_checked(key, f"{path}, line {place}: the key") for place, key in keys.items()]


class RequireKey:
    """ASGI middleware: rejects requests without a valid key with 401, except on `open_paths`.

    A key comes in `Authorization`, as OpenAI's clients send it, or in Anthropic's `x-api-key`; some
    clients of Anthropic send both headers, and then one valid key is enough.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = OPEN):
        self.app, self.keys, self.open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        if scope["path"] in self.open_paths:
            return await self.app(scope, receive, send)
        bearer, plain = header(scope, b"authorization"), header(scope, b"x-api-key")
        if bearer is None and plain is None:
            return await _refusal(MISSING, scope)(scope, receive, send)
        found = BEARER.fullmatch((bearer or b"").strip())
        given = [each for each in (found and found[1], plain and plain.strip()) if each]
        names = [name for name in map(self.keys.name_of, given) if name is not None]
        if not names:
            return await _refusal(WRONG, scope)(scope, receive, send)
        record_of(scope).key = names[0]
        return await self.app(scope, receive, send)


def _refusal(message: str, scope: Scope) -> Response:
    error = ApiError(
        message,
        status=401,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
    return error.response(scope["path"])


def _checked(key: str, what: str) -> str:
    if not KEY.fullmatch(key):
        raise OptionError(f"{what} must be 1 to 512 visible ASCII characters, without spaces.")
    return key
