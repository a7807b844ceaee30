"""Which paths are open to all, and which make work for the engine."""

from starlette.types import Scope

OPEN = frozenset({"/health", "/ready", "/version"})
WORK = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("/api/generate", "/api/chat"),
    }
)


def makes_work(scope: Scope) -> bool:
    """Whether a request asks for more than a look at what the server knows already."""
    return scope["method"] == "POST" and scope["path"] in WORK


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None
