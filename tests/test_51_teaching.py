"""A server in a thread of a notebook's kernel: what it serves, and its state when it ends."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AuthenticationError, OpenAI, RateLimitError

from minigen import LLM, SamplingParams
from minigen.bench.workload import Planned
from minigen.engine.engine_thread import EngineThread
from minigen.errors import MinigenError, OptionError, RequestError
from minigen.outputs import RequestState
from minigen.server.local import LocalServer, serve_command, serving
from minigen.server.middleware.limits import Limits
from minigen.server.replies import submitted
from minigen.trace.events import EventKind
from minigen_course.ch51_server.lesson import (
    BoundedQueue,
    count_calls,
    event_data,
    looks_at_health,
    small_app,
)
from minigen_course.lab.load import put_load
from tests.serving import is_empty, load_tiny, save_tiny
from tests.waiting import wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_tiny(save_tiny(tmp_path_factory.mktemp("tiny")))


def ask(url: str, key: str = "none") -> str:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return (
            client.completions.create(
                model="minigen",
                prompt="abc",
                max_tokens=9,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .text
        )


def test_a_loaded_model_is_served_in_one_line_and_is_free_again_afterwards(llm: LLM) -> None:
    alone = llm.generate("abc", GREEDY).text
    with serving(llm) as server:
        assert ask(server.url) == alone
        with pytest.raises(RequestError, match="in its own thread"):
            llm.generate("abc", GREEDY)
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 'minigen:request_success_total{finished_reason="length",model_name="minigen"}' in metrics
    assert llm.generate("abc", GREEDY).text == alone
    assert not llm.trace.active, "no subscriber is left"
    assert is_empty(llm)


def test_it_is_served_again_and_closed_twice_without_harm(llm: LLM) -> None:
    for _ in range(2):
        server = serving(llm)
        assert ask(server.url)
        server.close()
        server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_model_that_is_served_already_is_not_served_again_and_says_so(llm: LLM) -> None:
    with serving(llm) as server:
        with pytest.raises(MinigenError, match="runs in its own thread"):
            serving(llm)
        assert ask(server.url), "and goes on being served"
    stream = llm.stream("abc", GREEDY)
    next(stream)
    with pytest.raises(MinigenError, match="1 unfinished requests"):
        serving(llm)
    stream.close()
    assert not llm.trace.active, "no subscriber is left"
    with serving(llm) as server:
        assert ask(server.url)


def test_limits_and_keys_are_those_that_were_given(llm: LLM) -> None:
    with serving(llm, limits=Limits(max_queue=0), api_keys=["secret"]) as server:
        with pytest.raises(AuthenticationError):
            ask(server.url, "guessed")
        with pytest.raises(RateLimitError, match="The queue of waiting requests is full"):
            ask(server.url, "secret")


def test_a_custom_app_is_served_too(llm: LLM) -> None:
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    with LocalServer(app) as server:
        assert httpx.get(f"{server.url}/hello").json() == "hello"


def test_a_step_asks_the_loop_once_for_all_its_streams(llm: LLM) -> None:
    async def eight() -> None:
        async def one(thread: EngineThread, answer: RequestState) -> None:
            stays: Any = asyncio.Event().wait
            async with submitted(thread.dispatcher, [answer], stays, every_token=True) as deltas:
                async for _ in deltas:
                    pass

        loop, answers = asyncio.get_running_loop(), llm.process_requests(["abc"] * 8, GREEDY)
        with EngineThread(llm.engine, loop.call_soon_threadsafe) as thread:
            await asyncio.gather(*(one(thread, each) for each in answers))

    with llm.record() as recorder:
        _, num_calls = count_calls(eight)
    num_steps = sum(event.kind is EventKind.STEP for event in recorder.events)
    assert num_steps >= GREEDY.max_tokens  # type: ignore[operator]
    assert 1 <= num_calls <= num_steps, "not once per token"


def test_the_small_endpoint_answers_openais_client_and_aborts_when_it_disconnects(llm: LLM) -> None:
    prompt: Any = [{"role": "user", "content": "Say é"}]
    params = SamplingParams(temperature=0, max_tokens=300)
    whole = llm.generate(llm.chat_prompt(prompt), params)
    asked: Any = {"model": "m", "messages": prompt, "max_tokens": 300, "stream": True}
    with (
        EngineThread(llm.engine) as thread,
        LocalServer(small_app(llm, thread)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = list(client.chat.completions.create(**asked))
        text = "".join(each.choices[0].delta.content or "" for each in chunks)
        assert (text, chunks[-1].choices[0].finish_reason) == (whole.text, whole.finish_reason)
        with llm.record() as recorder:
            stream = client.chat.completions.create(**asked)
            next(stream)
            next(stream)
            stream.close()
            wait_until(lambda: is_empty(llm))
    kinds = [event.kind for event in recorder.events]
    assert EventKind.ABORTED in kinds
    assert kinds.count(EventKind.NEW_TOKEN) < whole.num_output_tokens


def test_looks_at_health_show_a_blocked_loop(llm: LLM) -> None:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/answer")
    async def answer() -> None:
        time.sleep(0.4)  # it blocks the loop on purpose

    with LocalServer(app) as server, httpx.Client(base_url=server.url) as client:
        idle, looks = looks_at_health(server.url, lambda: client.post("/answer"))
    assert looks[0][0] == 0
    assert looks[0][1] > 0.2
    assert idle < looks[0][1] / 2


def test_the_small_endpoints_stream_is_read_by_hand(llm: LLM) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "Say é"}], "max_tokens": 9}
    with (
        EngineThread(llm.engine) as thread,
        LocalServer(small_app(llm, thread)) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as response,
    ):
        data = list(event_data(response.iter_raw()))
    assert data[-1] == "[DONE]"
    assert {json.loads(each)["object"] for each in data[:-1]} == {"chat.completion.chunk"}


def test_a_queue_with_an_end_refuses_over_http_and_then_admits_again() -> None:
    app, started, may_end = FastAPI(), threading.Event(), threading.Event()

    @app.post("/answer")
    def answer() -> None:
        started.set()
        assert may_end.wait(20)

    queue = BoundedQueue(app, max_running=1, max_waiting=0, seconds=2.5)
    with (
        LocalServer(queue) as server,
        httpx.Client(base_url=server.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(client.post, "/answer")
        assert started.wait(20)
        refused = client.post("/answer")
        may_end.set()
        assert running.result().status_code == 200
        assert client.post("/answer").status_code == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["message"]


def test_the_chapter_times_the_server_and_not_the_making_of_a_client() -> None:
    chapter = Path(__file__).parents[1] / "notebooks" / "51_server.py"
    source = chapter.read_text(encoding="utf-8")
    for each in ("get", "post"):
        assert f"httpx.{each}" not in source, "each such call makes a client of its own"


def test_a_load_from_a_cell_returns_an_outcome_for_each_request(llm: LLM) -> None:
    load = [Planned(0.0, "abc", 5), Planned(0.01, "", 5), Planned(0.02, "de", 3)]
    with serving(llm) as server:
        outcomes = put_load(server.url, load)
    assert [(each.error, each.output_tokens) for each in outcomes[::2]] == [(None, 5), (None, 3)]


def test_a_command_that_cannot_serve_gives_the_reason() -> None:
    with pytest.raises(OptionError, match="max_num_seqs"), serve_command("--max-num-seqs", "0"):
        pass
