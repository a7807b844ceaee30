"""Online softmax written out, a tile of keys at a time, with all that a program remembers between.

Source: Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fold:
    """After one tile: what one query has seen of the scores, and what it remembers of it.

    `shrink` is what the tile's larger maximum made of all before: exp(old maximum - new maximum).
    `mixed / total` is the answer so far.
    """

    scores: Tensor
    maximum: float
    shrink: float
    total: float
    mixed: Tensor


def fold_tiles(scores: Tensor, values: Tensor, tile: int) -> list[Fold]:
    """Softmax(scores) values of one query, `tile` keys at a time; the last fold has all of it.

    `scores` are of as many keys as `values` has rows.

    >>> folds = fold_tiles(torch.tensor([0.0, 0.0, 0.0]), torch.eye(3), tile=2)
    >>> [fold.total for fold in folds]
    [2.0, 3.0]
    """
    maximum, total, mixed = -torch.inf, 0.0, torch.zeros(values.shape[1])
    folds = []
    for own, rows in zip(scores.split(tile), values.split(tile), strict=True):
        higher = max(maximum, float(own.max()))
        shrink = float(torch.tensor(maximum - higher).exp())
        weights = (own - higher).exp()
        total = total * shrink + float(weights.sum())
        mixed = mixed * shrink + weights @ rows
        maximum = higher
        folds.append(Fold(own, maximum, shrink, total, mixed))
    return folds
