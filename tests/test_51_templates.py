"""What clients may send to a model's chat template, and what a hanging one costs them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from minigen.server.models import ModelHost
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.tiny import save_tokenizer
from tests.waiting import PATIENCE, wait_until

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if loud %}!!!{% endif %}"
    "{% if slow %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("tiny"))
    save_tokenizer(directory, TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelHost:
    return ModelHost({"tiny": partial(load_tiny, directory)})


@pytest.fixture(scope="module")
def client(host: ModelHost) -> Iterator[httpx.Client]:
    with serving(host) as url, httpx.Client(base_url=url, timeout=3 * PATIENCE) as client:
        yield client


def ask(client: httpx.Client, **variables: object) -> httpx.Response:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 1,
        "chat_template_kwargs": variables,
    }
    return client.post("/v1/chat/completions", json=asked)


def test_a_client_may_set_a_name_that_the_template_reads(client: httpx.Client) -> None:
    plain, loud = ask(client), ask(client, loud=True)
    counts = [answer.json()["usage"]["prompt_tokens"] for answer in (plain, loud)]
    assert counts[1] == counts[0] + len("!!!")


@pytest.mark.parametrize(
    "name", ["bos_token", "eos_token", "pad_token", "messages", "lowd", "self"]
)
def test_a_client_may_set_no_other_name(client: httpx.Client, name: str) -> None:
    answer = ask(client, **{name: "<x>", "loud": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert answer.json()["error"]["message"] == (
        f"chat_template_kwargs cannot set {name!r}: clients may set only loud, slow of the "
        "variables in this model's chat template."
    )


def test_a_hanging_template_fails_only_its_own_request(
    client: httpx.Client, host: ModelHost
) -> None:
    hanging = ask(client, slow=True)
    assert hanging.status_code == 400
    assert "computes for more than 2 seconds" in hanging.json()["error"]["message"]
    assert ask(client).status_code == 200
    wait_until(lambda: is_empty(engine_of(host)))
