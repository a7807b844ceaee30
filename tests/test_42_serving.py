"""A model in stages, or with a divided context, behind `minigen serve`."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from minigen import LLM, SamplingParams
from tests.ranks import PROMPTS
from tests.stages import save_five_layers
from tests.test_41_serving import SERVE, Server, serving
from tests.waiting import wait_until

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_five_layers(tmp_path_factory.mktemp("served"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """Return the answers of one process."""
    llm = LLM.load(model, weights="float32")
    outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), progress=False)
    return [each.text for each in outputs]


def answers_of(server: Server) -> list[str]:
    """Return the answers to all prompts, which are asked at once."""

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, **GREEDY}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def num_running(server: Server) -> float:
    page = httpx.get(server.url + "/metrics", timeout=60).text
    found = re.search(r"(?m)^\w+:num_requests_running(?:\{.*\})? (\S+)$", page)
    assert found, page
    return float(found[1])


@pytest.mark.parametrize("cut", ["context", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_served_cut_answers_as_one_process_though_a_client_leaves_and_ends_with_its_worker(
    model: Path, expected: list[str], cut: str
) -> None:
    """One server for all three, because its start takes most of the time."""
    with serving(model, *SERVE, f"--{cut}-parallel-size", "2") as server:
        assert answers_of(server) == expected
        stream = server.stream()
        assert next(stream)["choices"][0]["text"] is not None
        assert num_running(server) == 1
        stream.close()  # type: ignore[attr-defined]  # the client closes its connection
        wait_until(lambda: num_running(server) == 0)
        assert answers_of(server) == expected

        (worker,) = server.started
        stream = server.stream()
        next(stream)
        started = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        *texts, last = stream
        assert not any("error" in each for each in texts)
        assert last["error"]["code"] == "engine_stopped"
        assert server.ends_soon(started) == 1
    (error,) = [line for line in server.said if "SIGKILL" in line]
    assert re.match(rf"minigen: Rank 1 of 2 \(process {worker}\) was killed by SIGKILL", error)
    assert not any("Traceback" in line for line in server.said)
