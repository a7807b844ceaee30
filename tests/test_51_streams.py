"""Streams: the same text as unstreamed, alone or among many, and no client leaves state behind."""

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from minigen import LLM, SamplingParams
from minigen.errors import StartError
from minigen.server import replies
from minigen.server.errors import explain
from minigen.server.models import ModelHost
from minigen.server.openai.responses import CompletionResponseWriter
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelHost:
    return ModelHost({"tiny": partial(load_tiny, directory)})


@pytest.fixture(scope="module")
def url(host: ModelHost) -> Iterator[str]:
    with serving(host) as url:
        yield url


@pytest.fixture
def served(url: str, host: ModelHost) -> Iterator[LLM]:
    """The engine behind the server, which must be empty at the end."""
    yield engine_of(host)
    wait_until(lambda: is_empty(engine_of(host)))


def of_characters(llm: LLM, characters: str, strength: float) -> dict[str, float]:
    """Return a bias for the bytes of these characters, so that some characters are complete."""
    return {str(each): strength for each in set(llm.tokenizer.encode(characters, False))}


def random_request(chance: random.Random, llm: LLM) -> dict[str, Any]:
    letters = chance.choice(["abc ", "é€ß", "🙂ab", "日本語"])
    asked: dict[str, Any] = {
        "prompt": "".join(chance.choices("xyz é🙂", k=chance.randint(1, 12))),
        "max_tokens": chance.randint(1, 20),
        "temperature": chance.choice([0, 0.3, 1.0, 1.5]),
        "seed": chance.randrange(2**40),
        "n": chance.choice([1, 1, 1, 2, 3]),
        "logit_bias": of_characters(llm, letters, chance.uniform(4, 12)),
        "skip_special_tokens": chance.random() < 0.7,
        "include_stop_str_in_output": chance.random() < 0.3,
        "min_tokens": chance.choice([0, 0, 1]),
    }
    if chance.random() < 0.7:
        asked["stop"] = ["".join(chance.choices(letters, k=chance.randint(1, 3))) for _ in range(3)]
    return asked


def test_a_stream_joined_is_the_unstreamed_text(url: str, served: LLM) -> None:
    """For 200 random requests with seeds, stop strings and Unicode, sixteen at a time."""
    chance = random.Random(7)
    requests = [random_request(chance, served) for _ in range(200)]

    asker = subprocess.run(
        [sys.executable, "-m", "tests.asker", url],
        input=json.dumps(requests),
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    results = json.loads(asker.stdout)
    for asked, (whole, streamed) in zip(requests, results, strict=True):
        assert streamed == whole, asked
    texts = [text for whole, _ in results for text, _ in whole]
    reasons = [reason for whole, _ in results for _, reason in whole]
    assert reasons.count("stop") > 30
    assert reasons.count("length") > 30
    assert sum(any(ord(char) > 127 and char != "\ufffd" for char in text) for text in texts) > 30


def test_64_clients_at_once_each_get_the_text_that_they_get_alone(
    url: str, directory: Path
) -> None:
    llm = load_tiny(directory)
    prompts = [f"{number}: once" + "x" * (number % 17) for number in range(64)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    alone = [llm.generate(prompt, params).text for prompt in prompts]

    async def ask(client: AsyncOpenAI, prompt: str) -> str:
        text = ""
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == alone


class Held:
    """A model whose steps wait for permission, so that a test knows the step that it is at."""

    def __init__(self, llm: LLM):
        self._llm, self._logits = llm, llm.engine.runner.logits
        self._leave = threading.Semaphore(0)
        self.num_started = 0

    def __enter__(self) -> "Held":
        self._llm.engine.runner.logits = self._step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.engine.runner.logits = self._logits  # type: ignore[method-assign]
        self.let(10_000)

    def let(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._leave.release()

    def _step(self, chunks: Any) -> Any:
        self.num_started += 1
        assert self._leave.acquire(timeout=PATIENCE)
        return self._logits(chunks)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_blocks_within_one_step(
    url: str, host: ModelHost, served: LLM, stream: bool
) -> None:
    asked = {"prompt": "abc", "n": 3, "max_tokens": 500, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    address = httpx.URL(url)
    with Held(served) as held:
        connection = socket.create_connection((address.host, address.port or 0), PATIENCE)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        held.let(5)
        wait_until(lambda: held.num_started == 6)
        assert len(served.engine.live) == 3
        connection.close()
        commands = host.first.served.thread.dispatcher.commands  # type: ignore[union-attr]
        wait_until(lambda: commands.qsize() == 1)  # the request is to be aborted
        held.let(1)
        wait_until(lambda: is_empty(served))
        assert held.num_started == 6


def test_a_step_that_fails_is_a_500_to_its_requests_and_the_next_one_works(
    url: str, served: LLM
) -> None:
    logits = served.engine.runner.logits
    failing = threading.Event()

    def fails(chunks: Any) -> Any:
        if failing.is_set():
            raise ZeroDivisionError("a layer divides by nothing")
        return logits(chunks)

    asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 400}
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        served.engine.runner.logits = fails  # type: ignore[method-assign]
        try:
            stream = client.completions.create(
                **asked, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            failing.set()
            for options in ({}, {"stream": True}):
                with pytest.raises(openai.InternalServerError, match="divides by nothing"):
                    client.completions.create(**asked, **options)
            with pytest.raises(openai.APIError, match="divides by nothing"):
                list(stream)
        finally:
            served.engine.runner.logits = logits  # type: ignore[method-assign]
        after = client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert after.usage is not None
        assert after.usage.completion_tokens == asked["max_tokens"]


def test_a_request_that_the_pool_can_never_hold_is_refused_and_small_ones_take_turns(
    directory: Path,
) -> None:
    small = partial(load_tiny, directory, max_num_seqs=8, block_size=4, num_blocks=12)
    host = ModelHost({"tiny": small})
    with serving(host) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        refused = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 200})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        asked = {"prompt": [5, 6, 7], "n": 8, "max_tokens": 30, "ignore_eos": True}
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 8 * 30
        wait_until(lambda: is_empty(engine_of(host)))


def test_a_long_answer_is_written_beside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def whole(writer: CompletionResponseWriter) -> bytes:
        threads.append(threading.current_thread().name)
        return write(writer)

    write = CompletionResponseWriter.whole
    monkeypatch.setattr(CompletionResponseWriter, "whole", whole)
    for longest in (20, 9):
        monkeypatch.setattr(replies, "LONG_ANSWER", longest)
        body = {"prompt": "ab", "max_tokens": 5, "n": 2, "logprobs": 2, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    assert len(set(threads)) == 2


def test_a_writer_that_fails_in_a_stream_ends_it_with_an_event(
    url: str, host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: CompletionResponseWriter, delta: object) -> bytes:
        raise ValueError("a fault of our own")

    monkeypatch.setattr(CompletionResponseWriter, "on_token", fail)
    body = {"prompt": "ab", "max_tokens": 5, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert json.loads(answer.text.removeprefix("data: "))["error"]["code"] == "internal_error"
    wait_until(lambda: is_empty(engine_of(host)))


def test_what_is_not_the_requests_fault_may_be_tried_again_and_deep_nesting_may_not() -> None:
    assert explain(StartError("no process")).status == 503
    assert explain(RecursionError()).status == 400
