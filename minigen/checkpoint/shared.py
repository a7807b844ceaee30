"""What several engines of one opened checkpoint use together, such as its weights in a form."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Shared:
    """Parts by key. Each is built once, and freed when nothing uses it any longer.

    A part must support weak references, as a class's objects do and tuples do not.
    """

    def __init__(self) -> None:
        self._parts: WeakValueDictionary[Hashable, object] = WeakValueDictionary()
        self._lock = Lock()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the part of this key; `build` makes it if nothing uses it now."""
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = build()
            return part  # type: ignore[return-value]  # what `build` of this key returned
