"""Which tiles of a matrix of scores FlashAttention computes, and what that takes beside the whole.

The bounds are those of `minigen.kernels.gpu.prefill`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Sight(Enum):
    """Who of a tile's queries may look at which of its keys."""

    WHOLE = "seen whole"
    PARTLY = "masked"
    NOTHING = "left out"


@dataclass(frozen=True)
class Tile:
    """Queries and keys from a first to before a last, counted from 0, and what is seen of them."""

    queries: range
    keys: range
    sight: Sight

    @property
    def pairs(self) -> int:
        """Scores that it has."""
        return len(self.queries) * len(self.keys)


def score_tiles(
    num_new: int, context: int, block_m: int, block_n: int, window: int | None = None
) -> list[Tile]:
    """All tiles of the scores of `num_new` queries, the last of `context` positions.

    A tile has `block_m` queries and `block_n` keys, fewer at the ends.

    >>> [tile.sight.value for tile in score_tiles(4, 4, 2, 2)]
    ['masked', 'left out', 'seen whole', 'masked']
    """
    return [
        Tile(queries, keys, _sight(queries, keys, context - num_new, window))
        for queries in _cut(num_new, block_m)
        for keys in _cut(context, block_n)
    ]


def _cut(length: int, block: int) -> Iterator[range]:
    return (range(begin, min(begin + block, length)) for begin in range(0, length, block))


def _sight(queries: range, keys: range, before: int, window: int | None) -> Sight:
    first, last = before + queries[0], before + queries[-1]
    forgotten = keys[-1] <= first - window if window is not None else False
    if keys[0] > last or forgotten:
        return Sight.NOTHING
    within = window is None or keys[0] > last - window
    return Sight.WHOLE if keys[-1] <= first and within else Sight.PARTLY


def pairs_wanted(num_new: int, context: int, window: int | None = None) -> int:
    """Pairs of a query and a key that it may look at.

    >>> pairs_wanted(3, 3), pairs_wanted(1, 5), pairs_wanted(3, 5, window=2)
    (6, 5, 6)
    """
    positions = range(context - num_new + 1, context + 1)
    return sum(each if window is None else min(each, window) for each in positions)


def numbers_moved(num_new: int, context: int, head_dim: int, block_m: int) -> int:
    """Numbers that one head's programs load and store together, without a window.

    Queries and results once; keys and values once for each tile of queries, up to its last one's
    own, however they are cut into tiles themselves.

    >>> numbers_moved(4, 4, head_dim=1, block_m=2)  # 4 and 4, then 2 of 2, then 2 of 4
    20
    """
    keys = sum(context - num_new + queries.stop for queries in _cut(num_new, block_m))
    return 2 * num_new * head_dim + 2 * keys * head_dim
