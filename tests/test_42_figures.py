"""The figures of chapter 42 show what the timelines and costs say."""

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.ch41_tensor_parallel.lesson import LINKS
from minigen_course.ch42_pipeline import figures, lesson
from minigen_course.ch42_pipeline.reference import deal_layers, zig_zag
from minigen_course.figures.explore import png
from minigen_course.lab.cost_model import MACHINES, SHAPES


def titles(made: Figure) -> list[str]:
    return [each.get_title(loc="left") for each in made.axes]


def texts(made: Figure) -> list[str]:
    return [each.get_text() for axes in made.axes for each in axes.texts]


def test_a_timeline_has_a_box_per_span_and_says_the_idle_time() -> None:
    run = lesson.pass_once([0.01] * 4, 4)
    made = figures.timelines({"four": run})
    boxes = [each for each in made.axes[0].collections if isinstance(each, PolyCollection)]
    assert [len(each.get_paths()) for each in boxes] == [4, 16, 0]
    assert titles(made) == ["four: 70 ms, idle for 43% of the time"]
    png(made)


def test_timelines_share_their_scale_and_stop_at_a_moment() -> None:
    runs = {
        name: lesson.decode_tokens([1.0] * 2, 2, 4, barrier=name == "barrier")
        for name in ("rolling", "barrier")
    }
    made = figures.timelines(runs, unit="turns", numbers="step")
    assert {axes.get_xlim() for axes in made.axes} == {(0.0, 12.0)}
    made = figures.timelines(runs, unit="turns", upto=5.0)
    assert made.axes[0].get_xlim() == (0.0, 5.0)
    png(made)


def test_messages_are_drawn_below_what_they_are_hidden_by() -> None:
    run = lesson.ring_turns([[1, 1]] * 2, 1.0, 0.5)
    made = figures.timelines({"ring": run}, row="rank", unit="turns")
    boxes = [each for each in made.axes[0].collections if isinstance(each, PolyCollection)]
    assert [len(each.get_paths()) for each in boxes] == [2, 4, 2]
    assert [each.get_text() for each in made.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_the_bubble_curve_has_a_line_per_number_of_stages() -> None:
    made = figures.bubble_curves([2, 4], measured={1: 0.5, 2: 0.4})
    labels = [str(each.get_label()) for each in made.axes[0].lines]
    named = [each for each in labels if not each.startswith("_")]
    assert named == ["2 stages", "4 stages", "measured here"]
    png(made)


def test_groups_and_stage_work_are_drawn() -> None:
    made = figures.groups_and_messages(4, 4, 0.1)
    assert len(made.axes[0].patches) == 12
    png(made)
    work = lesson.layer_work(SHAPES["SmolLM2-135M"])
    made = figures.stage_work(
        work, {"halves": [range(15), range(15, 31)], "dealt": deal_layers(work, 2)}
    )
    assert texts(made).count("15 layers") == 2
    assert "19 layers" in texts(made)
    png(made)


def test_shares_of_a_prompt_are_drawn_with_the_pairs_of_each_rank() -> None:
    ways = {
        "plain": [lesson.plain_part(16, rank, 2) for rank in range(2)],
        "zig-zag": [zig_zag(16, rank, 2) for rank in range(2)],
    }
    made = figures.causal_shares(ways)
    assert [each.strip() for each in texts(made)] == ["36", "100", "68", "68"]
    png(made)


@pytest.mark.parametrize("upto", [None, 1, 9])
def test_a_ring_is_drawn_up_to_a_turn(upto: int | None) -> None:
    positions = [zig_zag(12, rank, 3) for rank in range(3)]
    made = figures.ring_table(positions, upto)
    cells = [each for each in made.axes[0].patches if isinstance(each, Rectangle)]
    assert len(cells) == 3 * 3 * (3 if upto is None else min(upto, 3))
    png(made)


def test_hidden_messages_have_a_line_per_link() -> None:
    made = figures.hidden_messages([1024, 4096], {"a link": [(1e-3, 2e-3), (4e-3, 3e-3)]})
    assert len(made.axes[0].lines) == 2
    assert [each.get_label() for each in made.axes[0].lines] == ["computing", "a link"]


def test_costs_are_drawn_fastest_first_and_say_what_does_not_fit() -> None:
    cluster = lesson.Cluster(MACHINES["H100 SXM"], 2, 2, LINKS["NVLink 4"], LINKS["NVLink 4"])
    shape, load = SHAPES["Llama-3-70B"], lesson.Load(2, 1024)
    costs = {each: lesson.decode_cost(shape, cluster, each, load) for each in lesson.layouts(2)}
    made = figures.layout_costs(costs, cluster, "a decode step")
    assert made.axes[0].get_yticklabels()[0].get_text() == "tensor 2"
    assert sum("does not fit" in each for each in texts(made)) == 2
    png(made)


def test_the_table_names_the_best_layout_of_each_cell() -> None:
    best: list[list[lesson.Layout | None]] = [
        [lesson.Layout(tensor=4), None],
        [lesson.Layout(2, 1, 2), lesson.Layout(data=4)],
    ]
    made = figures.which_cut(best, ["a", "b"], ["x", "y"], ("load", "network"))
    assert texts(made) == ["tensor 4", "nothing fits", "tensor 2\n× pipeline 2", "data 4"]
    kinds = [figures.kind_of(each) for row in best for each in row]
    assert kinds == ["tensor", "nothing fits", "combined", "data"]
    assert figures.kind_of(lesson.Layout()) == "one device"
    png(made)


def test_published_times_stand_beside_the_models() -> None:
    made = figures.against_published({"a": (2.0, 3.0), "b": (4.0, 4.0)})
    assert texts(made) == ["1.50×", "1.00×"]
    png(made)
