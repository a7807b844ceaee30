"""The cost of every cut: bytes, messages and times equal the formulas that the chapter states."""

import math
from dataclasses import replace

import pytest

from minigen_course.ch41_tensor_parallel.lesson import LINKS, split_step_seconds
from minigen_course.ch42_pipeline.lesson import (
    LLAMA_405B,
    Cluster,
    Layout,
    Load,
    decode_cost,
    layouts,
    least_bubble,
    obstacle,
    prefill_cost,
    rank_bytes,
)
from minigen_course.ch42_pipeline.reference import Devices, Model, choose_cut
from minigen_course.lab.cost_model import MACHINES, SHAPES, decode_step, prefill_step

BIG, H100 = SHAPES["Llama-3-70B"], MACHINES["H100 SXM"]
NVLINK, ETHERNET = LINKS["NVLink 4"], LINKS["Ethernet 25 Gbit/s"]
NODES = Cluster(H100, 16, 8, NVLINK, ETHERNET)
ONE = Layout()


def test_one_device_costs_what_the_step_time_model_says() -> None:
    found = decode_cost(BIG, NODES, ONE, Load(8, 2048))
    step = decode_step(BIG, 8, 2048, weight_bits=16)
    assert found.seconds == pytest.approx(step.seconds(H100))
    assert (found.num_messages, found.sent_bytes, found.message_seconds) == (0, 0, 0)
    assert found.idle == pytest.approx(0.0)
    prompt = prefill_cost(BIG, NODES, ONE, 4096)
    whole = prefill_step(BIG, 4096, weight_bits=16)
    head = 2 * BIG.vocab * BIG.hidden
    assert prompt.seconds == pytest.approx((whole.flops - head) / H100.flops, rel=1e-6)


def test_a_tensor_split_costs_what_chapter_41_says() -> None:
    for ranks in (2, 4, 8):
        work, messages = split_step_seconds(BIG, H100, NVLINK, ranks, 4, 1024)
        found = decode_cost(BIG, NODES, Layout(tensor=ranks), Load(4, 1024))
        one_more = messages / (2 * BIG.layers + 1)  # the embedding's, which is left out here
        assert found.seconds == pytest.approx(work + messages - one_more)
        assert found.num_messages == 2 * BIG.layers
        assert found.sent_bytes == 2 * BIG.layers * 4 * BIG.hidden * 2


def test_a_pipeline_sends_one_vector_per_token_and_stage() -> None:
    found = decode_cost(BIG, NODES, Layout(pipeline=4), Load(8, 1024))
    assert found.num_messages == 4  # micro-batches, each passed on once
    assert found.sent_bytes == 8 * BIG.hidden * 2
    alone = decode_cost(BIG, NODES, ONE, Load(2, 1024)).seconds
    transfer = NVLINK.latency + 2 * BIG.hidden * 2 / NVLINK.bandwidth
    assert found.seconds == pytest.approx(alone + 4 * transfer)
    assert found.timeline.num_ranks == 4


def test_one_sequence_gains_nothing_from_stages() -> None:
    alone = decode_cost(BIG, NODES, ONE, Load(1, 1024)).seconds
    cut = decode_cost(BIG, NODES, Layout(pipeline=8), Load(1, 1024))
    assert alone < cut.seconds < 1.01 * alone
    assert cut.idle == pytest.approx(7 / 8, abs=0.01)


def test_a_prompt_in_chunks_has_the_bubble_of_the_formula_if_chunks_are_equal() -> None:
    free = replace(NODES, inside=replace(NVLINK, latency=0.0, bandwidth=math.inf))
    short = replace(BIG, q_heads=BIG.q_heads)
    for chunks in (4, 16):
        found = prefill_cost(short, free, Layout(pipeline=4), 256 * chunks, chunks)
        assert found.idle == pytest.approx(least_bubble(4, chunks), abs=0.02)


def test_a_ring_sends_keys_and_values_and_hides_them_where_it_can() -> None:
    found = prefill_cost(BIG, NODES, Layout(context=4), 131_072)
    block = 131_072 // 4 * 2 * BIG.kv_heads * BIG.head_dim * 2
    assert found.num_messages == 3 * BIG.layers
    assert found.sent_bytes == pytest.approx(3 * BIG.layers * block)
    alone = prefill_cost(BIG, NODES, ONE, 131_072).seconds
    assert found.seconds == pytest.approx(alone / 4, rel=0.01)
    assert found.message_seconds == 0  # all of them are hidden
    fast = prefill_cost(BIG, NODES, Layout(context=4), 4096)
    slow = prefill_cost(BIG, replace(NODES, inside=ETHERNET), Layout(context=4), 4096)
    waits = slow.message_seconds - fast.message_seconds
    assert 0 < slow.seconds - fast.seconds == pytest.approx(waits)
    sent = slow.sent_bytes / ETHERNET.bandwidth + slow.num_messages * ETHERNET.latency
    assert slow.message_seconds < sent  # computing hides a part of each


def test_a_split_cache_divides_the_cache_and_not_the_weights() -> None:
    load = Load(8, 131_072)
    whole, split = rank_bytes(BIG, ONE, load), rank_bytes(BIG, Layout(context=4), load)
    weights = 2 * BIG.multiplied + 2 * BIG.vocab * BIG.hidden
    cache = 2 * 8 * BIG.kv_numbers(131_072)
    assert whole == pytest.approx(weights + cache)
    assert split == pytest.approx(weights + cache / 4)


def test_memory_is_divided_by_stages_and_tensor_ranks() -> None:
    load = Load(4, 1024)
    weights = 2 * BIG.multiplied + 2 * BIG.vocab * BIG.hidden
    cut = rank_bytes(BIG, Layout(tensor=2), load)
    assert cut == pytest.approx((weights + 2 * 4 * BIG.kv_numbers(1024)) / 2)
    layers = 2 * (BIG.multiplied - BIG.vocab * BIG.hidden + 4 * BIG.kv_numbers(1024))
    table = 2 * BIG.vocab * BIG.hidden
    assert rank_bytes(BIG, Layout(pipeline=4), load) == pytest.approx(layers / 4 + table)
    assert rank_bytes(BIG, Layout(data=4), load) < rank_bytes(BIG, ONE, load)


def test_more_ranks_than_kv_heads_keep_copies() -> None:
    load = Load(1, 100_000)
    few = rank_bytes(BIG, Layout(tensor=8), load)
    many = rank_bytes(BIG, Layout(tensor=16), load)
    assert many > few / 2
    assert obstacle(BIG, Layout(tensor=16), 1) is None
    assert "cannot be divided by 3" in str(obstacle(BIG, Layout(tensor=3), 1))
    assert "81 stages" in str(obstacle(BIG, Layout(pipeline=81), 1))
    assert "2 replicas" in str(obstacle(BIG, Layout(data=2), 1))


def test_an_all_reduce_over_nodes_has_a_part_inside_and_one_between() -> None:
    inside = NVLINK.all_reduce_seconds(1e6, 8)
    assert NODES.all_reduce_seconds(1e6, 8) == inside
    between = ETHERNET.all_reduce_seconds(1e6 / 8, 2)
    assert NODES.all_reduce_seconds(1e6, 16) == pytest.approx(inside + between)


def test_layouts_use_all_devices_once_each() -> None:
    for number in (1, 2, 6, 16):
        every = list(layouts(number))
        assert all(each.num_ranks == number for each in every)
        assert len(set(every)) == len(every)
    assert {str(each) for each in layouts(2)} == {"tensor 2", "context 2", "pipeline 2", "data 2"}
    assert str(ONE) == "one device"
    assert str(Layout(8, 1, 2)) == "tensor 8 × pipeline 2"


@pytest.mark.parametrize("count", [1, 4, 32, 200])
def test_the_exercise_and_the_cost_model_choose_alike(count: int) -> None:
    """In decode steps that wait for memory, the two have the same terms."""
    model = Model(BIG.layers, BIG.kv_heads, 2 * BIG.multiplied, 2 * BIG.kv_numbers(1024))
    message = {t: NVLINK.all_reduce_seconds(2 * BIG.hidden, t) for t in (1, 2, 4, 8)}
    devices = Devices(8, math.inf, H100.bandwidth, message, NVLINK.latency)
    costs = {
        (each.tensor, each.pipeline, each.data): decode_cost(BIG, NODES, each, Load(count, 1024))
        for each in layouts(8)
        if each.context == 1 and not obstacle(BIG, each, count)
    }
    best = min(costs, key=lambda cut: costs[cut].seconds)
    found = choose_cut(model, devices, count)
    assert found is not None
    assert costs[found].seconds == pytest.approx(costs[best].seconds, rel=0.05)


def test_the_model_is_a_lower_bound_of_published_prefills_of_405b() -> None:
    """Yang et al. 2024: 77 s for 1M tokens and 3.8 s for 128K on 16 nodes of 8 H100."""
    cluster = Cluster(H100, 128, 8, NVLINK, LINKS["InfiniBand 400 Gbit/s"])
    for tokens, published in ((1_000_000, 77.0), (131_072, 3.8)):
        found = prefill_cost(LLAMA_405B, cluster, Layout(8, 16), tokens)
        assert found.seconds < published < 2.5 * found.seconds
    assert pytest.approx(405e9, rel=0.01) == LLAMA_405B.parameters
