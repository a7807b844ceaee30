"""What middleware and routes share: open paths, facts of a request, and the server's limits.

The limits are checked once, when the server starts. Middleware and routes write the record; the
access log reads it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minigen.errors import ContextLengthError, OptionError, ParamsError
from minigen.fields import FLAG, Values, check, option, real, require, whole

if TYPE_CHECKING:  # the command line shows the limits without the server's packages
    from starlette.types import Scope

    from minigen.outputs import RequestState
    from minigen.server.errors import ApiError

OPEN = frozenset({"/health", "/ready", "/version"})
WORK = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/api/generate", "/api/chat", "/v1/responses"),
    }
)


def makes_work(scope: "Scope") -> bool:
    """Return whether a request needs a model or tokenizer, rather than stored information."""
    return scope["method"] == "POST" and scope["path"] in WORK


def header(scope: "Scope", name: bytes) -> bytes | None:
    """Return the first header with this (lower-case) name; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


PLACE, FAILURE = "minigen.record", "minigen.failure"


@dataclass
class RequestRecord:
    """The log record of one request, without its prompt; routes set `model` and token counts."""

    request_id: str = ""
    key: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def record_of(scope: "Scope") -> RequestRecord:
    """Return the record of a request's ASGI scope; the first call creates it."""
    state: dict[str, RequestRecord] = scope.setdefault("state", {})
    return state.setdefault(PLACE, RequestRecord())


def set_failure(scope: "Scope", failure: "Callable[[ApiError], bytes]") -> None:
    """Say how an error is written into the stream that answers a request."""
    scope.setdefault("state", {})[FAILURE] = failure


def failure_of(scope: "Scope") -> "Callable[[ApiError], bytes] | None":
    """Return what `set_failure` has set; None for a response that is no stream."""
    failure: Callable[[ApiError], bytes] | None = scope.get("state", {}).get(FAILURE)
    return failure


MOST_ANSWERS_PER_PROMPT = 128  # OpenAI's limit of n, also in the HTTP schema
MOST_SECONDS = 365 * 24 * 3600  # far more than is useful; a timer accepts no infinite time
COUNT = whole(1, 2**31 - 1)
SECONDS = Values("a number of seconds above 0", real(0, MOST_SECONDS, above=True).allows)


def _is_origin(value: object) -> bool:
    scheme, _, host = value.partition("://") if isinstance(value, str) else ("", "", "")
    is_whole = scheme.isalpha() and host and not set(host) & set("/?#*, ") and host.isascii()
    return value == "*" or bool(is_whole)


ORIGIN = Values('"*", or like "http://localhost:3000" without a path', _is_origin)
ORIGINS = Values("a list of origins", lambda value: isinstance(value, list | tuple))


@dataclass(frozen=True)
class Limits:
    """The server's limits; None means no limit. Raises `OptionError` for an invalid value.

    The defaults suit a laptop; those at "serve" are the same as text. Routes call `check`, which
    applies `max_prompt_tokens` and `max_n`; the middleware applies the others.
    """

    max_body_bytes: int = option(
        8 * 2**20, "Largest request body, such as 8MiB.", COUNT, at={"serve": "8MiB"}
    )
    body_timeout: float = option(
        30, "Time limit for receiving a request body.", SECONDS, at={"serve": "30s"}
    )
    max_in_flight: int | None = option(
        256, "Requests at once, at most; further ones get status 429.", COUNT
    )
    max_in_flight_per_key: int | None = option(
        None, "Requests at once per API key, at most; else 429.", COUNT
    )
    max_queue: int | None = option(
        None, "Sequences waiting for the engine, at most; else 429.", whole(0, 2**31 - 1)
    )
    max_prompt_tokens: int | None = option(
        None, "Tokens per prompt, at most; the context length if absent.", COUNT
    )
    max_n: int | None = option(
        MOST_ANSWERS_PER_PROMPT,
        "Completions per prompt (n), at most.",
        whole(1, MOST_ANSWERS_PER_PROMPT),
    )
    request_timeout: float | None = option(
        3600, "Time limit for a whole request; else 504.", SECONDS, at={"serve": "1h"}
    )
    send_timeout: float = option(
        60, "Disconnect a client that reads nothing for this time.", SECONDS, at={"serve": "60s"}
    )
    drain_timeout: float = option(
        30, "Time that running requests get to finish at shutdown.", SECONDS, at={"serve": "30s"}
    )
    cors_origins: SequenceOf[str] = option(
        (),
        "An origin of web pages that may call the server (CORS), or '*'; repeatable.",
        ORIGINS,
        panel="Access",
    )
    open_metrics: bool = option(
        False, "Allow requests for /metrics without a key.", FLAG, panel="Access"
    )

    def __post_init__(self) -> None:
        check(self, OptionError)
        for origin in self.cors_origins:
            require("An origin", origin, ORIGIN, OptionError)

    def check(self, answers: "Iterable[RequestState]") -> None:
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
