"""The default model behind the server, through OpenAI's client: the text of the engine."""

from typing import Any

import pytest
from openai import OpenAI

from minigen import LLM, SamplingParams
from minigen.server.models import ModelHost
from tests.serving import serving

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is gravity?",
    "Write 'hello' in Japanese, Greek and Arabic.",
    "Name an emoji 🙂.",
]


def test_answers_over_http_are_the_engines(default_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n\n"])
    messages: list[Any] = [[{"role": "user", "content": each}] for each in QUESTIONS]
    expected = [default_llm.chat(each, params) for each in messages]
    host = ModelHost({"smollm2-135m": lambda: default_llm})
    with serving(host) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for each, wanted in zip(messages, expected, strict=True):
            asked: Any = {
                "model": "smollm2-135m",
                "messages": each,
                "temperature": 0,
                "max_tokens": 24,
                "stop": "\n\n",
            }
            answer = client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == wanted.text
            assert answer.choices[0].finish_reason == wanted.finish_reason
            pieces = [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(**asked, stream=True)
            ]
            assert "".join(pieces) == wanted.text
            assert len(pieces) > 5
            assert not any("\ufffd" in piece for piece in pieces)
