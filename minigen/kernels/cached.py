"""What kernels do with keys and values in each form; the type of the cache chooses.

`write_query`, `write_key` and `write_value` take numbers in; `score`, `round_shares` and `mix` are
the parts of attention that read them.
"""

from collections.abc import Callable
from typing import Any

from numba.extending import overload

from minigen.kernels import cached_bytes, cached_pairs
from minigen.kernels.llvm import OutsideKernelError
from minigen.kernels.paging import ByteCache


def _of_form(name: str) -> Callable[..., Any]:
    """The functions of that name as one: what it is depends on its first argument, a cache."""
    in_bytes, in_pairs = getattr(cached_bytes, name), getattr(cached_pairs, name)

    def chosen(*args: Any) -> Any:
        raise OutsideKernelError

    @overload(chosen, strict=False)
    def choose(cache: Any, *others: Any) -> Any:
        return in_bytes if cache.instance_class is ByteCache else in_pairs

    return chosen


write_query = _of_form("write_query")
write_key = _of_form("write_key")
write_value = _of_form("write_value")
score = _of_form("score")
round_shares = _of_form("round_shares")
mix = _of_form("mix")
