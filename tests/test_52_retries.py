"""Retries before a server that stood still, and the queries for a server's metrics."""

import re
from itertools import pairwise

import pytest

from minigen.server.metrics import BUCKETS, COUNTERS, GAUGES
from minigen_course.ch52_slo.lesson import METRIC, QUERIES, markdown_table, queries
from minigen_course.lab.retries import PATIENCE, RATE, SERVICE, Clients, rate_of, storm


def late_goodput(clients: Clients, stall: float = 4.0) -> float:
    return sum(each >= 60 for each in storm(clients, stall).good) / 60


def test_without_a_stall_all_are_answered_in_time_once() -> None:
    for clients in (Clients(), Clients(4), Clients(4, 1.0, 0.1), Clients(4, cancels=True)):
        found = storm(clients, stall=0.0)
        assert len(found.good) == len(found.sent)
        assert len(found.sent) / 120 == pytest.approx(RATE, rel=0.15)


def test_retries_keep_a_healthy_server_full_and_budgets_or_cancelling_do_not() -> None:
    assert late_goodput(Clients()) > 0.9 * RATE
    assert late_goodput(Clients(4)) < 0.1
    assert late_goodput(Clients(4, 1.0)) < 0.1
    assert late_goodput(Clients(4, 1.0, budget=0.1)) > 0.9 * RATE
    assert late_goodput(Clients(4, cancels=True)) > 0.9 * RATE
    assert late_goodput(Clients(4), stall=1.0) > 0.9 * RATE, "a short stall does no harm"


def test_a_storm_has_at_most_the_tries_that_clients_may_make() -> None:
    first = len(storm(Clients()).sent)
    assert first < len(storm(Clients(4)).sent) <= 4 * first
    assert len(storm(Clients(4, 1.0, budget=0.1)).sent) <= 1.1 * first + 1


def test_answers_are_never_faster_than_the_server() -> None:
    good = storm(Clients(4)).good
    assert all(after - before >= SERVICE - 1e-9 for before, after in pairwise(good))
    assert SERVICE < PATIENCE


def test_a_rate_counts_times_per_second_in_windows() -> None:
    assert rate_of([0.0, 1.0, 4.9, 5.0])[:2] == [0.6, 0.2]


def test_queries_name_metrics_that_the_server_exports(capsys: pytest.CaptureFixture[str]) -> None:
    known = {f"minigen:{name}" for name in GAUGES}
    known |= {f"minigen:{name}_total" for name in COUNTERS}
    known |= {"minigen:request_success_total", "minigen:requests_refused_total"}
    known |= {f"minigen:{name}_{end}" for name in BUCKETS for end in ("bucket", "sum", "count")}
    named = {name for query in QUERIES.values() for name in METRIC.findall(query)}
    assert named <= known
    for query in QUERIES.values():
        for bound in re.findall(r'le="([\d.]+)"', query):
            assert float(bound) in BUCKETS["time_to_first_token_seconds"]
    page = "\n".join(f'{name}{{model_name="m"}} 0.0' for name in sorted(known))
    queries(page)
    assert "histogram_quantile" in capsys.readouterr().out
    for row in markdown_table(QUERIES).splitlines():
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, "two cells, whatever bars a query has"
    with pytest.raises(ValueError, match="exports no"):
        queries(page.replace("minigen:kv_cache", "minigen:cache"))
