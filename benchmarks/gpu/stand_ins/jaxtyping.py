"""What minigen's annotations need where jaxtyping is not installed: names that say nothing.

On a machine without a package index only; the folder stands last on the path.
"""

from typing import Any


class _Unchecked:
    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unchecked
