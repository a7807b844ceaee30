"""A server in a thread of a notebook's kernel: what it serves, and what is left when it is closed."""

import httpx
import pytest
from fastapi import FastAPI
from openai import AuthenticationError, OpenAI, RateLimitError

from minigen import LLM, SamplingParams
from minigen.errors import RequestError
from minigen.server.limits import Limits
from minigen.teach.serving import LocalServer, serving
from tests.serving import is_empty, load_tiny, save_tiny

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
        with pytest.raises(RequestError, match="a thread of its own"):
            llm.generate("abc", GREEDY)
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 'minigen:request_success_total{finished_reason="length",model_name="minigen"}' in metrics
    assert llm.generate("abc", GREEDY).text == alone
    assert not llm.trace.active, "nobody listens any more"
    assert is_empty(llm)


def test_it_is_served_again_and_closed_twice_without_harm(llm: LLM) -> None:
    for _ in range(2):
        server = serving(llm)
        assert ask(server.url)
        server.close()
        server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_limits_and_keys_are_those_that_were_given(llm: LLM) -> None:
    with serving(llm, limits=Limits(max_queue=0), api_keys=["secret"]) as server:
        with pytest.raises(AuthenticationError):
            ask(server.url, "guessed")
        with pytest.raises(RateLimitError, match="As many requests wait"):
            ask(server.url, "secret")


def test_an_app_of_ones_own_is_served_too(llm: LLM) -> None:
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    with LocalServer(app) as server:
        assert httpx.get(f"{server.url}/hello").json() == "hello"

