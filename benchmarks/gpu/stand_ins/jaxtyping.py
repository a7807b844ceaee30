"""Stand-ins for minigen's annotations where jaxtyping is not installed; they check nothing.

They serve machines without a package index; this folder is last on the path.
"""

from typing import Any


class _Unchecked:
    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unchecked
