"""Online softmax as it is told and drawn ends at softmax over all keys."""

import pytest
import torch

from minigen.teach.online_softmax import fold_tiles
from minigen.viz.online_softmax import online_softmax


def query(num_keys: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scores = 4 * torch.randn(num_keys, generator=generator)
    return scores, torch.randn(num_keys, 4, generator=generator)


@pytest.mark.parametrize("tile", [1, 3, 10, 16])
def test_the_last_fold_is_softmax_over_all_keys(tile: int) -> None:
    scores, values = query()
    last = fold_tiles(scores, values, tile)[-1]
    torch.testing.assert_close(last.mixed / last.total, scores.softmax(dim=0) @ values)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores_neither_overflow_nor_vanish(size: float) -> None:
    scores, values = query()
    last = fold_tiles(scores + size, values, 3)[-1]
    assert last.total >= 1
    assert last.mixed.isfinite().all()


def test_what_was_before_shrinks_when_a_larger_score_comes_and_else_stays() -> None:
    folds = fold_tiles(torch.tensor([0.0, 1.0, 0.5, -3.0]), torch.eye(4), tile=1)
    assert [round(fold.shrink, 4) for fold in folds] == [0.0, 0.3679, 1.0, 1.0]
    assert [fold.maximum for fold in folds] == [0.0, 1.0, 1.0, 1.0]


def test_the_figure_shows_the_answer_so_far_and_where_it_goes() -> None:
    scores, values = query()
    made = online_softmax(scores, values, tile=4, seen=3)
    left, right = made.axes
    assert left.get_title(loc="left").startswith("Tile 3 of 3")
    heights = torch.tensor([float(bar.get_height()) for bar in right.patches]).float()
    torch.testing.assert_close(heights, scores.softmax(dim=0) @ values, atol=1e-5, rtol=1e-5)


def test_tiles_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="There are 3 tiles"):
        online_softmax(*query(), tile=4, seen=4)
