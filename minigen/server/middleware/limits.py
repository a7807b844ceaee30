"""What middleware and routes share: open paths, the record of a request, and the server's limits.

The limits are checked once, when the server starts. Middleware and routes write the record; the
access log reads it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

from minigen.errors import ContextLengthError, OptionError, ParamsError
from minigen.fields import require, whole
from minigen.outputs import RequestState

OPEN = frozenset({"/health", "/ready", "/version"})
WORK = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("/api/generate", "/api/chat"),
    }
)


def makes_work(scope: Scope) -> bool:
    """Return whether a request needs a model or tokenizer, rather than stored information."""
    return scope["method"] == "POST" and scope["path"] in WORK


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with this (lower-case) name; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


PLACE = "minigen.record"


@dataclass
class RequestRecord:
    """The log record of one request, without its prompt; routes set `model` and token counts."""

    request_id: str = ""
    key: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request's ASGI scope; the first call creates it."""
    state: dict[str, RequestRecord] = scope.setdefault("state", {})
    return state.setdefault(PLACE, RequestRecord())


MOST = 2**31 - 1
MOST_ANSWERS_PER_PROMPT = 128  # OpenAI's limit of n, also in the HTTP schema
COUNTS = {
    "max_in_flight": whole(1, MOST),
    "max_in_flight_per_key": whole(1, MOST),
    "max_prompt_tokens": whole(1, MOST),
    "max_n": whole(1, MOST_ANSWERS_PER_PROMPT),
    "max_queue": whole(0, MOST),
}
SECONDS = ("body_timeout", "request_timeout", "send_timeout", "drain_timeout")
MOST_SECONDS = 365 * 24 * 3600  # far more than is useful; a timer accepts no infinite time


@dataclass(frozen=True)
class Limits:
    """The server's limits; None means no limit. Raises `OptionError` for an invalid value.

    The defaults suit a laptop. A body has at most `max_body_bytes`, and must arrive completely
    within `body_timeout` seconds. At most `max_in_flight` requests that make work are in flight, at
    most `max_in_flight_per_key` with one API key, and new ones are rejected while `max_queue`
    sequences wait in the engine. A request takes at most `request_timeout` seconds in total. A
    client that does not read for `send_timeout` seconds is disconnected. At shutdown, running
    requests get `drain_timeout` seconds. Routes call `check`, which applies `max_prompt_tokens` and
    `max_n`. Web pages of `cors_origins` ("*" for all) may call the server from a browser, and
    `/metrics` requires a key unless `open_metrics` is set.
    """

    max_body_bytes: int = 8 * 2**20
    body_timeout: float = 30
    max_in_flight: int | None = 256
    max_in_flight_per_key: int | None = None
    max_queue: int | None = None
    request_timeout: float | None = 3600
    send_timeout: float = 60
    drain_timeout: float = 30
    max_prompt_tokens: int | None = None
    max_n: int | None = MOST_ANSWERS_PER_PROMPT
    cors_origins: tuple[str, ...] = ()
    open_metrics: bool = False

    def __post_init__(self) -> None:
        require("max_body_bytes", self.max_body_bytes, whole(1, MOST), OptionError)
        for name, allowed in COUNTS.items():
            if getattr(self, name) is not None:
                require(name, getattr(self, name), allowed, OptionError)
        for name in SECONDS:
            if name != "request_timeout" or self.request_timeout is not None:
                _seconds(name, getattr(self, name))
        for origin in self.cors_origins:
            _origin(origin)

    def check(self, answers: Iterable[RequestState]) -> None:
        """Raise a `MinigenError` if one of a request's answers exceeds a limit."""
        for answer in answers:
            self.check_prompt(len(answer.sequence.prompt_ids))
            self.check_n(answer.sequence.params.n)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise `ContextLengthError` for a prompt of more than `max_prompt_tokens`."""
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            raise ContextLengthError(
                f"The prompt has {num_tokens} tokens; this server accepts at most "
                f"{self.max_prompt_tokens}."
            )

    def check_n(self, n: int) -> None:
        """Raise `ParamsError` for more than `max_n` answers to a prompt."""
        if self.max_n is not None and n > self.max_n:
            raise ParamsError(f"n is {n}; this server allows at most {self.max_n} answers.")


def _seconds(name: str, value: object) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not 0 < value <= MOST_SECONDS:  # type: ignore[arg-type, operator]
        raise OptionError(f"{name} must be a number of seconds above 0, not {value!r}.")


def _origin(origin: object) -> None:
    scheme, _, host = origin.partition("://") if isinstance(origin, str) else ("", "", "")
    whole = scheme.isalpha() and host and not set(host) & set("/?#*, ") and host.isascii()
    if origin != "*" and not whole:
        raise OptionError(
            f'An origin must be "*", or like "http://localhost:3000" without a path, not '
            f"{origin!r}."
        )
