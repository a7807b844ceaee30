"""A test of position encodings: whether a score depends on the distance of two tokens alone."""

from collections.abc import Callable

import torch
from torch import Tensor


def depends_on_distance_only(encode: Callable[[Tensor, int], Tensor], head_dim: int) -> bool:
    """Return whether scores stay the same when both tokens move by the same number of positions.

    `encode(vector, position)` returns a query or a key of `head_dim` numbers as it is at a
    position. Positions 0 to 63 are tested, with a random query and a random key. Scores that differ
    by less than 0.01 count as equal, because float32 rounds.
    """
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, head_dim, generator=generator)
    queries = torch.stack([encode(query, position) for position in range(64)])
    keys = torch.stack([encode(key, position) for position in range(64)])
    scores = queries @ keys.T
    return torch.allclose(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=0.01)
