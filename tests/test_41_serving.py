"""A split model behind `minigen serve`: its answers, and what clients get when it breaks."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from minigen import LLM, SamplingParams
from minigen.cli.main import main
from tests.processes import children_of, is_running
from tests.ranks import save_six_heads
from tests.waiting import wait_until

SOON = 5.0  # seconds
LONG = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True}
SERVE = ["-m", "minigen", "serve", "--weights", "float32", "--served-name", "tiny", "--port", "0"]
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "3"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
]
THREE = ["--tensor-parallel-size", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_six_heads(tmp_path_factory.mktemp("tiny"), 8192)


@dataclass
class Server:
    """A server in separate processes: the first process, all that it started, and its stderr."""

    process: "subprocess.Popen[str]"
    url: str
    started: list[int]
    said: list[str] = field(default_factory=list)

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yield each event of a long completion, until it ends for any reason."""
        with (
            suppress(httpx.RemoteProtocolError),
            httpx.stream(
                "POST", f"{self.url}/v1/completions", json={**LONG, "stream": True}, timeout=60
            ) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def ends_soon(self, started: float) -> int:
        """Return its status; fails if any of its processes runs some seconds after `started`."""
        status = self.process.wait(30)
        wait_until(lambda: not any(map(is_running, self.started)), 30)
        assert time.monotonic() - started < SOON
        return status


@contextmanager
def serving(model: Path, *command: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, *command, str(model)], stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stderr is not None
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    try:
        for line in process.stderr:
            said.append(line)
            if "Press Ctrl-C to stop" in line:
                break
        found = re.search(r"at (http://\S+)/v1", "".join(said))
        assert found, "".join(said)
        listener.start()
        yield Server(process, found[1], children_of(process.pid), said)
    finally:
        for each in [process.pid, *children_of(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
        if listener.ident is not None:
            listener.join()
        process.stderr.close()


@pytest.mark.long
@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["itself", "torchrun"])
def test_a_split_model_answers_openais_client_and_ends_on_sigterm(
    model: Path, starter: list[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = LLM.load(model, weights="float32").generate("abc", params).text
    with serving(model, *starter, *SERVE, *THREE) as server:
        assert len(server.started) == (2 if starter == [] else 3)
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "temperature": 0}
            whole = client.completions.create(**asked, max_tokens=20)
            chunks = client.completions.create(**asked, max_tokens=20, stream=True)
            assert whole.choices[0].text == expected
            assert "".join(each.choices[0].text for each in chunks) == expected
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = server.ends_soon(started)
    assert status == (0 if starter == [] else 1), "torchrun reports that it got a signal"


@pytest.mark.long
def test_a_worker_killed_in_mid_stream_is_one_error_to_each_client_and_the_servers_end(
    model: Path,
) -> None:
    with serving(model, *SERVE, *THREE) as server, ThreadPoolExecutor(1) as pool:
        stream = server.stream()
        assert next(stream)["choices"][0]["text"] is not None
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
        next(stream)
        started = time.monotonic()
        os.kill(server.started[1], signal.SIGKILL)
        *texts, last = stream
        assert not any("error" in each for each in texts)
        assert last["error"]["code"] == "engine_stopped"
        assert "process with a shard of the model has ended" in last["error"]["message"]
        assert waiting.result().status_code == 503
        assert waiting.result().json()["error"] == last["error"]
        assert server.ends_soon(started) == 1
    errors = [line for line in server.said if "SIGKILL" in line]
    assert len(errors) == 1
    assert re.match(r"minigen: Rank [12] of 3 \(process \d+\) was killed by SIGKILL", errors[0])
    assert not any("Traceback" in line for line in server.said)


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("by", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_however_the_server_is_ended_in_mid_stream_its_ranks_end(
    model: Path, by: signal.Signals, status: int
) -> None:
    with serving(model, *SERVE, *THREE, "--drain-timeout", "100ms") as server:
        stream = server.stream()
        next(stream)
        started = time.monotonic()
        server.process.send_signal(by)
        errors = [each["error"]["code"] for each in stream if "error" in each]
        assert server.ends_soon(started) == status
    assert errors == (["engine_stopped"] if status == 0 else [])
    assert not any("Traceback" in line for line in server.said)


@pytest.mark.long
def test_a_rank_killed_under_torchrun_ends_the_server_and_its_other_ranks(model: Path) -> None:
    with serving(model, *TORCHRUN, *SERVE, *THREE) as server:
        stream = server.stream()
        next(stream)
        started = time.monotonic()
        os.kill(server.started[2], signal.SIGKILL)
        *_, last = stream
        assert last["error"]["code"] == "engine_stopped"
        assert server.ends_soon(started) == 1


@pytest.mark.long
def test_an_idle_split_model_is_unloaded_with_its_processes_and_is_loaded_again(
    model: Path,
) -> None:
    asked = {"prompt": "abc", "max_tokens": 4}
    with serving(model, *SERVE, *THREE, "--keep-alive", "200ms") as server:
        wait_until(lambda: not children_of(server.process.pid))
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200
        wait_until(lambda: not children_of(server.process.pid))


@pytest.mark.parametrize("more", [["--keep-alive", "10m"], ["--model", "smollm2-135m"]])
def test_torchruns_ranks_follow_one_model_only(
    model: Path, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "41", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    command = ["minigen", "serve", str(model), "--tensor-parallel-size", "2", *more]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert "run one model until they end" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["generate", "abc", "-m"], ["chat", "-m"]])
def test_a_model_in_one_process_is_refused_to_several_ranks(
    model: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "41", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["minigen", *command, str(model)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "torchrun started 2 ranks" in error
    assert "set tensor_parallel_size or another parallel size to 2" in error
