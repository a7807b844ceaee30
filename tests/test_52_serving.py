"""A server under the load generator: both count the same."""

import asyncio
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minigen.bench.client import Target, find_model, open_loop, send
from minigen.bench.report import Outcome, report
from minigen.bench.workload import Planned
from minigen.server import local
from minigen.server.app import create_service
from minigen.server.metrics import MetricsPage, metrics_router, metrics_watcher
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost
from tests.serving import load_tiny, save_tiny, serving
from tests.waiting import wait_until

LABELS = ("finished_reason", "status")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def put(target: Target, load: list[Planned]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with target.session() as session:
            assert await find_model(session, target) == target.model
            return await open_loop(
                load, lambda request, clock: send(session, target, request, clock)
            )

    return asyncio.run(run())


def scraped(url: str) -> dict[str, float]:
    """Return the page's samples by name, with the labels in `LABELS`."""
    response = httpx.get(f"{url}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(response.text)
    found = [sample for family in families for sample in family.samples]
    return {
        " ".join([each.name, *(each.labels[name] for name in LABELS if name in each.labels)]): (
            each.value
        )
        for each in found
        if "le" not in each.labels
    }


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_client_and_server_count_the_same_requests_and_tokens(
    directory: Path, endpoint: str
) -> None:
    page = MetricsPage()
    host = ModelHost({"tiny": partial(load_tiny, directory)}, watchers=[metrics_watcher(page)])
    load = [Planned(number / 50, f"request {number}", 3 + number % 5) for number in range(20)]
    with serving(host, create_service(host, routers=[metrics_router(page)])) as url:
        outcomes = put(Target(url, "tiny", endpoint), load)
        found = report(outcomes)
        assert (found.num_answered, found.errors) == (20, {})
        assert [each.output_tokens for each in outcomes] == [each.output_tokens for each in load]
        wait_until(lambda: scraped(url)["minigen:num_requests_running"] == 0)
        metrics = scraped(url)
    assert metrics["minigen:request_success_total length"] == 20
    assert metrics["minigen:generation_tokens_total"] == found.output_tokens
    assert metrics["minigen:prompt_tokens_total"] == found.prompt_tokens
    assert metrics["minigen:time_to_first_token_seconds_count"] == 20
    assert found.ttft is not None
    mean = metrics["minigen:time_to_first_token_seconds_sum"] / 20
    assert 0 < mean < found.ttft.mean  # the client's time includes the network


def test_a_refused_request_is_on_the_page_and_in_no_latency(directory: Path) -> None:
    limits = Limits(max_queue=0)  # nothing may enter
    with local.serving(load_tiny(directory), limits=limits) as server:
        before = scraped(server.url)
        (outcome,) = put(Target(server.url, "minigen"), [Planned(0, "hello", 4)])
        after = scraped(server.url)
    assert outcome.error == "HTTP 429"
    assert after["minigen:requests_refused_total 429"] == 1
    name = "minigen:time_to_first_token_seconds_count"
    assert after[name] == before[name]


def test_an_unloaded_model_leaves_the_page_and_returns_when_loaded(directory: Path) -> None:
    page = MetricsPage("vllm:")
    host = ModelHost(
        {"tiny": partial(load_tiny, directory)}, keep_alive=0.05, watchers=[metrics_watcher(page)]
    )
    with serving(host, create_service(host, routers=[metrics_router(page)])) as url:
        wait_until(lambda: "vllm:num_requests_running" not in scraped(url))
        (outcome,) = put(Target(url, "tiny"), [Planned(0, "hello", 4)])
        assert outcome.error is None
        wait_until(lambda: "vllm:num_requests_running" not in scraped(url))
