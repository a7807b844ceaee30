"""`minigen serve`: its banner, its errors, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from minigen import SamplingParams
from minigen.config import parse_seconds
from minigen.errors import OptionError
from tests.processes import workers_of
from tests.serving import load_tiny, save_tiny
from tests.waiting import PATIENCE

LONG = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "minigen", "serve", *map(str, arguments)]


@contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Run a server in a separate process; yield the process, its address, and its stderr."""
    process = subprocess.Popen(
        command(*arguments, "--port", "0"), stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "Press Ctrl-C to stop" in line:
                break
        found = re.search(r"at (http://\S+)/v1", "".join(said))
        assert found, said
        listener = threading.Thread(target=lambda: said.extend(process.stderr or ()))
        listener.start()
        yield process, found[1], said
        process.wait(PATIENCE)
        listener.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def lines_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_a_signal_finishes_running_requests_refuses_new_ones_and_ends_cleanly(model: Path) -> None:
    options = ["--served-name", "tiny", "--weights", "float32", "--drain-timeout", "60s"]
    with served(model, *options) as (process, url, said), httpx.Client(base_url=url) as client:
        with client.stream("POST", "/v1/completions", json=LONG, timeout=60) as response:
            lines = lines_of(response)
            next(lines)
            process.send_signal(signal.SIGTERM)
            refused = wait_for_refusal(url)
            *_, last = lines
            assert last["choices"][0]["finish_reason"] == "length"
        assert refused.json()["error"]["code"] == "server_draining"
        assert int(refused.headers["retry-after"]) > 0
    assert process.returncode == 0
    assert any("curl http://127.0.0.1" in line for line in said)


PARTS = Path(__file__).parent / "foreign_parts.py"


def test_a_learners_parts_serve_openais_client_from_their_files(
    model: Path, tmp_path: Path
) -> None:
    counted = tmp_path / "mine.py"
    marker = "print('MINE', file=__import__('sys').stderr, flush=True)"
    add = "self.waiting.append(sequence)"
    counted.write_text(PARTS.read_text("utf-8").replace(add, f"{add}; {marker}"), encoding="utf-8")
    parts = [
        *("--scheduler", f"{counted}:QueueScheduler", "--allocator", f"{counted}:LowestFirst"),
        *("--prefix-cache", f"{counted}:HashChain", "--sampler", f"{counted}:likeliest"),
        *("--attention-backend", f"{counted}:plain_attention"),
    ]
    options = ["--served-name", "tiny", "--weights", "float32", "--no-access-log", *parts]
    with served(model, *options) as (process, url, said):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(
                model="tiny", prompt="abc", max_tokens=12, stream=True, temperature=0
            )
            text = "".join(chunk.choices[0].text for chunk in chunks)
        process.send_signal(signal.SIGTERM)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert text == load_tiny(model).generate("abc", params).text
    assert said.count("MINE\n") >= 2  # to be warm, and for the client


def wait_for_refusal(url: str) -> httpx.Response:
    while True:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        if answer.status_code == 503:
            assert httpx.get(f"{url}/ready").status_code == 503
            assert httpx.get(f"{url}/health").status_code == 200
            return answer


def test_requests_that_take_too_long_to_finish_get_an_error(model: Path) -> None:
    with served(model, "--weights", "float32", "--drain-timeout", "10ms") as (process, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as response:
            lines = lines_of(response)
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert last["error"]["code"] == "engine_stopped"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["./no-such-model"], "There is no file or folder no-such-model"),
        (["--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
        (["--port", "70000"], "cannot listen"),
    ],
)
def test_an_error_at_startup_is_one_sentence(arguments: list[str], named: str) -> None:
    ended = subprocess.run(
        command(*arguments), capture_output=True, encoding="utf-8", timeout=60, env={**os.environ}
    )
    assert ended.returncode == 1
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken_is_named() -> None:
    from minigen.server.run import listen

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_a_response_in_two_packets_does_not_wait_for_an_acknowledgement() -> None:
    from minigen.server.run import listen

    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_command_line_does_not_load_the_server() -> None:
    script = (
        "import sys, minigen.cli.main\n"
        "print([name for name in ('fastapi', 'uvicorn', 'pydantic') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8")
    assert ended.stdout == "[]\n", ended.stderr


def test_durations_are_parsed() -> None:
    assert [parse_seconds("x", each) for each in ("90", "250ms", "1.5h")] == [90, 0.25, 5400]
    for wrong in ("", "ten", "-1s", "1d"):
        with pytest.raises(OptionError, match="x must be a time"):
            parse_seconds("x", wrong)


def test_keys_come_from_a_file_or_the_environment_and_requests_are_logged_as_json(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("# one a line\nfrom-a-file\n", encoding="utf-8")
    monkeypatch.setenv("MINIGEN_API_KEY", "from-the-environment")
    options = ["--served-name", "tiny", "--weights", "float32", "--api-key-file", path]
    with served(model, *options) as (process, url, said):
        asked = {"prompt": "the secret of mine", "max_tokens": 3, "ignore_eos": True}
        statuses = {}
        for key in ("from-a-file", "from-the-environment", "from-nowhere"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"asks-{key}"}
            answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers)
            statuses[key] = answer.status_code
            assert answer.headers["x-request-id"] == f"asks-{key}"
        process.send_signal(signal.SIGTERM)
    assert statuses == {"from-a-file": 200, "from-the-environment": 200, "from-nowhere": 401}
    lines = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["status"] for line in lines] == [200, 200, 401]
    assert lines[0]["model"] == "tiny"
    assert lines[0]["completion_tokens"] == 3
    assert lines[0]["prompt_tokens"] == 1 + len("the secret of mine")
    assert lines[1]["cached_tokens"] > 0
    assert not any("secret" in line or "Bearer" in line for line in said)
    assert lines[0]["key"] != lines[1]["key"] is not None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--keep-alive", "soon"], "keep_alive must be a time"),
        (["--model", "a", "--model", "a"], "Two models have the same name"),
        (["--model", "a", "--served-name", "x", "--served-name", "y"], "1 models but 2"),
        (["--max-body", "much"], "max_body must be a number of bytes"),
        (["--request-timeout", "0"], "request_timeout must be a number of seconds above 0"),
        (["--max-in-flight", "0"], "max_in_flight must be a whole number"),
        (["--max-n", "129"], "max_n must be a whole number from 1 to 128"),
        (["--max-in-flight-per-key", "2"], "max_in_flight_per_key needs API keys"),
        (["--cors-origin", "localhost"], 'An origin must be "*", or'),
        (["--api-key-file", "no-such-file"], "API keys cannot be read"),
        (["--api-key", "se cret"], "API key 1 must be"),
        (["--log-level", "loud"], "log_level must be one of"),
    ],
)
def test_an_impossible_option_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    named: str,
) -> None:
    from minigen.cli.main import main

    monkeypatch.setattr("minigen.server.run.run", lambda *_: pytest.fail("it is served"))
    monkeypatch.setattr(sys, "argv", ["minigen", "serve", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert "cret" not in said


def test_a_server_whose_model_lost_a_process_fails_the_next_request_and_ends(model: Path) -> None:
    asked = {"prompt": "abc", "max_tokens": 4}
    split = ("--weights", "float32", "--tensor-parallel-size", "2")
    with served(model, *split) as (process, url, said):
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        lost = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
        assert lost.status_code == 503
        assert lost.json()["error"]["code"] == "engine_stopped"
        assert "A process with a shard of the model has ended" in lost.text
    assert process.returncode == 1
    (why,) = (line for line in said if "SIGKILL" in line)
    assert why.startswith(f"minigen: Rank 1 of 2 (process {worker}) was killed by SIGKILL")
    assert not any("Traceback" in line for line in said)
