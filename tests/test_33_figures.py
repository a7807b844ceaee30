"""Figures and the model of waves of chapter 33 show the given numbers."""

import pytest
import torch

from minigen_course.ch33_paged_attention.figures import (
    best_split_curves,
    bytes_bars,
    cells_loaded,
    fill_chip,
    group_products,
    pool_loads,
    split_merge,
    table_lookup,
)
from minigen_course.ch33_paged_attention.lesson import (
    CHIPS,
    LAUNCH_SECONDS,
    TILE_SECONDS,
    Assumed,
    Decoding,
    best_splits,
    instructions_of,
    seconds,
    split_choices,
    waves,
)
from minigen_course.figures.style import FAINT, ORANGE
from minigen_course.lab.triton_interpreter import Access

CHIP = CHIPS["H100 SXM"]


def test_a_long_context_in_one_piece_waits_for_its_tiles() -> None:
    alone = Decoding(batch=1, context=64 * 1000)
    (wave,) = waves(alone, CHIP, splits=1, resident=2)
    assert wave.num_programs == 8
    assert wave.end == pytest.approx(1000 * TILE_SECONDS)
    assert seconds(alone, CHIP, 1, 2) > 10 * alone.kv_bytes / CHIP.bandwidth


def test_many_programs_are_as_fast_as_memory_and_no_faster() -> None:
    crowd = Decoding(batch=256, context=4096)
    for resident in (1, 2, 4):
        took = seconds(crowd, CHIP, 1, resident)
        assert took >= crowd.kv_bytes / CHIP.bandwidth * (1 - 1e-9)
    assert seconds(crowd, CHIP, 1, 4) < 1.2 * crowd.kv_bytes / CHIP.bandwidth


@pytest.mark.parametrize("splits", [1, 4, 32])
def test_waves_run_every_program_once_and_follow_each_other(splits: int) -> None:
    work = Decoding(batch=37, context=3000)
    run = waves(work, CHIP, splits, resident=2)
    assert sum(wave.num_programs for wave in run) == work.num_programs(splits)
    assert max(wave.num_programs for wave in run) <= 2 * CHIP.processors
    assert [wave.begin for wave in run[1:]] == [wave.end for wave in run[:-1]]


def test_splitting_pays_where_few_sequences_are_long_and_costs_where_many_are() -> None:
    few, many = Decoding(batch=1, context=32_768), Decoding(batch=128, context=4096)
    assert seconds(few, CHIP, best_splits(few, CHIP, 2), 2) < seconds(few, CHIP, 1, 2) / 5
    assert best_splits(many, CHIP, 2) == 1
    assert seconds(many, CHIP, 64, 2) > seconds(many, CHIP, 1, 2)


def test_a_second_pass_costs_time_where_there_is_one() -> None:
    work = Decoding(batch=1, context=4096)
    first = waves(work, CHIP, 2, 2)[-1].end
    parts = 2 * 4 * 32 * 2 * (128 + 2) / CHIP.bandwidth
    assert seconds(work, CHIP, 2, 2) == pytest.approx(first + LAUNCH_SECONDS + parts)
    assert work.part_bytes(1) == 0


def test_every_split_has_a_tile() -> None:
    assert split_choices(Decoding(1, 1)) == [1]
    assert split_choices(Decoding(1, 64 * 5)) == [1, 2, 4]
    assert split_choices(Decoding(1, 64 * 4096))[-1] == 64


@pytest.mark.parametrize(
    ("registers", "shared", "expected"),
    [(128, 40_000, 4), (255, 1000, 2), (33, 1000, 12), (64, 120_000, 1), (255, 400_000, 1)],
)
def test_the_scarcest_resource_limits_the_programs_per_processor(
    registers: int, shared: int, expected: int
) -> None:
    assert CHIP.resident(registers, shared) == expected


def test_the_picture_of_a_chip_shows_how_much_of_it_is_busy() -> None:
    left, right = fill_chip(Decoding(1, 32_768), CHIP, 1, 2).axes
    assert left.get_title(loc="left") == "8 programs, 1 wave: 8 of 132 busy"
    (band,) = left.patches
    assert (band.get_y(), band.get_height()) == (0, 8)
    assert [label.get_text() for label in right.get_xticklabels()] == [
        *("1", "2", "4", "8", "16", "32", "64")
    ]
    left, _ = fill_chip(Decoding(64, 4096), CHIP, 1, 2).axes
    assert left.get_title(loc="left") == ("512 programs, 2 waves: 132 of 132 busy, 132 in the last")


def test_splits_without_a_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="256 tokens are 4 tiles: split them into at most 4"):
        fill_chip(Decoding(1, 256), CHIP, 8, 2)


BLOCKS, SLOTS, HEADS, DIM = 5, 2, 2, 4
KEYS = torch.zeros(BLOCKS, SLOTS, HEADS, DIM)
TABLES = torch.tensor([[3, 1], [4, 0]])


def key(program: tuple[int, int, int], block: int, slot: int, head: int) -> Access:
    first = ((block * SLOTS + slot) * HEADS + head) * DIM
    return Access(program, False, "keys", tuple(range(first, first + DIM)), 4)


LOADS = [
    key((0, 0, 0), 3, 0, 0),
    key((0, 0, 0), 3, 1, 0),
    key((1, 0, 0), 3, 0, 1),
    Access((0, 0, 0), False, "tables", (0, 0), 8),
    Access((1, 0, 0), False, "values", (5,), 4),
]


def test_keys_are_counted_where_they_lie() -> None:
    assert cells_loaded(LOADS, KEYS) == {(3, 0, 0): 1, (3, 1, 0): 1, (3, 0, 1): 1}
    assert cells_loaded([*LOADS, LOADS[0]], KEYS)[3, 0, 0] == 2
    assert set(cells_loaded(LOADS, KEYS, (1, 0, 0))) == {(3, 0, 1)}


def test_the_pool_shows_what_one_program_loads_and_the_others_pale() -> None:
    lengths = torch.tensor([3, 1])
    left, right = pool_loads(LOADS, KEYS, TABLES, lengths, (0, 0, 0)).axes
    (image,) = left.images
    names = {(3, 0): ORANGE, (3, 2): ORANGE, (3, 1): FAINT, (0, 0): "#ffffff"}
    for (row, column), colour in names.items():
        shown = "".join(f"{round(255 * part):02x}" for part in image.get_array()[row, column])
        assert f"#{shown}" == colour
    assert left.get_title(loc="left").endswith("2 keys loaded")
    assert [text.get_text() for text in right.texts] == ["3", "1", "4"]
    with pytest.raises(ValueError, match=r"no program \(0, 2, 0\); they go up to \(1, 0, 0\)"):
        pool_loads(LOADS, KEYS, TABLES, lengths, (0, 2, 0))


def test_bars_are_multiples_of_what_is_required() -> None:
    (axes,) = bytes_bars({"a": {"keys": 10, "tables": 5}, "b": {"keys": 30}}, 10).axes
    assert [text.get_text() for text in axes.texts] == ["1.50", "3.00"]


def test_instructions_are_counted_by_kind() -> None:
    ptx = (
        "\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
        "\t@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 ];\n\tld.param.b64 %rd1, [x];\n"
        "\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 };\n"
        "\tcp.async.commit_group;\n\tcp.async.wait_group 0;\n"
    )
    assert instructions_of(ptx) == {"cp.async": 1, "ld.global": 1, "mma.sync": 1}


def test_splitting_a_lone_long_context_pays_under_every_assumption_but_not_by_the_same_factor() -> (
    None
):
    alone = Decoding(batch=1, context=32_768)
    gains, bests = [], set()
    for tile in (0.25e-6, 1e-6, 2e-6):
        times = Assumed(tile=tile)
        best = best_splits(alone, CHIP, 2, times)
        bests.add(best)
        gains.append(seconds(alone, CHIP, 1, 2, times) / seconds(alone, CHIP, best, 2, times))
    assert min(gains) > 1.5
    assert max(gains) > 2 * min(gains)
    assert len(bests) > 1


def test_the_figure_shows_what_is_assumed() -> None:
    made = fill_chip(Decoding(1, 32_768), CHIP, 8, 2, Assumed(tile=2e-6, launch=12e-6))
    labels = made.axes[1].get_legend_handles_labels()[1]
    assert "the second pass (12 µs to start)" in labels
    assert made.axes[0].get_xlim()[1] == pytest.approx(64 * 2 * 1.02)


def test_a_position_is_found_in_its_block_and_slot() -> None:
    (axes,) = table_lookup([2, 3, 1], 10, 4, 5, position=9).axes
    assert axes.get_title(loc="left").endswith("entry 9 // 4 = 2, block 1, slot 9 % 4 = 1")
    lit = [each for each in axes.patches if each.get_linewidth() > 2]
    assert [each.get_xy() for each in lit] == [(9, 4), (8, 2), (5, 0)]
    with pytest.raises(ValueError, match="There are 10 positions: choose one from 0 to 9"):
        table_lookup([2, 3, 1], 10, 4, 5, position=10)


def test_a_groups_products_are_labelled_with_their_shapes() -> None:
    (axes,) = group_products(group=3, length=200, head_dim=64, rows=16, columns=256).axes
    said = [each.get_text() for each in axes.texts]
    assert "queries q\n16 x 64" in said
    assert "keys, transposed\n64 x 256" in said
    assert any("13\nrows are padding" in each for each in said)
    assert any("56 columns\nare masked" in each for each in said)


def test_merged_splits_give_softmax_over_all_tokens() -> None:
    scores, values = torch.tensor([3.0, 1.0, 5.0, 5.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    _, sums, mixes, merged, both = split_merge(scores, values, [(0, 2), (2, 4)]).axes
    assert [each.get_text() for axes in (sums, mixes) for each in axes.texts] == [
        *("1.25", "2", "15", "70"),
    ]
    assert [each.get_text() for axes in (merged, both) for each in axes.texts] == [
        *("2.3125", "73.75"),
    ]
    weights = torch.exp2(scores) / torch.exp2(scores).sum()
    assert merged.get_title(loc="left").endswith(f"Õ / l = {float(weights @ values):.4g}")


def test_the_best_number_of_splits_follows_the_time_of_a_tile() -> None:
    left, right = best_split_curves(Decoding(1, 32_768), CHIP, 5, Assumed()).axes
    assert left.get_title(loc="left") == "Best by the model: 16 splits"
    given = right.lines[1].get_ydata().tolist()
    assert given == sorted(given)
    assert given[0] < 4 < given[-1]
    one = best_split_curves(Decoding(84, 256), CHIP, 5, Assumed(launch=12e-6)).axes[0]
    assert one.get_title(loc="left") == "Best by the model: 1 split"


@pytest.mark.parametrize("tile", [0.5e-6, 1e-6, 2e-6])
def test_the_best_number_of_splits_is_the_one_that_littles_law_asks_for(tile: float) -> None:
    alone, tile_bytes = Decoding(batch=1, context=32_768), 2 * 64 * 128 * 2
    least = CHIP.bandwidth * tile / (alone.num_programs(1) * tile_bytes)
    best = best_splits(alone, CHIP, 5, Assumed(tile=tile))
    assert best / 2 < least <= best
