"""The metrics page: every number agrees with the engine's events, counted in another way."""

import json
import re
import sys
import threading
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minigen import LLM, SamplingParams
from minigen.errors import OptionError
from minigen.server.metrics import (
    BUCKETS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    TTFT_SECONDS,
    Metrics,
    MetricsPage,
)
from minigen.trace.events import Event, EventKind, Trace
from minigen.trace.summary import summarize

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
SHARED = "the same beginning for all of them, "
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempted": {"num_blocks": 27, "block_size": 2, "max_num_seqs": 8},
    "one at a time, nothing shared": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "chunks of a few tokens": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
}


def samples(page: MetricsPage) -> Samples:
    """Parse the page with prometheus_client's own parser."""
    families = text_string_to_metric_families(page.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(page: MetricsPage, name: str, **labels: str) -> float:
    labels = {"model_name": "tiny", **labels}
    return samples(page)[(f"{page.prefix}{name}", tuple(sorted(labels.items())))]


def page_of(llm: LLM) -> MetricsPage:
    """Return a page with the metrics of one engine, subscribed from now on."""
    page = MetricsPage()
    page.follow("tiny", llm.trace, lambda: llm.kv_usage)
    return page


def page_after(*events: tuple[float, EventKind, int | None, dict[str, int]]) -> MetricsPage:
    """Return a page that received hand-written events, with times in milliseconds."""
    page, metrics = MetricsPage(), Metrics("tiny", lambda: 0.25)
    page.add(metrics)
    for milliseconds, kind, sequence_id, counts in events:
        metrics(Event(kind, 7_000_000_000 + round(milliseconds * 1e6), sequence_id, counts))
    return page


def assert_histogram(page: MetricsPage, name: str, seconds: Iterable[float]) -> None:
    """Check that the page's histogram equals prometheus_client's own for these values."""
    values = list(seconds)
    registry = prometheus_client.CollectorRegistry()
    peer = prometheus_client.Histogram(
        f"{page.prefix}{name}", "", ["model_name"], registry=registry, buckets=BUCKETS[name]
    ).labels("tiny")
    for each in values:
        peer.observe(each)
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    found = {key: value for key, value in samples(page).items() if f":{name}_" in key[0]}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=1e-9) for key in expected)
    assert value(page, f"{name}_count") == len(values)
    assert value(page, f"{name}_sum") == pytest.approx(np.sum(values), abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_number_agrees_with_a_recording(tiny_directory: Path, engine: str) -> None:
    llm = LLM.load(tiny_directory, weights="float32", **ENGINES[engine])
    page = page_of(llm)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with llm.record() as recorder:
        text = llm.generate(SHARED, greedy, progress=False).text
        llm.generate([SHARED + "first", "other", SHARED + "second"] * 2, greedy, progress=False)
        llm.generate(SHARED, SamplingParams(n=1, max_tokens=9, stop=text[2:4], temperature=0))
        if ENGINES[engine].get("max_num_seqs", 16) > 3:
            llm.generate("abc", SamplingParams(n=3, seed=1, max_tokens=7, ignore_eos=True))
        left = llm.stream_deltas([SHARED + str(each) for each in range(7)], greedy)
        for _, _ in zip(range(5), left, strict=False):
            pass
        left.close()
    events, lives = recorder.events, summarize(recorder.events)

    def num(kind: EventKind) -> int:
        return sum(event.kind is kind for event in events)

    assert value(page, "generation_tokens_total") == num(EventKind.NEW_TOKEN)
    assert value(page, "num_preemptions_total") == num(EventKind.PREEMPTED)
    assert (num(EventKind.PREEMPTED) > 0) == (engine == "preempted")
    prompts = [each.prompt_tokens or 0 for each in lives if each.parent is None and each.ttft_ms]
    assert value(page, "prompt_tokens_total") == sum(prompts)

    unforked = {each.sequence_id for each in lives if each.parent is None}
    first_runs: dict[int | None, Event] = {}
    for event in events:
        if event.kind is EventKind.SCHEDULED and event.sequence_id in unforked:
            first_runs.setdefault(event.sequence_id, event)
    hits = sum(event.counts["computed"] for event in first_runs.values())
    asked = sum(each.prompt_tokens or 0 for each in lives if each.sequence_id in first_runs)
    assert value(page, "prefix_cache_hits_total") == hits
    assert value(page, "prefix_cache_queries_total") == asked
    assert (hits > 0) == ("nothing shared" not in engine)

    finished = [each for each in lives if each.finish == "finished"]
    queued = {each.sequence_id: each for each in events if each.kind is EventKind.QUEUED}
    before = {number: each.counts["waited_ns"] / 1e9 for number, each in queued.items()}
    waits = [each.ttft_ms / 1e3 + before[each.sequence_id] for each in lives if each.ttft_ms]
    assert_histogram(page, "time_to_first_token_seconds", waits)
    gaps = [gap / 1e3 for each in lives for gap in each.inter_token_ms]
    assert_histogram(page, "inter_token_latency_seconds", gaps)
    for name, field in (("queue", "queued_ms"), ("prefill", "prefill_ms"), ("decode", "decode_ms")):
        early = before if name == "queue" else {}
        seconds = [getattr(each, field) / 1e3 + early.get(each.sequence_id, 0) for each in finished]
        assert_histogram(page, f"request_{name}_time_seconds", seconds)
    means = [np.mean(each.inter_token_ms) / 1e3 for each in finished if each.inter_token_ms]
    assert_histogram(page, "request_time_per_output_token_seconds", means)
    started = {number: each.time_ns - before[number] * 1e9 for number, each in queued.items()}
    ended = {e.sequence_id: e.time_ns for e in events if e.kind is EventKind.FINISHED}
    whole = [(ended[each] - started[each]) / 1e9 for each in ended]
    assert_histogram(page, "e2e_request_latency_seconds", whole)

    stopped = [each.counts["stopped"] for each in events if each.kind is EventKind.FINISHED]
    by_reason = {
        reason: value(page, "request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert by_reason["stop"] == sum(stopped) >= 1
    assert by_reason["length"] == len(stopped) - sum(stopped) >= 7
    assert by_reason["abort"] == num(EventKind.ABORTED) >= 6
    assert by_reason["error"] == 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(page, gauge) == 0


def test_hand_written_events_give_the_expected_times() -> None:
    page = page_after(
        (20, EventKind.QUEUED, 1, {"prompt_tokens": 6, "waited_ns": 20_000_000}),
        (40, EventKind.SCHEDULED, 1, {"tokens": 2, "computed": 4}),
        (100, EventKind.NEW_TOKEN, 1, {"token": 7}),
        (100, EventKind.STEP, None, {"sequences": 1, "tokens": 2, "duration_ns": 1}),
        (120, EventKind.SCHEDULED, 1, {"tokens": 1, "computed": 6}),
        (130, EventKind.NEW_TOKEN, 1, {"token": 7}),
        (150, EventKind.PREEMPTED, 1, {"computed": 7}),
        (600, EventKind.SCHEDULED, 1, {"tokens": 4, "computed": 4}),
        (700, EventKind.NEW_TOKEN, 1, {"token": 2}),
        (701, EventKind.FINISHED, 1, {"output_tokens": 3, "stopped": 1}),
    )
    assert_histogram(page, "request_queue_time_seconds", [0.04])
    assert_histogram(page, "request_prefill_time_seconds", [0.06])
    assert_histogram(page, "time_to_first_token_seconds", [0.1])
    assert_histogram(page, "inter_token_latency_seconds", [0.03, 0.57])
    assert_histogram(page, "request_time_per_output_token_seconds", [0.3])
    assert_histogram(page, "request_decode_time_seconds", [0.6])
    assert_histogram(page, "e2e_request_latency_seconds", [0.701])
    assert value(page, "prompt_tokens_total") == 6
    assert value(page, "prefix_cache_queries_total") == 6  # counted once despite preemption
    assert value(page, "prefix_cache_hits_total") == 4
    assert value(page, "num_preemptions_total") == 1
    assert value(page, "request_success_total", finished_reason="stop") == 1


def test_a_value_on_a_bound_is_at_or_below_it() -> None:
    for name, bounds in BUCKETS.items():
        if name != "inter_token_latency_seconds":
            continue
        times = [0.0, *np.cumsum([bound * 1e3 for bound in bounds])]
        queued = (0, EventKind.QUEUED, 1, {"prompt_tokens": 1, "waited_ns": 0})
        page = page_after(queued, *((at, EventKind.NEW_TOKEN, 1, {"token": 5}) for at in times))
        assert_histogram(page, name, [(b - a) / 1e3 for a, b in pairwise(times)])


def test_the_gauges_follow_the_engine_step_by_step(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=2, num_blocks=40)
    page = page_of(llm)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    deltas = llm.stream_deltas(["one", "two", "three"], params)
    next(deltas)
    assert value(page, "num_requests_running") == 2
    assert value(page, "num_requests_waiting") == 1
    assert value(page, "kv_cache_usage_perc") == llm.kv_usage == pytest.approx(2 / 40)
    deltas.close()
    assert value(page, "num_requests_running") == value(page, "num_requests_waiting") == 0
    assert value(page, "kv_cache_usage_perc") == llm.kv_usage == 0
    assert value(page, "request_success_total", finished_reason="abort") == 3


def test_requests_of_a_failed_step_are_errors_and_no_longer_run(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_of(tiny_llm)

    def broken(chunks: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(tiny_llm.engine.runner, "logits", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        tiny_llm.generate(["one", "two"], SamplingParams(max_tokens=3), progress=False)
    assert value(page, "request_success_total", finished_reason="error") == 2
    assert value(page, "num_requests_running") == value(page, "num_requests_waiting") == 0
    assert value(page, "kv_cache_usage_perc") == 0
    assert value(page, "e2e_request_latency_seconds_count") == 0


def test_a_request_queued_before_the_subscription_does_no_harm() -> None:
    page = page_after(
        (0, EventKind.SCHEDULED, 9, {"tokens": 1, "computed": 4}),
        (0, EventKind.FORKED, 8, {"parent": 9, "blocks": 1}),
        (1, EventKind.NEW_TOKEN, 9, {"token": 1}),
        (2, EventKind.PREEMPTED, 9, {"computed": 4}),
        (3, EventKind.FINISHED, 9, {"output_tokens": 9, "stopped": 0}),
    )
    assert value(page, "generation_tokens_total") == 1
    assert value(page, "request_success_total", finished_reason="length") == 1
    assert value(page, "num_requests_running") == value(page, "num_requests_waiting") == 0
    assert value(page, "time_to_first_token_seconds_count") == 0


def test_names_types_and_buckets_are_vllms() -> None:
    page = MetricsPage("vllm:")
    page.add(Metrics("tiny", lambda: 0.0))
    families = {
        each.name: each.type for each in text_string_to_metric_families(page.render().decode())
    }
    own = {name: kind for name, kind in families.items() if name.startswith("vllm:")}
    assert own == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:requests_refused": "counter",  # minigen's own
        "vllm:num_preemptions": "counter",
        "vllm:spec_decode_num_drafts": "counter",
        "vllm:spec_decode_num_draft_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
    }
    assert "vllm:prompt_tokens_total{" in page.render().decode()
    assert page.content_type.startswith("text/plain; version=0.0.4")
    for bounds, ends in (
        (TTFT_SECONDS, (22, 0.001, 2560)),
        (TOKEN_SECONDS, (19, 0.01, 80)),
        (REQUEST_SECONDS, (21, 0.3, 7680)),
    ):
        assert (len(bounds), bounds[0], bounds[-1]) == ends
        assert list(bounds) == sorted(bounds)
    with pytest.raises(OptionError, match="prefix"):
        MetricsPage("other_")


def test_each_model_has_its_numbers_until_it_is_unloaded() -> None:
    page, first, second = MetricsPage(), Metrics("a", lambda: 0.0), Metrics('b "quoted"', lambda: 0)
    page.add(first)
    page.add(second)
    second(Event(EventKind.NEW_TOKEN, 1, 1, {"token": 3}))
    found = samples(page)
    assert found[("minigen:generation_tokens_total", (("model_name", "a"),))] == 0
    assert found[("minigen:generation_tokens_total", (("model_name", 'b "quoted"'),))] == 1
    text = page.render().decode()
    assert text.count("# TYPE minigen:generation_tokens_total counter") == 1
    with pytest.raises(OptionError, match="'a' already"):
        page.add(Metrics("a", lambda: 0.0))
    page.remove(first)
    assert 'model_name="a"' not in page.render().decode()
    assert "quoted" in page.render().decode()
    page.add(Metrics("a", lambda: 0.0))
    end = page.follow("c", Trace(), lambda: 0.0)
    assert 'model_name="c"' in page.render().decode()
    end()
    assert 'model_name="c"' not in page.render().decode()
    page.remove(second)
    assert "quoted" not in page.render().decode()


def test_refusals_count_by_status_for_the_whole_server() -> None:
    page = MetricsPage()
    for status in (429, 503, 429):
        page.count_refusal(status)
    found = samples(page)
    assert found[("minigen:requests_refused_total", (("status", "429"),))] == 2
    assert found[("minigen:requests_refused_total", (("status", "503"),))] == 1


def test_another_collector_may_join_the_page_but_not_take_its_names() -> None:
    page = MetricsPage()
    counter = prometheus_client.Counter("http_requests", "Requests.", registry=page.registry)
    counter.inc()
    assert ("http_requests_total", ()) in samples(page)
    with pytest.raises(ValueError, match="num_requests_running"):
        prometheus_client.Gauge("minigen:num_requests_running", "", registry=page.registry)
    assert b"minigen" not in prometheus_client.generate_latest()  # the process's own registry


def one_request(metrics: Metrics, sequence_id: int) -> None:
    """Emit a request whose two gaps are of one second each."""
    second = 1_000_000_000
    metrics(Event(EventKind.QUEUED, 0, sequence_id, {"prompt_tokens": 4, "waited_ns": 0}))
    metrics(Event(EventKind.SCHEDULED, 0, sequence_id, {"tokens": 4, "computed": 0}))
    for number in range(3):
        metrics(Event(EventKind.NEW_TOKEN, number * second, sequence_id, {"token": 4}))
    counts = {"output_tokens": 3, "stopped": 0}
    metrics(Event(EventKind.FINISHED, 2 * second, sequence_id, counts))


def test_a_thousand_requests_leave_nothing_behind() -> None:
    metrics = Metrics("tiny", lambda: 0.0)
    for sequence_id in range(100):
        one_request(metrics, sequence_id)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for sequence_id in range(100, 1100):
        one_request(metrics, sequence_id)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 8 * 1000  # bytes: larger numbers, but not one pointer a request


def test_an_event_costs_the_same_however_many_requests_there_are() -> None:
    def calls(num_live: int) -> int:
        metrics, count = Metrics("tiny", lambda: 0.0), 0
        for number in range(10, 10 + num_live):
            counts = {"prompt_tokens": 4, "waited_ns": 0}
            metrics(Event(EventKind.QUEUED, 0, number, counts))

        def look(frame: object, what: str, arg: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(look)
        one_request(metrics, 1)
        metrics.read()
        sys.setprofile(None)
        return count

    assert calls(0) == calls(1000)


def test_a_page_read_while_the_engine_runs_is_of_one_moment() -> None:
    page, metrics = MetricsPage(), Metrics("tiny", lambda: 0.0)
    page.add(metrics)
    done = threading.Event()

    def work() -> None:
        for sequence_id in range(4000):
            one_request(metrics, sequence_id)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    seen = []
    while not done.is_set():
        reading = metrics.read()
        counts, total = reading.histograms["inter_token_latency_seconds"]
        tokens = reading.counters["generation_tokens"]
        seen.append((sum(counts), total, tokens))
    worker.join()
    assert all(num == total for num, total, _ in seen)
    assert all(0 <= tokens - num <= num / 2 + 1 for num, _, tokens in seen)
    assert value(page, "inter_token_latency_seconds_count") == 8000
    assert len(seen) > 10


DASHBOARD = Path(__file__).resolve().parent.parent / "docs" / "grafana" / "minigen.json"


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def queries() -> list[str]:
    """Return every query of the dashboard, of its panels and its variables."""
    board = dashboard()
    panels = [target["expr"] for each in board["panels"] for target in each.get("targets", [])]
    variables = [
        each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"
    ]
    return [*panels, *variables]


@pytest.mark.parametrize("prefix", ["minigen", "vllm"])
def test_the_dashboard_queries_every_metric_and_no_other(prefix: str) -> None:
    page = MetricsPage(f"{prefix}:")
    page.add(Metrics("tiny", lambda: 0.0))
    families = list(text_string_to_metric_families(page.render().decode()))
    shown = {sample.name for family in families for sample in family.samples}
    asked = {
        name
        for query in queries()
        for name in re.findall(r"(?:\w+:|process_)\w+", query.replace("${prefix}", prefix))
    }
    assert not asked - shown
    own = {family.name for family in families if family.name.startswith(prefix)}
    suffix = re.compile(r"_(total|bucket|sum|count)$")
    assert not own - {suffix.sub("", name) for name in asked}


def test_the_dashboard_uses_only_labels_buckets_and_variables_that_exist() -> None:
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "prefix", "model", "job"}
    for query in queries():
        asked = set(re.findall(r"\$\{?(\w+)", query)) - {"__rate_interval"}
        assert asked <= variables, query
        assert query.count("(") == query.count(")")
        for bound in re.findall(r'(\w+)_bucket\{[^}]*le="([^"]+)"', query):
            assert float(bound[1]) in BUCKETS[bound[0]]


def test_the_dashboard_warns_of_a_full_cache_and_names_every_panel() -> None:
    panels = dashboard()["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    assert all(each["title"] for each in panels)
    assert all(each["description"] for each in panels if each["type"] != "row")
    (cache,) = [each for each in panels if each["title"] == "KV cache"]
    steps = cache["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [each["value"] for each in steps] == [None, 0.85, 0.9]
    taken = set()
    for each in panels:
        place = each["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{each['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
