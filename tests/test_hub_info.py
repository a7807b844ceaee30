"""`minigen info` describes a model on the hub from its headers, as if it was on this disk."""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import gguf_files
from tests.fake_hub import FakeHub, serve
from tests.test_hub import hub_environment
from tests.tiny import TINY_VOCAB, make_model, save_model, save_tokenizer

VOCAB = 20_000  # the weights are then 100 times as long as all headers
INFO = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from minigen.cli import main as cli
answers = []
for name in sys.argv[1:]:
    sys.argv = ["minigen", "info", name]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, str]:
        """The rows of the first table, by label."""
        rows = re.findall(
            r"^(\w[\w, ]*?)  +(\S.*?) *$", self.out.split("\nmemory")[0], re.MULTILINE
        )
        return dict(rows)

    @property
    def memory(self) -> str:
        return self.out.partition("\nmemory")[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 MB with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "llama", vocab_size=VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with serve() as fake:
        yield fake


@pytest.fixture
def ask(server: FakeHub, tmp_path: Path) -> Any:
    def ask(*names: str, **environment: str) -> list[Answer]:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", INFO, *names],
            capture_output=True,
            encoding="utf-8",
            env=hub_environment(server.url, tmp_path / "hf") | {"COLUMNS": "200"} | environment,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        return [Answer(*each) for each in json.loads(run.stdout)]

    return ask


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights_served(server: FakeHub) -> list[str | None]:
    """The ranges in which files with weights were requested."""
    return [
        wanted
        for method, path, wanted in server.requests
        if path.endswith((".safetensors", ".gguf")) and method == "GET"
    ]


def test_a_model_on_the_hub_is_described_as_on_disk_from_a_hundredth_of_its_bytes(
    server: FakeHub, ask: Any, folder: Path, tmp_path: Path
) -> None:
    commit = server.commit("org/model", files_of(folder), "main")
    there, here = ask("org/model", str(folder))
    assert there.status == here.status == 0, there.err
    assert there.facts | {"model": "", "path": ""} == here.facts | {"model": "", "path": ""}
    assert there.facts["path"] == f"not downloaded; commit {commit}"
    assert there.facts["runs"] == "yes"
    assert there.memory == here.memory
    assert weights_served(server) == ["bytes=0-65535"]
    assert server.num_body_bytes < 80_000 < (folder / "model.safetensors").stat().st_size / 50
    assert not server.paths("tokenizer.json")
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.suffix == ".safetensors"]


def test_a_sharded_model_is_described_by_the_headers_of_its_shards(
    server: FakeHub, ask: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    save_model(folder, "qwen3", max_shard_size="3MB", vocab_size=VOCAB)
    files = files_of(folder)
    num_shards = sum(name.endswith(".safetensors") for name in files)
    assert num_shards > 1
    server.commit("org/sharded", files, "main")
    there, here = ask("org/sharded", str(folder))
    assert there.facts["stored as"] == here.facts["stored as"]
    assert there.facts["parameters"] == here.facts["parameters"]
    assert weights_served(server) == ["bytes=0-65535"] * num_shards


def test_a_long_header_is_requested_in_two_parts(server: FakeHub, ask: Any, folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    longer = content[8 : 8 + length].ljust(100_000)  # JSON may end with spaces
    weights = struct.pack("<Q", len(longer)) + longer + content[8 + length :]
    server.commit("org/long", files_of(folder) | {"model.safetensors": weights}, "main")
    (there,) = ask("org/long")
    assert there.facts["runs"] == "yes", there.err
    assert weights_served(server) == ["bytes=0-65535", "bytes=65536-100007"]


def test_a_hub_that_ignores_ranges_gives_the_same_facts(
    server: FakeHub, ask: Any, folder: Path
) -> None:
    server.commit("org/model", files_of(folder), "main")
    server.honours_ranges = False
    there, here = ask("org/model", str(folder))
    assert there.facts | {"model": "", "path": ""} == here.facts | {"model": "", "path": ""}


def test_a_gguf_on_the_hub_is_described_by_its_header(
    server: FakeHub, ask: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    gguf_files.write_model(path, make_model("llama", vocab_size=VOCAB))
    assert path.stat().st_size > 2**22
    server.commit("org/gguf", {"q4/a.gguf": path.read_bytes()}, "main")
    there, here = ask("org/gguf/q4/a.gguf", str(path))
    assert there.status == 0, there.err
    assert there.facts | {"model": "", "path": ""} == here.facts | {"model": "", "path": ""}
    assert there.memory == here.memory
    assert weights_served(server) == ["bytes=0-1048575"]


def test_a_gguf_with_a_long_vocabulary_takes_further_ranges(
    server: FakeHub, ask: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    words = ["x" * 100 + str(number) for number in range(VOCAB)]
    changes = {"tokenizer.ggml.tokens": words}
    gguf_files.write_model(path, make_model("llama", vocab_size=VOCAB), changes)
    server.commit("org/gguf", {"a.gguf": path.read_bytes()}, "main")
    (there,) = ask("org/gguf/a.gguf")
    assert there.facts["runs"] == "yes", there.err
    assert weights_served(server) == [
        "bytes=0-1048575",
        "bytes=1048576-2097151",
        "bytes=2097152-4194303",
    ]


def test_what_minigen_cannot_run_is_described_and_refused_as_on_disk(
    server: FakeHub, ask: Any, folder: Path, tmp_path: Path
) -> None:
    files = files_of(folder)
    config = json.loads(files["config.json"])
    tensors = load_file(folder / "model.safetensors")
    float8 = {name: each.to(torch.float8_e4m3fn) for name, each in tensors.items()}
    save_file(float8, tmp_path / "float8.safetensors")
    refused = {
        "other": {"config.json": json.dumps(config | {"model_type": "mamba"}).encode()},
        "quantised": {"config.json": json.dumps(config | {"quantization_config": {}}).encode()},
        "deeper": {"config.json": json.dumps(config | {"num_hidden_layers": 4}).encode()},
        "float8": {"model.safetensors": (tmp_path / "float8.safetensors").read_bytes()},
        "short": {"model.safetensors": files["model.safetensors"][:-1]},
    }
    for name, changes in refused.items():
        server.commit(f"org/{name}", files | changes, "main")
        (tmp_path / name).mkdir()
        for file_name, content in (files | changes).items():
            (tmp_path / name / file_name).write_bytes(content)
    found = ask(*(f"org/{name}" for name in refused), *(str(tmp_path / name) for name in refused))
    there, here = (
        dict(zip(refused, answers, strict=True))
        for answers in (found[: len(refused)], found[len(refused) :])
    )
    num_parameters = f"{sum(each.numel() for each in tensors.values()):,}"
    for name in refused:
        assert there[name].status == here[name].status == 1
        assert there[name].facts["runs"] == here[name].facts["runs"] == "no"
        assert there[name].facts["parameters"] == num_parameters
        assert there[name].err.startswith("minigen: org/"), there[name].err
        assert there[name].err.count("\n") == 1
    for name in ("other", "quantised", "deeper"):
        assert there[name].err == here[name].err.replace(str(tmp_path), "org")
        assert there[name].facts["stored as"].startswith("safetensors (F32), 8")
    assert there["other"].facts["architecture"] == "mamba"
    assert "is stored as F8_E4M3; minigen reads F32, F16 and BF16" in there["float8"].err
    assert there["float8"].facts["stored as"].startswith("safetensors (F8_E4M3), 2")
    assert "is not a valid safetensors file: its tensors end at byte" in there["short"].err


def test_a_broken_header_is_one_sentence(server: FakeHub, ask: Any, folder: Path) -> None:
    numbered = b'{"w": {"dtype": 5, "shape": [1], "data_offsets": [0, 1]}}'
    broken = {
        b"\xff" * 8: "its header claims",
        struct.pack("<Q", 4) + b"[1]]": "is not a valid safetensors file",
        struct.pack("<Q", 2) + b"[]": "its header is no object",
        struct.pack("<Q", 9) + b'{"w": [1]': "is not a valid safetensors file",
        struct.pack("<Q", 13) + b'{"w": "F32"} ': "is not a valid safetensors file",
        b"": "its header claims 0 bytes",
        struct.pack("<Q", len(numbered)) + numbered + b"0": "w is stored as 5",
    }
    for number, header in enumerate(broken):
        files = files_of(folder) | {"model.safetensors": header}
        server.commit(f"org/broken{number}", files, "main")
    found = ask(*(f"org/broken{number}" for number in range(len(broken))))
    for number, (there, words) in enumerate(zip(found, broken.values(), strict=True)):
        assert there.status == 1
        assert words in there.err
        assert there.err.startswith(f"minigen: org/broken{number}/model.safetensors")
        assert there.err.count("\n") == 1


def test_a_revision_is_described(server: FakeHub, ask: Any, folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", "qwen2", vocab_size=TINY_VOCAB)
    server.commit("org/model", files_of(folder), "main")
    commit = server.commit("org/model", files_of(tmp_path / "other"), "v1")
    server.after_resolving = lambda: server.commit("org/model", files_of(folder), "v1")
    (there,) = ask("org/model@v1")
    assert there.facts["architecture"] == "qwen2"
    assert there.facts["path"].endswith(commit)


def test_a_model_in_the_cache_is_described_without_network(
    server: FakeHub, ask: Any, folder: Path, tmp_path: Path
) -> None:
    server.commit("org/model", files_of(folder), "main")
    settings = hub_environment(server.url, tmp_path / "hf")
    pull = "from minigen import hub; hub.pull('org/model')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", pull], env=settings, check=True)
    num_requests = len(server.requests)
    (there,) = ask("org/model")
    assert there.facts["runs"] == "yes"
    assert str(tmp_path / "hf") in there.facts["path"]
    assert len(server.requests) == num_requests


def test_what_is_no_model_is_one_sentence_as_for_a_pull(server: FakeHub, ask: Any) -> None:
    server.commit("org/ggufs", {"a.gguf": b"GGUF", "README.md": b""}, "main")
    server.commit("org/torch", {"config.json": b"{}", "pytorch_model.bin": b""}, "main")
    server.commit("org/text", {"a.gguf": b"no model" * 10}, "main")
    server.statuses = {"/api/models/org/gated": 403}
    names = ("org/ggufs", "org/torch", "org/nothing", "org/ggufs/c.gguf", "org/gated")
    names = (*names, "org/ggufs@v9", "org/text/a.gguf")
    words = (
        "holds GGUF files only; write org/ggufs/FILE, where FILE is one of a.gguf",
        "org/torch holds no model that minigen reads",
        "org/nothing is neither here nor a model",
        "org/ggufs holds no c.gguf; write org/ggufs/FILE",
        "org/gated is gated: accept its terms",
        "org/ggufs has no branch, tag or commit 'v9'",
        "org/text/a.gguf is not a GGUF file",
    )
    for found, part in zip(ask(*names), words, strict=True):
        assert part in found.err
        assert found.err.count("\n") == 1
        assert found.status == 1


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_hub_out_of_reach_is_one_sentence(ask: Any, environment: dict[str, str]) -> None:
    (found,) = ask("org/model", **environment)
    assert "is not in the cache and the hub could not be reached" in found.err
    assert found.err.count("\n") == 1


def test_a_token_is_sent(server: FakeHub, ask: Any, folder: Path) -> None:
    server.commit("org/private", files_of(folder), "main")
    server.account = "Bearer hf_secret"
    (found,) = ask("org/private", HF_TOKEN="hf_secret")
    assert found.facts["runs"] == "yes", found.err
    assert os.environ.get("HF_TOKEN") is None
