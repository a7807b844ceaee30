"""The cost model follows from its arithmetic; figures show each rank's share, and each message."""

from dataclasses import replace

import pytest

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.ch41_tensor_parallel.figures import (
    allowed,
    message_times,
    speed_ups,
    who_holds_what,
)
from minigen_course.ch41_tensor_parallel.lesson import (
    LINKS,
    Link,
    fit_link,
    split_step_seconds,
)
from minigen_course.lab.cost_model import MACHINES, SHAPES, Machine

H100, LLAMA_70B = MACHINES["H100 SXM"], SHAPES["Llama-3-70B"]
CONFIG = ModelConfig(
    "llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, 1e-5, 1e5, 1.0, None,
    True, False, False, False, False, (None,) * 30, 1, (2,),
)  # fmt: skip


def test_a_small_message_costs_turns_and_a_large_one_its_bytes() -> None:
    link = Link("some", latency=1.0, bandwidth=10.0)
    assert link.all_reduce_seconds(100, 1) == 0
    assert link.all_reduce_seconds(0, 8) == 6  # a tree of three levels, up and down
    assert link.all_reduce_seconds(8000, 8) == 14 * (1 + 100)  # a ring, an eighth at each turn
    for num_bytes in (0, 500, 8000):
        ring, tree = 14 * (1 + num_bytes / 8 / 10), 6 * (1 + num_bytes / 10)
        assert link.ring_seconds(num_bytes, 8) == pytest.approx(ring)
        assert link.tree_seconds(num_bytes, 8) == pytest.approx(tree)
        assert link.all_reduce_seconds(num_bytes, 8) == pytest.approx(min(ring, tree))


def test_a_ring_alone_would_reverse_the_gain_over_ethernet() -> None:
    link, messages = LINKS["Ethernet 25 Gbit/s"], 2 * LLAMA_70B.layers + 1
    work, _ = split_step_seconds(LLAMA_70B, H100, link, 8, 1, 1024)
    alone, _ = split_step_seconds(LLAMA_70B, H100, link, 1, 1, 1024)
    ring = alone / (work + messages * link.ring_seconds(2 * LLAMA_70B.hidden, 8))
    assert ring < 1 < allowed(LLAMA_70B, H100, link, (8,), 1, 1024)[8]


def test_a_link_is_found_again_from_its_times() -> None:
    link = Link("here", latency=20e-6, bandwidth=2e9)
    turns = {size: 4 * (20e-6 + size / 3 / 2e9) for size in (256, 4096, 2**20, 2**24)}
    found = fit_link("here", turns, 3)
    assert found.latency == pytest.approx(link.latency)
    assert found.bandwidth == pytest.approx(link.bandwidth)


def test_work_is_divided_between_ranks_and_messages_are_not() -> None:
    work, messages = split_step_seconds(LLAMA_70B, H100, LINKS["NVLink 4"], 8, 1, 1024)
    whole, none = split_step_seconds(LLAMA_70B, H100, LINKS["NVLink 4"], 1, 1, 1024)
    assert work == pytest.approx(whole / 8)
    assert none == 0
    one = LINKS["NVLink 4"].all_reduce_seconds(LLAMA_70B.hidden * 2, 8)
    assert messages == pytest.approx((2 * LLAMA_70B.layers + 1) * one)


def test_a_slow_network_makes_ranks_slower_than_one() -> None:
    fast = allowed(SHAPES["SmolLM2-1.7B"], H100, LINKS["NVLink 4"], (1, 8), 1, 1024)
    slow = allowed(SHAPES["SmolLM2-1.7B"], H100, LINKS["Ethernet 25 Gbit/s"], (1, 8), 1, 1024)
    assert fast[1] == slow[1] == 1
    assert slow[8] < 1
    assert slow[8] < fast[8] < 8
    large = allowed(LLAMA_70B, H100, LINKS["NVLink 4"], (8,), 1, 1024)
    assert large[8] > 5


def words(drawn) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in drawn.axes[0].texts]


@pytest.mark.parametrize(("kv_heads", "expected"), [(3, "head 2"), (1, "head 0")])
def test_the_drawing_names_heads_tokens_and_units_of_every_rank(
    kv_heads: int, expected: str
) -> None:
    drawn = words(who_holds_what(replace(CONFIG, kv_heads=kv_heads), 3))
    assert drawn.count("tokens 32,768-49,151") == 2  # of the embedding and of the head
    assert drawn.count("units 1,024-1,535") == 2
    assert "heads 6-8" in drawn
    assert expected in drawn
    assert sum(each.startswith("all-reduce") for each in drawn) == 3
    assert sum(each.startswith("all-gather") for each in drawn) == 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_words_fit_into_their_boxes_and_the_drawing_into_a_notebook(num_ranks: int) -> None:
    config = replace(CONFIG, vocab_size=128_256, q_heads=32, kv_heads=8, ffn=14_336)
    drawn = who_holds_what(config, num_ranks)
    assert drawn.get_figwidth() < 10.5
    drawn.canvas.draw()
    boxes = [patch.get_window_extent() for patch in drawn.axes[0].patches]
    inside = 0
    for text in drawn.axes[0].texts:
        own = text.get_window_extent()
        for box in (each for each in boxes if each.contains(*own.get_points().mean(axis=0))):
            inside += 1
            assert box.x0 < own.x0 < own.x1 < box.x1, text.get_text()
            assert box.y0 < own.y0 < own.y1 < box.y1, text.get_text()
    assert inside == len(boxes)


def test_curves_are_the_numbers_that_they_are_given() -> None:
    made = speed_ups(LLAMA_70B, H100, list(LINKS.values()))
    curves = made.axes[0].get_lines()
    ranks = (1, 2, 4, 8)
    for link, curve in zip(LINKS.values(), curves[1:], strict=False):
        expected = allowed(LLAMA_70B, H100, link, ranks, 1, 1024)
        assert list(curve.get_ydata()) == list(expected.values())
    times = {256: 50e-6, 2**20: 2e-3}
    points = message_times({2: times}, {2: Link("here", 20e-6, 1e9)}).axes[0].get_lines()[0]
    assert list(points.get_ydata()) == pytest.approx([50, 2000])


def test_equal_times_of_two_numbers_of_ranks_are_both_seen() -> None:
    link = Link("here", 20e-6, 1e9)
    lines = message_times({2: {256: 1e-3}, 3: {256: 1e-3}}, {2: link, 3: link}).axes[0].get_lines()
    filled, _, hollow, _ = lines
    assert (filled.get_fillstyle(), hollow.get_fillstyle()) == ("full", "none")
    assert hollow.get_markersize() > filled.get_markersize()


def test_a_machine_of_no_speed_gains_the_full_factor() -> None:
    slow = Machine("slow", bandwidth=1.0, flops=1.0)
    found = allowed(LLAMA_70B, slow, LINKS["Ethernet 25 Gbit/s"], (4,), 1, 1)
    assert found[4] == pytest.approx(4, rel=1e-3)
