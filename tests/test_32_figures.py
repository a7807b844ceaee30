"""Figures of chapter 32: online softmax ends as softmax over all keys, tiles follow the mask."""

import math
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex

from minigen.model.attention import causal_mask
from minigen_course.ch32_flash_attention.figures import (
    by_length,
    bytes_by_tile,
    draw_tiles,
    on_chip,
    online_softmax,
    rows_by_program,
)
from minigen_course.ch32_flash_attention.lesson import Sight, fold_tiles, pairs_wanted, score_tiles
from minigen_course.figures.style import FAINT, ORANGE
from minigen_course.lab.triton_interpreter import Access

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "32_flash_attention.py"


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


def test_earlier_sums_shrink_when_a_larger_score_comes_and_stay_otherwise() -> None:
    folds = fold_tiles(torch.tensor([0.0, 1.0, 0.5, -3.0]), torch.eye(4), tile=1)
    assert [round(fold.shrink, 4) for fold in folds] == [0.0, 0.3679, 1.0, 1.0]
    assert [fold.maximum for fold in folds] == [0.0, 1.0, 1.0, 1.0]


def test_the_figure_shows_the_answer_so_far_and_where_it_goes() -> None:
    scores, values = query()
    made = online_softmax(scores, values, tile=4, seen=3)
    left, middle, right = made.axes
    assert left.get_title(loc="left").startswith("Tile 3 of 3")
    assert max(bar.get_height() for bar in middle.patches) == pytest.approx(1)
    heights = torch.tensor([float(bar.get_height()) for bar in right.patches]).float()
    torch.testing.assert_close(heights, scores.softmax(dim=0) @ values, atol=1e-5, rtol=1e-5)


def test_the_weights_before_shrink_where_the_maximum_leaps() -> None:
    made = online_softmax(torch.tensor([0.0, -1.0, 3.0, 1.0]), torch.eye(4), tile=2, seen=2)
    bars = [bar.get_height() for bar in made.axes[1].patches]
    now, before = bars[:4], bars[4:]
    assert before == pytest.approx([1, math.exp(-1)])
    assert now[:2] == pytest.approx([math.exp(-3) * each for each in before])
    assert "shrink x 0.05" in made.axes[1].get_title(loc="left")


def test_an_arrow_shows_the_factor_where_the_maximum_leaps() -> None:
    scores = torch.tensor([0.0, -1.0, 3.0, 1.0, 2.0, 0.0])
    leap, calm = (online_softmax(scores, torch.eye(6), tile=2, seen=seen) for seen in (2, 3))
    assert [each.get_text() for each in leap.axes[1].texts] == ["", "x 0.05"]
    assert leap.axes[1].texts[0].xy == (0, pytest.approx(math.exp(-3)))
    assert not calm.axes[1].texts


def test_the_chip_shows_the_shapes_of_all_that_a_program_keeps() -> None:
    (axes,) = on_chip(2048, 128, 64, 32).axes
    said = " ".join(each.get_text() for each in axes.texts)
    for shape in ("Q\n[2,048, 128]", "Q i\n[64, 128]", "scores\n[64, 32]", "V j\n[32, 128]"):
        assert shape in said
    assert "l\n[64]" in said


def test_bytes_by_tile_are_a_line_beside_levels() -> None:
    (axes,) = bytes_by_tile({16: 4.0, 32: 2.0}, {"matrix": 3.0}, "MB", "said").axes
    tiled, level = axes.lines
    assert list(tiled.get_ydata()) == [4.0, 2.0]
    assert set(level.get_ydata()) == {3.0}
    assert axes.get_ylabel() == "MB"


def test_the_notebooks_picture_stands_at_a_leap_of_the_maximum() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "at=leap" in text
    assert "assert folds[leap].shrink < 0.5" in text


def test_tiles_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="There are 3 tiles"):
        online_softmax(*query(), tile=4, seen=4)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(
    ("num_new", "context", "block_m", "block_n"),
    [(12, 12, 4, 4), (11, 17, 4, 3), (1, 9, 4, 4), (20, 20, 16, 8), (6, 30, 4, 8)],
)
def test_tiles_are_skipped_where_the_mask_hides_all_and_masked_where_it_hides_some(
    num_new: int, context: int, block_m: int, block_n: int, window: int | None
) -> None:
    mask = causal_mask(num_new, context, window)
    tiles = score_tiles(num_new, context, block_m, block_n, window)
    for tile in tiles:
        own = mask[tile.queries.start : tile.queries.stop, tile.keys.start : tile.keys.stop]
        assert tile.pairs == own.numel()
        assert (tile.sight is Sight.NOTHING) == (not own.any())
        assert (tile.sight is Sight.WHOLE) == bool(own.all())
    assert sum(tile.pairs for tile in tiles) == num_new * context
    assert pairs_wanted(num_new, context, window) == int(mask.sum())


def test_the_picture_of_tiles_shows_how_many_are_computed() -> None:
    made = draw_tiles(96, 128, 16, 16)
    (axes,) = made.axes
    colours = [to_hex(patch.get_facecolor()) for patch in axes.patches]
    assert len(colours) == 6 * 8
    assert colours.count(FAINT) == sum(range(6))
    assert colours.count(ORANGE) == 6
    title = axes.get_title(loc="left")
    assert title.startswith("33 of 48 tiles computed: 8,448 scores for the 7,728 that count")
    with pytest.raises(ValueError, match="129 queries are more than the 128 positions"):
        draw_tiles(129, 128, 16, 16)


def test_lines_by_length_show_what_they_are_given() -> None:
    (axes,) = by_length({"one": {1: 2.0, 2: 8.0}, "other": {1: 1.0, 2: 2.0}}, "MB", "said").axes
    shown = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert shown == {"one": [2.0, 8.0], "other": [1.0, 2.0]}


def test_rows_that_a_program_touches_are_coloured_by_what_it_does() -> None:
    accesses = [
        Access((0, 0, 0), False, "k", (0, 1, 2, 3), 4),
        Access((1, 0, 0), False, "k", (0, 1, 2, 3, 4, 5), 4),
        Access((1, 1, 0), False, "k", (6, 7), 4),  # of another head
        Access((0, 0, 0), True, "mixed", (0, 1), 4),
    ]
    made = rows_by_program(accesses, {"k": 2, "mixed": 2})
    loaded, stored = (axes.images[0].get_array().tolist() for axes in made.axes)
    assert loaded == [[1, 1, 0], [1, 1, 1]]
    assert stored == [[2], [0]]
    titles = [axes.get_title(loc="left") for axes in made.axes]
    assert titles == ["k: 5 rows loaded", "mixed: stored"]
