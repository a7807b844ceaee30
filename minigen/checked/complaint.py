"""How a foreign part's mistake is reported."""

from typing import Any

from minigen.errors import PartError


def name_of(part: Any) -> str:
    """The name that a part is known by: its own, or its class's."""
    name: str = getattr(part, "__name__", type(part).__name__)
    return name


def complaint(part: Any, method: str, what: str) -> PartError:
    """An error that names the part and its method, and says what it did and what would be right."""
    return PartError(f"{name_of(part)}.{method} {what}." if method else f"{name_of(part)} {what}.")
