"""Whatever goes wrong, as an HTTP status and OpenAI's error object."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minigen.errors import (
    CapacityError,
    ContextLengthError,
    EngineStoppedError,
    MinigenError,
    WorkerError,
)

logger = logging.getLogger(__name__)


class ApiError(MinigenError):
    """An error that a client is told of: its status, and `type`, `code` and `param` as OpenAI's.

    `retry_after` is in seconds, and told in whole ones; `headers` are further ones.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.code, self.param, self.headers = code, param, dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def body(self, path: str = "/v1") -> bytes:
        """OpenAI's error object, as JSON; the paths of Ollama's API have a simpler one."""
        if path.startswith("/api/"):
            return json.dumps({"error": self.message}).encode()
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def response(self, path: str) -> Response:
        """The whole answer, for the API at this path."""
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


class ModelFailedError(Exception):
    """A step of the model failed, and with it the requests of that step; the cause says how."""


class ClientGoneError(Exception):
    """The client went away before its answer was whole."""


def explain(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError | CapacityError):
        return ApiError(str(error), code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(
            _how_it_ended(error),
            status=503,
            kind="server_error",
            code="engine_stopped",
            retry_after=1,
        )
    if isinstance(error, MinigenError):
        return ApiError(str(error))
    if isinstance(error, ModelFailedError):
        return ApiError(
            f"The model failed at this request ({error}); the server's log says more.",
            status=500,
            kind="server_error",
            code="model_failed",
        )
    return ApiError(
        "The server failed at this request; its log says how.",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def _how_it_ended(error: EngineStoppedError) -> str:
    if isinstance(error.__cause__, WorkerError):
        return (
            "A process that held a share of the model has ended, and the server ends with it; ask "
            "again when it is back."
        )
    return "The engine has ended, and this request with it; ask again."


def add_error_handlers(app: FastAPI) -> None:
    """Have every error answered in OpenAI's schema."""

    async def told(request: Request, error: Exception) -> Response:
        return explain(error).response(request.url.path)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _unreadable(error).response(request.url.path)

    async def misdirected(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = _misdirected(request, error).response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(MinigenError, told)
    app.add_exception_handler(ModelFailedError, told)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(HTTPException, misdirected)
    app.add_exception_handler(Exception, told)


def _misdirected(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(f"There is no {where}; /docs lists what there is.", status=404)
    if error.status_code == 405:
        return ApiError(f"{where} is not how this is asked; see /docs.", status=405)
    return ApiError(str(error.detail), status=error.status_code)


def _unreadable(error: RequestValidationError) -> ApiError:
    """What is wrong with a body, in one sentence about the first thing that is."""
    first = error.errors()[0]
    field = _field(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(f"The body is no JSON: {first['ctx']['error']}.")
    if first["type"] == "extra_forbidden":
        return ApiError(
            f"minigen does not know the field {field!r}, so it would not be heeded.", param=field
        )
    if not field:
        return ApiError(
            "The body must be a JSON object, sent with the header 'Content-Type: application/json'."
        )
    if first["type"] == "missing":
        return ApiError(f"The field {field!r} is missing.", param=field)
    message = first["msg"].removeprefix("Value error, ")
    message, *_ = message.replace("Input should be", "should be", 1).split(" after validation")
    return ApiError(f"{field!r}: {message}, not {_shown(first['input'])}.", param=field)


def _field(place: tuple[Any, ...]) -> str:
    """`("body", "messages", 0, "content")` as "messages[0].content"."""
    name = ""
    for each in place[1:]:
        name += f"[{each}]" if isinstance(each, int) else f".{each}"
    return name.removeprefix(".")


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
