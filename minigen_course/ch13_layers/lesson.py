"""What chapter 13 asks for beyond the package: a test of position encodings, a partial rotation."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.model.layers import apply_rotary


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


def rotate_first(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first numbers of each head, two for each cosine; leave the others as they are.

    Number i forms a pair with number i + half. GPT-NeoX-20B rotates the first quarter.
    """
    num_rotated = 2 * cos.shape[-1]
    rotated = apply_rotary(x[..., :num_rotated], cos, sin)
    return torch.cat([rotated, x[..., num_rotated:]], dim=-1)
