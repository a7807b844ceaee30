"""Ollama's own client, sync and async, against the server."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from minigen import LLM, SamplingParams
from minigen.server.app import create_service
from minigen.server.errors import ApiError
from minigen.server.local import serving as served_by_minigen
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.models import ModelHost
from minigen.server.ollama.routes import capabilities
from minigen.server.ollama.schema import GenerateRequest, Options
from minigen.tokenizer.chat_template import ChatTemplate
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.waiting import wait_until

MESSAGES: Any = [{"role": "user", "content": "Say é"}]
GREEDY = {"temperature": 0, "num_predict": 20, "repeat_penalty": 1.0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    """Another instance of the served model, for the expected answers."""
    return load_tiny(directory)


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelHost:
    load = partial(load_tiny, directory)
    return ModelHost({"tiny": load, "org/other:q8": load})


@pytest.fixture(scope="module")
def url(host: ModelHost) -> Iterator[str]:
    with serving(host, create_service(host, Limits(max_prompt_tokens=500))) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def expected(llm: LLM, prompt: str | list[int]) -> Any:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))


def as_user(llm: LLM, text: str, system: str | None = None) -> list[int]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_prompt([*first, {"role": "user", "content": text}])


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_generate_answers_by_the_chat_template(client: ollama.Client, llm: LLM, name: str) -> None:
    prompt = as_user(llm, "Why?")
    wanted = expected(llm, prompt)
    answer = client.generate(name, "Why?", options=GREEDY)
    assert answer.response == wanted.text
    assert (answer.model, answer.done, answer.done_reason) == (name, True, wanted.finish_reason)
    assert answer.prompt_eval_count == len(prompt)
    assert answer.eval_count == len(wanted.token_ids)


def test_a_raw_prompt_is_taken_as_it_is_and_a_system_prompt_comes_first(
    client: ollama.Client, llm: LLM
) -> None:
    raw = client.generate("tiny", "Why?", raw=True, options=GREEDY)
    assert raw.response == expected(llm, "Why?").text
    system = client.generate("tiny", "Why?", system="Be kind", options=GREEDY)
    assert system.response == expected(llm, as_user(llm, "Why?", "Be kind")).text
    assert raw.response != system.response


def test_chat_answers_a_conversation(client: ollama.Client, llm: LLM) -> None:
    answer = client.chat("tiny", MESSAGES, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content == expected(llm, llm.chat_prompt(MESSAGES)).text


def test_durations_add_up_in_nanoseconds(client: ollama.Client) -> None:
    for answer in (
        client.generate("tiny", "Why?", options=GREEDY),
        list(client.generate("tiny", "Why?", options=GREEDY, stream=True))[-1],
    ):
        parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
        assert all(isinstance(part, int) and part >= 0 for part in parts)
        assert answer.prompt_eval_duration
        assert answer.eval_duration
        assert sum(part or 0 for part in parts) <= (answer.total_duration or 0) < 10**10


@pytest.mark.parametrize("seed", range(8))
def test_a_streamed_answer_equals_the_unstreamed_one(client: ollama.Client, seed: int) -> None:
    options = {"seed": seed, "num_predict": 24, "temperature": 1.5, "stop": ["é", chr(65 + seed)]}
    whole = client.generate("tiny", f"{seed} ü", options=options)
    *pieces, last = client.generate("tiny", f"{seed} ü", options=options, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.response
    assert not any(piece.done for piece in pieces)
    assert last.response == ""
    for fact in ("done", "done_reason", "prompt_eval_count", "eval_count"):
        assert last[fact] == whole[fact]
    chat = client.chat("tiny", MESSAGES, options=options)
    streamed = client.chat("tiny", MESSAGES, options=options, stream=True)
    assert "".join(piece.message.content or "" for piece in streamed) == chat.message.content


def test_the_async_client_gets_the_same(url: str, client: ollama.Client) -> None:
    async def ask() -> tuple[str, str]:
        async with ollama.AsyncClient(url) as client:
            whole = await client.chat("tiny", MESSAGES, options=GREEDY)
            stream = await client.chat("tiny", MESSAGES, options=GREEDY, stream=True)
            pieces = [piece.message.content or "" async for piece in stream]
            return whole.message.content or "", "".join(pieces)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == client.chat("tiny", MESSAGES, options=GREEDY).message.content


def test_lines_are_streamed_by_default(url: str) -> None:
    ask = {"model": "tiny", "prompt": "Why?", "options": GREEDY}
    answer = httpx.post(f"{url}/api/generate", json=ask)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert len(answer.text.splitlines()) > 2
    whole = httpx.post(f"{url}/api/generate", json={**ask, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["done"]


def test_a_body_needs_no_content_type_unless_a_web_page_sends_it(url: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Why?", "options": GREEDY, "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl's own, as Ollama shows it
    for headers in ({}, form):
        assert httpx.post(f"{url}/api/generate", content=body, headers=headers).json()["done"]
    from_a_page = {"content-type": "text/plain", "origin": "http://a.example"}
    refused = httpx.post(f"{url}/api/generate", content=body, headers=from_a_page)
    assert refused.status_code == 400
    assert "Content-Type" in refused.json()["error"]


def test_logprobs_come_with_each_token(client: ollama.Client) -> None:
    ask: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "options": GREEDY}
    whole = client.generate("tiny", "Why?", **ask)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == whole.eval_count
    assert all(each.logprob <= 0 and len(each.top_logprobs or ()) == 2 for each in whole.logprobs)
    pieces = client.generate("tiny", "Why?", stream=True, **ask)
    streamed = [each for piece in pieces for each in piece.logprobs or ()]
    assert streamed == list(whole.logprobs)


def test_an_empty_prompt_loads_a_model_which_is_listed_then_and_unloads_it(
    url: str, host: ModelHost, client: ollama.Client
) -> None:
    names = {model.model for model in client.list().models}
    assert names == {"tiny:latest", "org/other:q8"}
    assert {model.model for model in client.ps().models} == {"tiny:latest"}
    loaded = client.generate("org/other:q8", keep_alive="1h30m")
    assert (loaded.response, loaded.done_reason) == ("", "load")
    other = next(model for model in client.ps().models if model.model == "org/other:q8")
    assert other.expires_at is not None
    left = host.models["org/other:q8"].keep_alive
    assert left == 5400
    assert other.context_length == 1024
    for forever in (1e15, 1e300, -1):
        client.generate("org/other:q8", keep_alive=forever)
        assert host.models["org/other:q8"].keep_alive is None
    assert client.chat("org/other:q8", [], keep_alive=0).done_reason == "unload"
    wait_until(lambda: len(client.ps().models) == 1)
    answer = client.chat("org/other:q8", MESSAGES, options=GREEDY)
    assert answer.message.content, "it is loaded again on request"
    assert host.models["org/other:q8"].keep_alive is None, "and stays as usual"
    client.generate("org/other:q8", "Why?", options=GREEDY, keep_alive=0)
    wait_until(lambda: len(client.ps().models) == 1)


def test_no_client_unloads_a_model_that_the_caller_served(llm: LLM) -> None:
    with served_by_minigen(llm) as server, ollama.Client(host=server.url) as client:
        client.generate("minigen", "Why?", options=GREEDY, keep_alive=0)
        assert client.chat("minigen", [], keep_alive=0).done_reason == "load", "for it stays"
        assert [model.model for model in client.ps().models] == ["minigen:latest"]
        assert client.generate("minigen", "Why?", options=GREEDY).response


def test_a_model_is_shown(client: ollama.Client, llm: LLM) -> None:
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.details is not None
    assert shown.details.quantization_level == "float32"
    num_parameters = shown.modelinfo["general.parameter_count"]
    listed = next(model for model in client.list().models if model.model == "tiny:latest")
    assert listed.size == 4 * num_parameters, "stored in float32"
    assert shown.capabilities == ["completion", "tools"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, ["completion"]),
        ("{{ messages[0].content }}", ["completion", "tools"]),
        ("{{ messages[0].content.split('</think>') }}", ["completion", "tools", "thinking"]),
    ],
)
def test_what_a_model_can_do_comes_from_its_template(
    source: str | None, expected: list[str]
) -> None:
    assert capabilities(None if source is None else ChatTemplate(source, {})) == expected


@pytest.mark.parametrize("time", ["soon", "nan", "--1", "", "1e999", True, float("nan")])
def test_a_time_that_is_none_is_refused_in_one_sentence(url: str, time: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "keep_alive": time})
    answer = httpx.post(f"{url}/api/generate", content=body)
    assert answer.status_code == 400
    shown = json.dumps(time)
    assert answer.json() == {
        "error": f'\'keep_alive\': should be seconds, or a time like "5m" or "-1", not {shown}.'
    }


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("template", {"prompt": "a", "template": "{{ .Prompt }}"}),
        ("context", {"prompt": "a", "context": [1, 2]}),
        ("images", {"prompt": "a", "images": ["aGk="]}),
        ("format", {"prompt": "a", "format": "xml"}),
        ('format must be "json" or a JSON schema, not []', {"prompt": "a", "format": []}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("think", {"prompt": "a", "think": True}),
        ("colour", {"prompt": "a", "colour": "red"}),
        ("keep_alive", {"prompt": "a", "keep_alive": "soon"}),
        ("system", {"prompt": "a", "raw": True, "system": "b"}),
        ("temperature", {"prompt": "a", "options": {"temperature": -1}}),
        ("mirostat", {"prompt": "a", "options": {"mirostat": 2}}),
        ("repeat_last_n", {"prompt": "a", "options": {"repeat_last_n": 64}}),
        ("num_predict", {"prompt": "a", "options": {"num_predict": 0}}),
        ("num_ctx", {"prompt": "a" * 50, "options": {"num_ctx": 40}}),
        ("warmth", {"prompt": "a", "options": {"warmth": 2}}),
        ("top_logprobs", {"prompt": "a", "top_logprobs": 2}),
        ("500", {"prompt": "a" * 600}),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    url: str, field: str, request_: dict[str, Any]
) -> None:
    answer = httpx.post(f"{url}/api/generate", json={"model": "tiny", **request_})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert field in answer.json()["error"]


def test_roles_and_tools_that_are_none_are_refused(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="role") as caught:
        client.chat("tiny", [{"role": "robot", "content": "4"}])
    assert caught.value.status_code == 400
    tool: Any = {"type": "function", "function": {"name": "add it", "description": "adds"}}
    with pytest.raises(ollama.ResponseError, match="tool's name"):
        client.chat("tiny", MESSAGES, tools=[tool])


def test_an_unknown_model_is_a_404(client: ollama.Client) -> None:
    for ask in (
        lambda: client.generate("large", "Why?"),
        lambda: client.chat("large:latest", MESSAGES),
        lambda: client.show("large"),
        lambda: client.generate("large"),
    ):
        with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
            ask()
        assert caught.value.status_code == 404
    nameless = httpx.post(f"{client._client.base_url}/api/generate", json={"prompt": "a"})
    assert nameless.status_code == 400
    assert "model" in nameless.json()["error"]


def test_options_that_change_only_ollamas_speed_are_accepted(client: ollama.Client) -> None:
    plain = client.generate("tiny", "Why?", options=GREEDY)
    speed: Any = {"num_gpu": 1, "num_thread": 4, "use_mmap": True, "num_batch": 512, "num_keep": 5}
    assert client.generate("tiny", "Why?", options={**GREEDY, **speed}).response == plain.response


def test_num_ctx_bounds_prompt_and_answer_together(client: ollama.Client, llm: LLM) -> None:
    num_prompt = len(as_user(llm, "Why?"))
    options = {"temperature": 0, "num_ctx": num_prompt + 3}
    assert (client.generate("tiny", "Why?", options=options).eval_count or 99) <= 3
    larger = {**GREEDY, "num_ctx": 10**6}
    answer = client.generate("tiny", "Why?", options=larger)
    assert answer.response == client.generate("tiny", "Why?", options=GREEDY).response


def test_ollamas_defaults_are_its_own(llm: LLM) -> None:
    from minigen.server.ollama.routes import generate_answers

    def params_of(**options: Any) -> SamplingParams:
        request = GenerateRequest.model_validate(
            {"model": "tiny", "prompt": "a", "options": options}
        )
        answers, _ = generate_answers(llm, request)
        return answers[0].sequence.params

    usual = params_of()
    assert (usual.temperature, usual.top_k, usual.top_p) == (0.8, 40, 0.9)
    assert (usual.repetition_penalty, usual.max_tokens, usual.seed) == (1.1, None, None)
    own = params_of(top_k=0, seed=-1, repeat_penalty=1.3, min_p=0.1, num_predict=-2, stop="x")
    assert (own.top_k, own.seed, own.repetition_penalty, own.min_p) == (None, None, 1.3, 0.1)
    assert (own.max_tokens, own.stops) == (None, ("x",))


def test_every_option_that_ollamas_client_knows_is_known(host: ModelHost) -> None:
    unknown = set(ollama.Options.model_fields) - set(Options.model_fields)
    assert unknown == {"logits_all", "vocab_only", "embedding_only"}, "which give no text"
    with pytest.raises(ApiError, match="does not exist"):
        host.find("none")


def test_a_client_that_disconnects_frees_its_blocks(url: str, host: ModelHost) -> None:
    ask = {"model": "tiny", "prompt": "Why?", "options": {"temperature": 1.0, "seed": 1}}
    with httpx.stream("POST", f"{url}/api/generate", json=ask) as stream:
        next(stream.iter_lines())
    wait_until(lambda: is_empty(engine_of(host)))


def test_a_key_is_required_here_too(directory: Path) -> None:
    host = ModelHost({"tiny": partial(load_tiny, directory)})
    with serving(host, create_service(host, keys=ApiKeys(["opensesame"]))) as url:
        with ollama.Client(url) as without_key, pytest.raises(ollama.ResponseError) as caught:
            without_key.list()
        assert caught.value.status_code == 401
        with ollama.Client(url, headers={"Authorization": "Bearer opensesame"}) as client:
            assert client.list().models[0].model == "tiny:latest"
