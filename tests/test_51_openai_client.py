"""OpenAI's own client, sync and async, gets what it requests, and otherwise its own exceptions."""

import asyncio
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from minigen import LLM, SamplingParams
from minigen.server.app import create_app
from minigen.server.middleware.auth import ApiKeys
from minigen.server.middleware.limits import Limits
from minigen.server.middleware.stack import MiddlewareStack
from minigen.server.models import ModelHost
from tests.serving import load_tiny, save_tiny, serving
from tests.waiting import wait_until

MESSAGES: Any = [{"role": "user", "content": "Say é"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    """Another instance of the served model, for the expected answers."""
    return load_tiny(directory)


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    with serving(ModelHost({"tiny": partial(load_tiny, directory)})) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(llm: LLM, prompt: str | list[int], **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, **params))


def test_a_chat_is_answered_as_the_engine_answers_it(client: OpenAI, llm: LLM) -> None:
    prompt = llm.chat_prompt(MESSAGES)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, **GREEDY
    )
    wanted = expected(llm, prompt, max_tokens=20)
    assert answer.choices[0].message.content == wanted.text
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == len(prompt) + 20


def test_a_streamed_chat_has_its_role_first_then_text_then_the_finish_reason_then_usage(
    client: OpenAI, llm: LLM
) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    *content, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert not content[0].choices[0].delta.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in content)
    assert text == expected(llm, llm.chat_prompt(MESSAGES), max_tokens=20).text
    reasons = [chunk.choices[0].finish_reason for chunk in content]
    assert reasons == [None] * (len(content) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in content)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_completion_takes_text_texts_ids_and_lists_of_ids(client: OpenAI, llm: LLM) -> None:
    for prompt in ("abc", ["abc", "de"], [5, 6, 7], [[5, 6, 7], [8]]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, **GREEDY)
        outputs = expected(llm, prompt, max_tokens=8)  # type: ignore[arg-type]
        outputs = outputs if isinstance(outputs, list) else [outputs]
        assert [choice.text for choice in answer.choices] == [each.text for each in outputs]
        assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(each.num_prompt_tokens for each in outputs)


def test_n_choices_of_a_seed_are_the_engines_and_the_same_again(client: OpenAI, llm: LLM) -> None:
    asked: Any = {"model": "tiny", "prompt": "abc", "n": 3, "seed": 11, "max_tokens": 12}
    params = SamplingParams(n=3, seed=11, max_tokens=12)
    texts = [choice.text for choice in llm.generate("abc", params).choices]
    for _ in range(2):
        answer = client.completions.create(**asked)
        assert [choice.text for choice in answer.choices] == texts
    joined = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == texts
    assert len(set(texts)) == 3


def test_a_stream_ends_with_its_usage_of_n_answers_to_one_prompt_and_then_done(
    url: str, llm: LLM
) -> None:
    asked = {"prompt": "abc", "n": 2, "seed": 11, "max_tokens": 4, "ignore_eos": True}
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    *_, usage, done = httpx.post(f"{url}/v1/completions", json={**asked, **wanted}).text.split(
        "\n\n"
    )[:-1]
    assert done == "data: [DONE]"
    counts = json.loads(usage.removeprefix("data: "))["usage"]
    assert counts["prompt_tokens"] == len(llm.tokenizer.encode("abc"))
    assert counts["completion_tokens"] == 8


def test_a_stop_string_ends_an_answer_and_is_not_in_it(client: OpenAI, llm: LLM) -> None:
    whole = expected(llm, "abc", max_tokens=60).text
    stop = whole[30:33]
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=60, stop=[stop, "never"], **GREEDY
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 60


def test_without_a_token_limit_the_context_is_the_limit(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5] * 1000, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_of_a_chat_hold_each_token_its_bytes_and_the_likeliest(
    client: OpenAI, llm: LLM
) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 15,
        "logprobs": True,
        "top_logprobs": 3,
        **GREEDY,
    }
    answer = client.chat.completions.create(**asked)
    wanted = expected(llm, llm.chat_prompt(MESSAGES), max_tokens=15, logprobs=3)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 15
    for entry, token_id, logprobs in zip(entries, wanted.token_ids, wanted.logprobs, strict=True):
        assert bytes(entry.bytes or ()) == llm.tokenizer.token_bytes(token_id)
        assert entry.logprob == pytest.approx(logprobs[token_id].logprob)
        best = sorted((each.logprob for each in logprobs.values()), reverse=True)[:3]
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(best)
    joined = b"".join(bytes(entry.bytes or ()) for entry in entries)
    text = answer.choices[0].message.content
    assert joined.decode(errors="replace") == text
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == entries


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_a_completion_give_the_offset_of_each_token(
    client: OpenAI, llm: LLM, echo: bool
) -> None:
    asked: Any = {"model": "tiny", "prompt": "abé", "max_tokens": 9, "logprobs": 2, "echo": echo}
    answer = client.completions.create(**asked, **GREEDY)
    columns = answer.choices[0].logprobs
    assert columns is not None
    wanted = expected(llm, "abé", max_tokens=9, logprobs=2, prompt_logprobs=2)
    ids = [*wanted.prompt_token_ids, *wanted.token_ids] if echo else wanted.token_ids
    all_logprobs = [*wanted.prompt_logprobs, *wanted.logprobs] if echo else wanted.logprobs
    assert columns.token_logprobs == [
        None if each is None else pytest.approx(each[token_id].logprob)
        for token_id, each in zip(ids, all_logprobs, strict=True)
    ]
    assert columns.text_offset is not None
    assert columns.tokens is not None
    for offset, token in zip(columns.text_offset, columns.tokens, strict=True):
        if token not in ("", "<s>") and "bytes:" not in token:
            assert answer.choices[0].text[offset:].startswith(token)
    streamed: dict[str, list[Any]] = {name: [] for name in columns.to_dict()}
    text = ""
    for chunk in client.completions.create(**asked, stream=True, **GREEDY):
        text += chunk.choices[0].text
        part = chunk.choices[0].logprobs
        for name in streamed if part is not None else ():
            streamed[name] += getattr(part, name)
    assert text == answer.choices[0].text
    assert streamed == columns.to_dict()


def test_echo_without_new_tokens_scores_a_prompt(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["abcd", "xy"], max_tokens=0, echo=True, logprobs=1
    )
    for choice, prompt in zip(answer.choices, ("abcd", "xy"), strict=True):
        wanted = expected(llm, prompt, max_tokens=1, prompt_logprobs=1)
        assert choice.text == prompt
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [
            None if each is None else pytest.approx(each[token_id].logprob)
            for token_id, each in zip(wanted.prompt_token_ids, wanted.prompt_logprobs, strict=True)
        ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    plain = client.completions.create(model="tiny", prompt="abcd", max_tokens=0, echo=True)
    assert plain.choices[0].text == "abcd"


def test_the_access_log_counts_the_prompt_of_an_echo_that_computes_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, logger = ModelHost({"tiny": partial(load_tiny, directory)}), logging.getLogger("echo")
    app = MiddlewareStack(create_app(host), Limits(), ApiKeys(), logger=logger)
    asked = {"model": "tiny", "prompt": "abcd", "max_tokens": 0, "echo": True}
    with caplog.at_level(logging.INFO, logger.name), serving(host, app) as url:
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        wait_until(lambda: len(caplog.messages) > 0)
    line = json.loads(caplog.messages[-1])
    counts = (line["prompt_tokens"], line["completion_tokens"])
    assert counts == (answer["usage"]["prompt_tokens"], 0)
    assert counts[0] > 0


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_waits_for_the_log_probabilities_of_its_own_prompt(
    client: OpenAI, max_tokens: int
) -> None:
    """The second prompt's take several steps, in which the first one is answered."""
    prompts = ["ab", "xyz" * 50]
    asked: Any = {"model": "tiny", "prompt": prompts, "max_tokens": max_tokens, "n": 2, "seed": 1}
    asked |= {"echo": True, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked).choices
    texts, scores = [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in client.completions.create(**asked, stream=True):
        (part,) = chunk.choices
        texts[part.index] += part.text
        if part.logprobs is not None:
            scores[part.index] += part.logprobs.token_logprobs
    assert texts == [each.text for each in whole]
    assert scores == [each.logprobs.token_logprobs for each in whole]  # type: ignore[union-attr]
    assert [text.startswith(prompts[index // 2]) for index, text in enumerate(texts)] == [True] * 4


def test_usage_reports_the_cached_tokens(client: OpenAI) -> None:
    prompt = list(range(40, 140))
    asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    cached = []
    for _ in range(2):
        usage = client.completions.create(**asked).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 96]  # whole blocks, and at least one token is computed
    salted = client.completions.create(**asked, extra_body={"cache_salt": "mine"}).usage
    assert salted is not None
    assert salted.prompt_tokens_details is not None
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_extras_reach_the_engine(client: OpenAI, llm: LLM) -> None:
    extras: dict[str, Any] = {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.3, "min_tokens": 4}
    answer = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=20,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"70": 2},
        top_p=0.9,
        extra_body={**extras, "stop_token_ids": [71], "skip_special_tokens": False, "priority": 1},
    )
    params = SamplingParams(
        max_tokens=20,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={70: 2},
        top_p=0.9,
        stop_token_ids=[71],
        skip_special_tokens=False,
        **extras,
    )
    wanted = llm.generate("abc", params)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        wanted.text,
        wanted.finish_reason,
    )


def test_a_final_message_can_be_continued(client: OpenAI, llm: LLM) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "No"}]}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=5,
        temperature=0,
        extra_body={"continue_final_message": True, "ignore_eos": True},
    )
    wanted = expected(llm, llm.chat_prompt(messages, continue_final_message=True), max_tokens=5)
    assert answer.choices[0].message.content == wanted.text


@pytest.mark.parametrize(
    ("asked", "error", "code", "named"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "other"),
        ({"prompt": [5] * 2000}, openai.BadRequestError, "context_length_exceeded", "2000"),
        ({"temperature": -1}, openai.BadRequestError, None, "temperature"),
        ({"best_of": 2}, openai.BadRequestError, None, "best_of"),
        ({"suffix": "x"}, openai.BadRequestError, None, "suffix"),
        ({"prompt": ""}, openai.BadRequestError, None, None),  # BOS makes it a prompt of one token
        ({"prompt": [99999]}, openai.BadRequestError, None, "99999"),
        ({"prompt": ["a", 5]}, openai.BadRequestError, None, "prompt 1"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, None, "logit_bias"),
        ({"max_tokens": 0}, openai.BadRequestError, None, "max_tokens"),
        ({"extra_body": {"min_token": 3}}, openai.BadRequestError, None, "min_token"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, None, "stream_opt"),
    ],
)
def test_errors_raise_the_clients_own_exceptions(
    client: OpenAI, asked: dict[str, Any], error: type[openai.APIStatusError], code: Any, named: Any
) -> None:
    whole: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 2} | asked
    if named is None:
        client.completions.create(**whole)
        return
    with pytest.raises(error) as caught:
        client.completions.create(**whole)
    assert named in caught.value.message
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"


def test_a_chat_names_unsupported_fields(client: OpenAI) -> None:
    refused: list[Any] = [
        {"tools": [{"type": "web_search"}]},
        {"response_format": {"type": "xml"}},
        {"store": True},
        {"modalities": ["text", "audio"]},
        {"top_logprobs": 2},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ]
    for asked in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | asked))
        name = next(iter(asked))
        assert name.removesuffix("s") in caught.value.message.lower(), asked


def test_a_list_that_is_too_short_is_reported_once(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[])
    assert "'messages': List should have at least 1 item, not []." in caught.value.message


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "minigen"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_client_that_times_out_or_is_cancelled_does_not_harm_the_server(url: str) -> None:
    async def play() -> str | None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            long: Any = {"model": "tiny", "prompt": "abc", "extra_body": {"ignore_eos": True}}
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(**long, timeout=0.1)
            task = asyncio.create_task(client.completions.create(**long))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = await client.completions.create(**long, stream=True)
            async for _ in stream:
                break
            await stream.close()
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
                    for _ in range(8)
                )
            )
            return answers[0].choices[0].message.content

    assert asyncio.run(play()) is not None


def test_tokens_of_text_and_of_messages_and_back(url: str, llm: LLM) -> None:
    with httpx.Client(base_url=url) as client:
        wanted = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert wanted["tokens"] == llm.tokenizer.encode("hé")
        assert (wanted["count"], wanted["max_model_len"]) == (4, 1024)
        assert wanted["token_strs"] == ["<s>", "h", "\ufffd", "\ufffd"]
        back = client.post("/detokenize", json={"tokens": wanted["tokens"]}).json()
        assert back == {"prompt": "<s>hé"}
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == llm.chat_prompt(MESSAGES)
        assert client.post("/tokenize", json={}).status_code == 400
        assert client.post("/detokenize", json={"tokens": [300]}).status_code == 400


def test_the_state_of_the_server_can_be_queried(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for path in ("/health", "/ready", "/version", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        missing = client.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (
            404,
            "invalid_request_error",
        )
        assert client.get("/v1/completions").status_code == 405
