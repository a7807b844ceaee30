"""Diagrams show what their names say: shapes add up, a ring ends with sums, bubbles are counted."""

from queue import SimpleQueue

import pytest
import torch
from matplotlib.patches import Rectangle

from minigen.errors import WorkerError
from minigen.parallel.comm import Comm, run_ranks
from minigen_course.ch41_tensor_parallel import lesson
from minigen_course.ch41_tensor_parallel.lesson import (
    LINKS,
    RingComm,
    choose_all_reduce,
    ring_all_reduce,
)
from minigen_course.figures.parallel_ways import (
    pipeline_chart,
    ring_states,
    ring_turns,
    step_parts,
    topology,
    two_splits,
    ways_to_cut,
)

NUMBERS = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]


def test_a_column_split_ends_with_one_result_and_a_row_split_with_two() -> None:
    by_columns, by_rows = two_splits().axes
    cells = [len(axes.patches) for axes in (by_columns, by_rows)]
    assert cells == [3 * 8 + 8 * 6 + 3 * 6, 3 * 8 + 8 * 6 + 2 * 3 * 6]
    texts = " ".join(text.get_text() for text in by_rows.texts)
    assert "[4, 6] each" in texts
    assert "all-reduce" in texts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_drawn_ring_ends_with_the_sums_after_2_n_minus_2_turns(num_ranks: int) -> None:
    numbers = [
        [10.0**rank * (piece + 1) for piece in range(num_ranks)] for rank in range(num_ranks)
    ]
    states = ring_states(numbers)
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    assert len(states) == 2 * (num_ranks - 1) + 1
    assert states[0][0] == numbers
    assert states[-1] == ([sums] * num_ranks, [])


def test_the_drawn_ring_passes_on_what_the_package_passes_on() -> None:
    sent: dict[int, list[float]] = {rank: [] for rank in range(3)}

    def work(comm: Comm) -> None:
        def pass_on(piece: torch.Tensor) -> torch.Tensor:
            sent[comm.rank].append(float(piece))
            return comm.all_gather(piece).chunk(3)[comm.rank - 1]

        ring_all_reduce(torch.tensor(NUMBERS[comm.rank]).float(), comm.rank, 3, pass_on)

    run_ranks(3, work)
    drawn = {
        rank: [table[rank][pieces[rank]] for table, pieces in ring_states(NUMBERS) if pieces]
        for rank in range(3)
    }
    assert drawn == sent


def test_a_ring_has_a_table_for_each_turn_and_one_for_the_end() -> None:
    made = ring_turns(NUMBERS)
    titles = [axes.get_title() for axes in made.axes]
    assert titles == ["turn 1: add", "turn 2: add", "turn 3: copy", "turn 4: copy", "the end"]
    framed = [
        sum(isinstance(patch, Rectangle) and not patch.get_fill() for patch in axes.patches)
        for axes in made.axes
    ]
    assert framed == [3, 3, 3, 3, 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_ring_comm_has_the_results_of_other_ranks_and_talks_to_neighbours_only(
    num_ranks: int,
) -> None:
    inboxes = [SimpleQueue[torch.Tensor]() for _ in range(num_ranks)]

    def work(comm: Comm) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ring = RingComm(comm.rank, num_ranks, ring_all_reduce, inboxes)
        x = torch.arange(10.0).view(2, 5) * (comm.rank + 1)
        ways = ("all_reduce", "all_gather", "broadcast")
        return [(getattr(ring, way)(x.clone()), getattr(comm, way)(x)) for way in ways]

    for of_rank in run_ranks(num_ranks, work):
        for in_ring, right in of_rank:
            assert torch.equal(in_ring, right)
    assert all(inbox.empty() for inbox in inboxes)


def test_a_rank_of_a_ring_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "PATIENCE", 0.01)
    inboxes = [SimpleQueue[torch.Tensor]() for _ in range(2)]
    with pytest.raises(WorkerError, match="Rank 1 waited"):
        RingComm(1, 2, ring_all_reduce, inboxes).pass_on(torch.ones(1))


def test_the_choice_is_that_of_a_link() -> None:
    for link in LINKS.values():
        for num_bytes, num_ranks in ((0, 8), (16_384, 8), (1e9, 3), (5, 1)):
            way, seconds = choose_all_reduce(num_bytes, num_ranks, link.latency, link.bandwidth)
            assert seconds == pytest.approx(link.all_reduce_seconds(num_bytes, num_ranks))
            assert way in ("ring", "tree")


def test_a_topology_has_two_nodes_of_eight_cards() -> None:
    texts = [text.get_text() for text in topology().axes[0].texts]
    assert sum(text.startswith("GPU") for text in texts) == 16
    assert sum(text.startswith("node") for text in texts) == 2


def test_ways_to_cut_are_five_with_the_same_tokens() -> None:
    made = ways_to_cut()
    assert [axes.get_title() for axes in made.axes] == [
        f"{way} parallel" for way in ("tensor", "pipeline", "data", "context", "expert")
    ]
    for axes in made.axes:
        boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sum(box.get_height() == 0.26 for box in boxes) == 32


def test_a_pipeline_chart_says_how_long_stages_are_idle() -> None:
    ends = [[stage + batch + 1.0 for batch in range(4)] for stage in range(4)]
    axes = pipeline_chart(ends, 1.0).axes[0]
    assert "idle for 43%" in axes.get_title(loc="left")
    assert len(axes.texts) == 16
    assert not pipeline_chart([[1.0 + batch for batch in range(30)]], 1.0).axes[0].texts


def test_parts_of_a_step_add_up_to_its_length() -> None:
    parts = {"computing": 0.02, "moving": 0.01, "waiting": -0.001, "other messages": 0.004}
    axes = step_parts({"one": {"computing": 0.05}, "three": parts}).axes[0]
    assert [text.get_text() for text in axes.texts] == [" 50 ms", " 34 ms"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(parts)
