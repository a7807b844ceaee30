"""Faulty clients of a server: too many, too slow, too large, disconnected; and it still serves."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from minigen.server.app import create_service
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost
from minigen.server.run import cutting_off
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.waiting import PATIENCE, wait_until
from tests.wire import connect, listening

LONG: Any = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT: Any = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@contextmanager
def served(
    directory: Path, engine: dict[str, Any] | None = None, **limits: Any
) -> Iterator[tuple[httpx.Client, ModelHost]]:
    """Serve within limits and yield a client and the host; in the end the server is empty."""
    host = ModelHost({"tiny": partial(load_tiny, directory, **(engine or {}))})
    with (
        serving(host, create_service(host, Limits(**limits))) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        yield client, host
        check_that_it_serves_on(client, host)


def check_that_it_serves_on(client: httpx.Client, host: ModelHost) -> None:
    wait_until(lambda: is_empty(engine_of(host)))
    answer = client.post("/v1/completions", json=SHORT)
    assert answer.json()["usage"]["completion_tokens"] == 2
    wait_until(lambda: is_empty(engine_of(host)))


def test_a_queue_over_its_limit_is_a_429_with_the_time_to_retry(directory: Path) -> None:
    one_seat = {"max_num_seqs": 1, "enable_prefix_caching": False}
    with served(directory, one_seat, max_queue=1) as (client, host):
        with (
            started_stream(client) as first,
            ThreadedPost(client, SHORT) as second,
        ):
            wait_until(lambda: host.num_waiting == 1)
            refused = client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            base_url = f"{client.base_url}/v1"
            with (
                OpenAI(base_url=base_url, api_key="x", max_retries=0) as official,
                pytest.raises(openai.RateLimitError),
            ):
                official.completions.create(model="tiny", prompt="a")
            assert client.get("/health").status_code == 200
            first.close()
        assert second.answer.status_code == 200, "it was in the queue, and was answered"


@contextmanager
def started_stream(client: httpx.Client) -> Iterator[httpx.Response]:
    """Yield a long answer whose first line has arrived."""
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield answer


class ThreadedPost:
    """A request in a thread that runs while the block runs, and its answer afterwards."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]):
        self._thread = threading.Thread(target=self._ask, args=(client, body))
        self.answer: httpx.Response

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self.answer = client.post("/v1/completions", json=body)

    def __enter__(self) -> "ThreadedPost":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)


def test_more_requests_at_once_than_the_limit_is_a_429(directory: Path) -> None:
    with (
        served(directory, max_in_flight=1) as (client, host),
        started_stream(client) as first,
    ):
        for path in ("/v1/chat/completions", "/api/generate", "/tokenize"):
            assert client.post(path, json={"any": "thing"}).status_code == 429
        first.close()
        wait_until(lambda: is_empty(engine_of(host)))


def test_a_stream_over_its_time_ends_with_an_error_and_frees_its_blocks(directory: Path) -> None:
    with served(directory, request_timeout=0.3) as (client, _):
        base_url = f"{client.base_url}/v1"
        with OpenAI(base_url=base_url, api_key="x", max_retries=0) as official:
            stream = official.completions.create(
                model="tiny", prompt="a", stream=True, max_tokens=900, extra_body={"n": 8}
            )
            with pytest.raises(openai.APIError, match=r"0\.3 seconds"):
                for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as caught:
                official.completions.create(
                    model="tiny", prompt="a", n=8, max_tokens=900, extra_body={"ignore_eos": True}
                )
            assert caught.value.status_code == 504
        with client.stream(
            "POST", "/api/generate", json={"model": "tiny", "prompt": "a" * 50}
        ) as lines:
            *_, last = lines.iter_lines()
        assert "0.3 seconds" in json.loads(last).get("error", "") or json.loads(last)["done"]
        asked = {"input": "abc", "max_output_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/responses", json=asked) as lines:
            kinds = [line for line in lines.iter_lines() if line.startswith("event: ")]
        assert kinds[-2:] == ["event: error", "event: response.failed"]


@pytest.mark.parametrize("goes_away", [True, False])
def test_half_a_body_does_not_affect_other_clients(directory: Path, goes_away: bool) -> None:
    with served(directory, body_timeout=0.2) as (client, _):
        host, port = client.base_url.host, client.base_url.port or 0
        assert host == "127.0.0.1"
        raw = connect(port)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{")
        if not goes_away:
            assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")
        raw.close()


def test_a_client_that_never_reads_is_cut_off_and_its_memory_is_freed(
    directory: Path,
) -> None:
    host = ModelHost({"tiny": partial(load_tiny, directory)})
    body = json.dumps({**LONG, "n": 4, "logprobs": 5, "max_tokens": 400}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    service = create_service(host, Limits())
    cut_off = cutting_off(0.3)
    with (
        listening(service, send_buffer=8192, http=cut_off, lifespan="on") as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        wait_until(lambda: host.is_ready)
        with connect(port, receive_buffer=4096) as deaf:
            deaf.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: host.num_users == 1)
            wait_until(lambda: host.num_users == 0)
            got = bytearray()
            while chunk := deaf.recv(2**16):
                got += chunk
            assert len(got) < 2**17, "most of it was never sent"
            assert not got.endswith(b"0\r\n\r\n"), "so it can be distinguished from a whole answer"
        check_that_it_serves_on(client, host)


PROMPTS = ["abc", "é" * 40, "Why is the sky blue? " * 4, "日本語"]


def asked_at_random(chance: random.Random) -> dict[str, Any]:
    """Return a request of any kind that a server supports."""
    return {
        "prompt": chance.choice(PROMPTS) + str(chance.randrange(50)),
        "max_tokens": chance.randint(1, 24),
        "n": chance.choice([1, 1, 1, 2, 3]),
        "temperature": chance.choice([0, 1]),
        "seed": chance.randrange(1000),
        "stop": chance.choice([None, ["e", "ü"]]),
        "logprobs": chance.choice([None, None, 2]),
        "stream": chance.random() < 0.6,
    }


async def ask_or_hang_up(client: httpx.AsyncClient, chance: random.Random) -> None:
    """Send one request; disconnect at a random moment in a third of the cases."""
    body = asked_at_random(chance)
    patience = chance.random() * 0.2 if chance.random() < 1 / 3 else None
    try:
        async with asyncio.timeout(patience):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                text = (await answer.aread()).decode()
                assert answer.status_code == 200, text
    except TimeoutError:
        assert patience is not None, "only a client that disconnected has no answer"
        return
    assert text.endswith("[DONE]\n\n") if body["stream"] else json.loads(text)["usage"]


async def load(url: str, num_requests: int, seed: int) -> None:
    """Send `num_requests` requests over 64 connections, each one request after the other."""
    turns = iter(range(num_requests))

    async def connection(client: httpx.AsyncClient) -> None:
        for turn in turns:
            await ask_or_hang_up(client, random.Random(seed + turn))

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(connection(client) for _ in range(64)))


def resident_bytes() -> int:
    """Return the memory of this process, server and clients."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_after_500_requests_and_many_disconnects_nothing_is_left(directory: Path) -> None:
    with served(directory, {"num_blocks": 400}) as (client, host):
        url = str(client.base_url)
        asyncio.run(load(url, 100, seed=0))
        wait_until(lambda: is_empty(engine_of(host)))
        before = resident_bytes()
        asyncio.run(load(url, 400, seed=100))
        wait_until(lambda: is_empty(engine_of(host)))
        wait_until(lambda: host.num_users == 0)
        assert resident_bytes() < 1.05 * before
