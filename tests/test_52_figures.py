"""Chapter 52's figures show their data; the dashboard reads a running server."""

from pathlib import Path

import numpy as np
import pytest

from minigen import LLM
from minigen.bench.report import Slo, report
from minigen.bench.workload import Planned, burst, constant
from minigen.server.local import serving
from minigen.server.metrics import Histogram
from minigen.trace.events import EventKind
from minigen_course.ch52_slo import figures as of_dashboard
from minigen_course.ch52_slo.figures import (
    History,
    Scrape,
    by_rate,
    cost,
    estimate_percentile,
    mystery_gauges,
    panels,
    run_in_time,
    scrape,
    shapes,
    spreads,
    storms,
    waits,
    watch,
)
from minigen_course.ch52_slo.lesson import traffic_shapes
from minigen_course.lab.retries import Clients, storm
from minigen_course.lab.simulator import Knobs, asks, simulate
from tests.serving import load_tiny, save_tiny

LOAD = [Planned(number / 40, f"request {number}", 6) for number in range(8)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tmp_path_factory.mktemp("tiny")
    return load_tiny(save_tiny(directory))


def test_goodput_and_throughput_are_drawn_over_the_offered_rate() -> None:
    slow = Knobs(max_num_seqs=1)
    runs = {
        rate: simulate(asks(constant(rate, 40), (20, 20), (10, 10)), slow).outcomes
        for rate in (1, 4)
    }
    left, right = by_rate(runs, [Slo("ttft", 0.5)], (2.0, 12.0)).axes
    answered, good = (list(line.get_ydata()) for line in left.lines[:2])
    assert good[0] == answered[0] == pytest.approx(1.0)
    assert good[1] == 0 < answered[0] < answered[1]
    assert left.get_title(loc="left").endswith("at 1 offered per second")
    found = report(runs[4], [Slo("ttft", 0.5)])
    assert [line.get_xdata()[-1] for line in right.lines] == [40, 40]
    ends = [line.get_ydata()[-1] for line in right.lines]
    assert ends == pytest.approx([found.request_rate, found.goodput])


def test_a_visit_is_as_bad_as_its_worst_request() -> None:
    values = {"A": [0.1] * 9 + [3.0], "B": [0.5] * 10}
    _, bars = spreads(values, wait=1.0, requests=2).axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([1 - 0.9**2, 0.0])


def test_the_cost_of_a_million_tokens_is_the_hourly_price_over_the_hourly_tokens() -> None:
    (axes,) = cost(8.42, {"few": 300.0, "many": 1000.0}).axes
    points = [float(line.get_ydata()[0]) for line in axes.lines[1:]]
    assert points == pytest.approx([7.80, 2.34], abs=0.005)
    assert axes.get_xlabel() == "good tokens per second"
    with pytest.raises(ValueError, match="must be above 0"):
        cost(0, {"few": 300.0})
    with pytest.raises(ValueError, match="of each load must be above 0"):
        cost(8.42, {"few": 300.0, "none": 0.0})


def test_a_run_is_drawn_with_its_refusals() -> None:
    run = simulate(asks(burst(9), (20, 20), (9, 9)), Knobs(max_num_seqs=1, max_queue=4))
    requests, cache, first = run_in_time(run).axes
    assert list(requests.lines[1].get_ydata()) == [each.waiting for each in run.moments]
    assert max(each.waiting for each in run.moments) < requests.get_ylim()[1], "nothing is cut off"
    assert list(cache.lines[0].get_ydata()) == [each.kv_used for each in run.moments]
    assert [len(line.get_xdata()) for line in first.lines] == [4, 5]


def test_a_requests_time_is_divided_into_parts() -> None:
    run = simulate(asks(burst(3), (2000, 2000), (9, 9)), Knobs(max_num_seqs=1))
    (axes,) = waits(run.events).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2,000 tokens"] * 3
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert len(bars) == 4 * 3
    for row in range(0, 12, 4):
        begins, ends = zip(*bars[row : row + 4], strict=True)
        assert begins == pytest.approx([0.0, *ends[:-1]])
    in_queue = [bars[row + 1][1] - bars[row + 1][0] for row in range(0, 12, 4)]
    assert 0 <= in_queue[0] < in_queue[1] < in_queue[2]
    with pytest.raises(ValueError, match="lacks a time"):
        waits([event for event in run.events if event.kind != EventKind.NEW_TOKEN])


def test_a_percentile_of_a_histogram_is_within_its_bucket() -> None:
    histogram = Histogram((0.1, 0.2, 0.5, 1.0))
    values = np.random.default_rng(5).uniform(0, 1.2, 500)
    for value in values:
        histogram.observe(float(value))
    bounds = (*histogram.bounds, float("inf"))
    after = tuple(zip(bounds, np.cumsum(histogram.counts).tolist(), strict=True))
    before = tuple((bound, 0.0) for bound in bounds)
    for percent in (1, 10, 30, 50, 80):
        found, right = estimate_percentile(before, after, percent), np.percentile(values, percent)
        low, high = max((0, *(b for b in bounds if b < right))), min(b for b in bounds if b > right)
        assert found is not None
        assert low <= found <= high
        assert found == pytest.approx(right, abs=0.05)
    assert estimate_percentile(before, after, 99.9) == 1.0, "above all bounds, the last of them"
    assert estimate_percentile(after, after, 50) is None, "nothing came"
    assert estimate_percentile((), (), 50) is None


def test_a_sample_of_a_server_equals_its_metrics_page(llm: LLM) -> None:
    with serving(llm) as server:
        before = scrape(server.url, 0.0).values["generation_tokens_total"]  # from warming up
        for _ in watch(server.url, history := History(), LOAD):
            pass
        last = scrape(server.url, 0.0)
    assert last.values["generation_tokens_total"] - before == 6 * len(LOAD)
    assert last.values["num_requests_waiting"] == 0
    assert dict(last.buckets["inter_token_latency_seconds"])[float("inf")] >= 5 * len(LOAD)
    assert len(history.scrapes) >= 2
    assert history.scrapes[-1].values["generation_tokens_total"] - before == 6 * len(LOAD)


def test_rates_and_shares_are_of_the_latest_interval() -> None:
    scrapes = [
        Scrape(0.0, {"tokens": 100.0, "hits": 0.0}),
        Scrape(1.0, {"tokens": 150.0, "hits": 25.0}),
        Scrape(2.0, {"tokens": 250.0, "hits": 25.0}),
        Scrape(9.0, {"tokens": 250.0, "hits": 25.0}),
    ]
    history = History(scrapes)
    assert history.times() == [-9.0, -8.0, -7.0, 0.0]
    assert history.rate("tokens") == [0.0, 50.0, 75.0, 0.0]
    assert history.share("hits", "tokens") == [0.0, 0.5, 25 / 150, 0.0]
    drawn = panels(history)
    assert len(drawn.axes) == 6


def test_the_dashboard_sends_the_load_of_the_button_that_was_pressed(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    drawers, sent = [], []
    monkeypatch.setattr(of_dashboard, "explore", lambda draw, *_, **__: drawers.append(draw))
    monkeypatch.setattr(of_dashboard, "put_load", lambda url, load: sent.append(load))
    monkeypatch.setattr(of_dashboard, "scrape", lambda url, now: Scrape(now))
    of_dashboard.dashboard("nowhere", {"few": LOAD[:1], "many": LOAD}, "caption")
    (draw,) = drawers
    for presses in ({"few": 0, "many": 0}, {"few": 0, "many": 1}, {"few": 1, "many": 1}):
        assert len(list(draw(**presses))) >= 1
    assert sent == [LOAD[:1], LOAD, LOAD[:1]]


def test_storms_are_drawn_as_tries_and_as_answers_in_time() -> None:
    sent, good = storms({"none": storm(Clients()), "retries": storm(Clients(4))}).axes
    assert max(sent.lines[1].get_ydata()) > 2 * max(sent.lines[0].get_ydata())
    assert max(good.lines[1].get_ydata()[-5:]) == 0


def test_shapes_are_drawn_with_their_equal_beginnings() -> None:
    loads = traffic_shapes()
    axes = shapes(loads).axes
    assert [each.get_title(loc="left") for each in axes] == list(loads)
    heights = [bar.get_height() for bar in axes[3].patches]
    assert heights.count(1500) == len(loads["one system prompt"])


def test_a_mystery_servers_gauges_name_the_knob_and_the_goal() -> None:
    made = mystery_gauges(1, " --max-queue 4 ")
    assert "Seed 1, --max-queue 4: goodput" in made.get_suptitle()
    assert "as it is" in mystery_gauges(1).get_suptitle()
    with pytest.raises(ValueError, match="should be one of"):
        mystery_gauges(1, "--faster")
