"""How a foreign part's mistake is reported."""

import operator
import reprlib
from collections.abc import Iterable
from typing import Any

from minigen.errors import PartError


def name_of(part: Any) -> str:
    """The name that a part is known by: its own, or its class's."""
    name: str = getattr(part, "__name__", type(part).__name__)
    return name


def complaint(part: Any, method: str, what: str) -> PartError:
    """An error that names the part and its method, and says what it did and what would be right."""
    return PartError(f"{name_of(part)}.{method} {what}." if method else f"{name_of(part)} {what}.")


def items_of(part: Any, method: str, returned: Any, wanted: str) -> list[Any]:
    """What a part returned, as a list. Raises `PartError`, saying what is `wanted`, if it is none.

    Short, whatever the items are: a sequence's own repr fills a page.
    """
    if not isinstance(returned, Iterable):
        raise complaint(part, method, f"must return {wanted}, not {reprlib.repr(returned)}")
    return list(returned)


def block_ids_of(part: Any, method: str, returned: Any) -> list[int]:
    """What a part returned, as block ids. Raises `PartError` if it is not a list of those."""
    items = items_of(part, method, returned, "a list of block ids")
    return [whole_number(part, method, item, "must return a list of block ids") for item in items]


def whole_number(part: Any, method: str, value: Any, wanted: str) -> int:
    """A number that a part told. Raises `PartError`, saying what is `wanted`, if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise complaint(part, method, f"{wanted}; {reprlib.repr(value)} is none") from None
