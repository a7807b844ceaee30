"""What is known of a request: written by middlewares and routes, read by the access log."""

from dataclasses import dataclass

from starlette.types import Scope

PLACE = "minigen.record"


@dataclass
class RequestRecord:
    """One request. Routes fill in `model` and the counts of tokens; prompts have no place here."""

    request_id: str = ""
    key: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request of an ASGI scope, which begins with the first who asks for it."""
    state: dict[str, RequestRecord] = scope.setdefault("state", {})
    return state.setdefault(PLACE, RequestRecord())
