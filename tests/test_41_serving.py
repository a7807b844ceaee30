"""A split model behind `minigen serve`, with workers of its own or of torchrun."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from minigen import SamplingParams
from tests.processes import children_of, is_running, wait_until
from tests.serving import load_tiny, save_tiny

TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
]
SERVE = ["-m", "minigen", "serve", "--weights", "float32", "--tensor-parallel", "2", "--port", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@contextmanager
def served(*command: str) -> Iterator[str]:
    """The address of a server in other processes, none of which is left at the end."""
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if "Ctrl-C ends it" in line:
                break
        found = re.search(r"at (http://\S+)/v1", "".join(said))
        assert found, "".join(said)
        started = children_of(process.pid)
        assert started
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        wait_until(lambda: not any(map(is_running, started)), 10)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("command", [SERVE, [*TORCHRUN, *SERVE]], ids=["itself", "torchrun"])
def test_a_split_model_answers_openais_client(model: Path, command: list[str]) -> None:
    expected = load_tiny(model).generate("abc", SamplingParams(temperature=0, max_tokens=20))
    with (
        served(*command, str(model), "--served-name", "tiny") as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for stream in (False, True):
            answer = client.completions.create(
                model="tiny", prompt="abc", max_tokens=20, temperature=0, stream=stream
            )
            chunks = answer if stream else [answer]
            assert "".join(each.choices[0].text for each in chunks) == expected.text
