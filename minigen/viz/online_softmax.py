"""Online softmax, tile by tile: scores, the running maximum, and the answer so far."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minigen.teach.online_softmax import fold_tiles
from minigen.viz.style import BLUE, FAINT, INK, ORANGE, QUIET, figure, title


def online_softmax(scores: Tensor, values: Tensor, tile: int, seen: int) -> Figure:
    """Left: the scores of the first `seen` tiles, those to come pale. Right: what is remembered.

    The dots on the right are softmax over all keys at once, which the last tile must reach.
    """
    folds = fold_tiles(scores, values, tile)
    if not 1 <= seen <= len(folds):
        raise ValueError(f"There are {len(folds)} tiles: seen must be from 1 to {len(folds)}.")
    now, end = folds[seen - 1], min(seen * tile, len(scores))
    made, (left, right) = figure(10, 3.1, ncols=2, width_ratios=(3, 2))
    places = torch.arange(len(scores)).tolist()
    begin = (seen - 1) * tile
    colours = [FAINT if place >= end else ORANGE if place >= begin else BLUE for place in places]
    left.bar(places, scores.tolist(), color=colours)
    left.axhline(now.maximum, color=INK, linewidth=1, linestyle="--")
    left.set(xlabel="key", ylabel="score")
    title(left, f"Tile {seen} of {len(folds)}: the maximum is {now.maximum:.2f}")
    answer = now.mixed / now.total
    right.bar(range(len(answer)), answer.tolist(), color=BLUE, label="answer so far")
    whole = scores.softmax(dim=0) @ values
    right.plot(range(len(whole)), whole.tolist(), "o", color=ORANGE, label="over all keys")
    right.axhline(0, color=QUIET, linewidth=0.8)
    right.set(xlabel="column of the values", xticks=range(len(whole)))
    made.legend(loc="outside lower right", frameon=False, labelcolor=INK, fontsize=9, ncols=2)
    title(right, f"What was before counts {now.shrink:.2f} times; sum {now.total:.2f}")
    return made
