"""A refusal in words that the client's own library understands: OpenAI's schema, or Ollama's."""

import json
from dataclasses import dataclass

from starlette.types import Scope, Send

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no answer: an HTTP status, a sentence, and OpenAI's `type` and `code`."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    headers: Headers = ()

    def body(self, path: str) -> bytes:
        """The JSON object that the API at this path has for errors."""
        if path.startswith("/api/"):
            return json.dumps({"error": self.message}).encode()
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    async def send(self, scope: Scope, send: Send) -> None:
        """Answer the request with it."""
        body = self.body(scope["path"])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """The header that says when to come again: whole seconds, at least one."""
    return b"retry-after", str(max(1, -int(-seconds // 1))).encode()
