"""Convert exceptions to an HTTP status and the error object of the API at the path."""

import json
import logging
import math
import sys
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
    StartError,
    WorkerError,
)

logger = logging.getLogger(__name__)
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # how the paths of these APIs begin
ANTHROPICS_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(MinigenError):
    """An error that is sent to the client: the HTTP status, and OpenAI's `type`, `code`, `param`.

    `retry_after` is in seconds, rounded up to whole ones for the `Retry-After` header; `headers`
    are additional response headers. `details` go into Anthropic's error object.
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
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.details = details
        self.message, self.status, self.kind = message, status, kind
        self.code, self.param, self.headers = code, param, dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def body(self, path: str = "/v1") -> bytes:
        """Return OpenAI's error object as JSON, or that of Ollama or Anthropic for their paths."""
        if path.startswith(OLLAMA):
            return json.dumps({"error": self.message}).encode()
        if path.startswith(ANTHROPIC):
            other = ANTHROPICS_TYPES[500 if self.status >= 500 else 400]
            named: dict[str, Any] = {
                "type": ANTHROPICS_TYPES.get(self.status, other),
                "message": self.message,
            }
            if self.details is not None:
                named["details"] = dict(self.details)
            return json.dumps({"type": "error", "error": named}).encode()
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def response(self, path: str) -> Response:
        """Return the complete error response, in the format of the API at this path."""
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


class ModelFailedError(Exception):
    """A step of the model failed, and with it the requests in that step; see its `__cause__`."""


class ClientGoneError(Exception):
    """The client disconnected before its response was complete."""


def explain(error: Exception) -> ApiError:
    """Return the error to send to the client for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError | CapacityError):
        return ApiError(str(error), code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(
            _stop_message(error),
            status=503,
            kind="server_error",
            code="engine_stopped",
            retry_after=1,
        )
    if isinstance(error, StartError):
        return ApiError(
            str(error), status=503, kind="server_error", code="not_started", retry_after=1
        )
    if isinstance(error, MinigenError):
        return ApiError(str(error))
    if isinstance(error, RecursionError):
        return ApiError("The request is nested too deeply.")
    if isinstance(error, ModelFailedError):
        return ApiError(
            f"The model failed on this request ({error}); see the server's log.",
            status=500,
            kind="server_error",
            code="model_failed",
        )
    return ApiError(
        "The server failed on this request because of an internal error; see the server's log.",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def _stop_message(error: EngineStoppedError) -> str:
    if any(isinstance(each, WorkerError) for each in (error, error.__cause__)):
        return (
            "A process with a shard of the model has ended, so the server shuts down; try again "
            "when it has been restarted."
        )
    return "The engine has stopped, so this request was aborted; try again."


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers that turn every error into an OpenAI error response."""

    async def on_error(request: Request, error: Exception) -> Response:
        return explain(error).response(request.url.path)

    async def on_invalid_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response(request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = _routing_error(request, error).response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(MinigenError, on_error)
    app.add_exception_handler(ModelFailedError, on_error)
    app.add_exception_handler(RecursionError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return ApiError(f"There is no route {method} {path}; see /docs for all routes.", status=404)
    if error.status_code == 405:
        return ApiError(f"{path} does not accept {method}; see /docs.", status=405)
    unread = _unread_body(error.__cause__)
    if unread is not None:
        return unread
    return ApiError(str(error.detail), status=error.status_code)


def _unread_body(cause: BaseException | None) -> ApiError | None:
    """Describe what kept FastAPI from reading a body, other than JSON's syntax; None if nothing."""
    if isinstance(cause, RecursionError):
        return explain(cause)
    if isinstance(cause, UnicodeDecodeError):
        return ApiError(
            f"The body is not valid {cause.encoding.upper()}: {cause.reason} at byte {cause.start}."
        )
    if isinstance(cause, ValueError):
        most = sys.get_int_max_str_digits()
        return ApiError(f"The body has a whole number of more than {most} digits.")
    return None


def _validation_error(error: RequestValidationError) -> ApiError:
    """Describe the first problem of a request body in one sentence."""
    first = error.errors()[0]
    field = _field(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(f"The body is not valid JSON: {first['ctx']['error']}.")
    if first["type"] == "extra_forbidden":
        return ApiError(f"minigen does not support the field {field!r}; remove it.", param=field)
    if first["type"] == "string_unicode":  # of a value, or of a field's name
        return ApiError(
            f"{repr(field) if field else 'The body'} has text with half of a surrogate pair, which "
            f"is not valid Unicode: {_shown(first['input'])}.",
            param=field or None,
        )
    if not field:
        return ApiError(
            "The body must be a JSON object, sent with the header 'Content-Type: application/json'."
        )
    if first["type"] == "missing":
        return ApiError(f"The field {field!r} is missing.", param=field)
    if first["type"] == "too_long" and isinstance(first["input"], list):
        most, given = first["ctx"]["max_length"], len(first["input"])
        return ApiError(f"{field!r}: should have at most {most} items, not {given}.", param=field)
    message = first["msg"].removeprefix("Value error, ")
    message, *_ = message.replace("Input should be", "should be", 1).split(" after validation")
    return ApiError(f"{field!r}: {message}, not {_shown(first['input'])}.", param=field)


def _field(place: tuple[Any, ...]) -> str:
    """Format `("body", "messages", 0, "content")` as "messages[0].content"."""
    name = ""
    for each in place[1:]:
        if isinstance(each, str) and "[" in each:  # pydantic's name of one type of several
            continue
        name += f"[{each}]" if isinstance(each, int) else f".{each}"
    return name.removeprefix(".")


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
