"""The benchmark for GPUs on a machine without one: its requirements, and the cost of a failure."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.supervised import NO_TIME, measure, read, supervise, write
from minigen.assembly import cuda
from minigen.config import EngineConfig
from minigen.trace.events import Trace
from tests.gpu.processes import ROOT, run_python

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")
# Packages that minigen or its tests import, but that a machine with torch and Triton may lack.
MISSING = (
    "gguf jinja2 huggingface_hub filelock platformdirs jaxtyping typer rich numba llvmlite regex "
    "fastapi uvicorn pydantic prometheus_client aiohttp matplotlib psutil cloudpickle beartype "
    "transformers hypothesis scipy sentencepiece openai"
).split()
REFUSING = f"""
import sys, torch, triton, safetensors.torch, tokenizers, pytest, numpy
torch.testing, torch.nn.functional, torch.profiler
for name in [name for name in sys.modules if name.split(".")[0] in {MISSING}]:
    del sys.modules[name]
from importlib.machinery import PathFinder
class Refused:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in {MISSING}:
            return None
        stand_in = PathFinder.find_spec(name, [each for each in sys.path if "stand_ins" in each])
        if stand_in is None:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
        return stand_in
sys.meta_path.insert(0, Refused)
import benchmarks.gpu.parts
import tests.gpu.equal_twins, tests.gpu.equal_decode, tests.gpu.equal_prefill
import tests.gpu.equal_engine, tests.gpu.equal_ranks, tests.gpu.equal_shares
import tests.gpu.equal_two_gpus
print(*benchmarks.gpu.parts.parts())
"""


@needs_triton
def test_checks_and_benchmark_need_only_torch_triton_and_readers_of_weights() -> None:
    for each in (ROOT / "tests" / "gpu").glob("equal_*.py"):
        assert f"tests.gpu.{each.stem}" in REFUSING, "each is imported here"
    assert "many_streams" in run_python("-c", REFUSING).split()


PARTS = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.supervised import measure

def raises(results): raise ValueError("one fails")
def ends(results): os._exit(3)
def hangs(results): time.sleep(60)
def tidy():
    if "spoilt" in sys.argv: sys.exit(5)

parts = {
    "first": lambda results: 1.5,
    "raises": raises,
    "ends": ends,
    "hangs": hangs,
    "last": lambda results: sorted(results),
}
measure(Path(sys.argv[1]), parts, time.time() + 60, 1.0, tidy)
"""


@pytest.mark.parametrize("words", [[], ["spoilt"]])
def test_a_part_that_fails_ends_or_hangs_does_not_cost_other_results(
    words: list[str], tmp_path: Path
) -> None:
    path, names = tmp_path / "results.json", ["first", "raises", "ends", "hangs", "last"]
    path.write_text('{"last": "of another day"}', encoding="utf-8")

    def start() -> int:
        command = [sys.executable, "-c", PARTS, str(path), *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode

    assert supervise(path, names, start) == ["raises", "ends", "hangs"]
    found = json.loads(path.read_text("utf-8"))
    assert found["first"] == 1.5
    assert found["raises"] == {"failed": "ValueError: one fails"}
    assert found["last"] == ["ends", "first", "hangs", "last", "raises"]


def test_a_process_that_never_measures_is_not_restarted_forever(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert supervise(path, ["first"], lambda: 7) == ["first"]
    assert "status 7" in read(path)["first"]["failed"]


def test_no_part_starts_after_the_time_limit(tmp_path: Path) -> None:
    path, parts = tmp_path / "results.json", dict.fromkeys(["first", "second"], len)
    write(path, "first", 1)
    measure(path, parts, time.time() - 1, 9, list)
    assert read(path) == {"first": 1, "second": NO_TIME}


@needs_triton
def test_the_cache_uses_the_memory_that_weights_and_a_step_leave_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 10**9, 25 * 10**9))
    config = SimpleNamespace(
        ffn=100, hidden=50, q_heads=4, head_dim=10, vocab_size=1000, max_positions=2000
    )
    checkpoint = SimpleNamespace(config=config, num_parameters=8 * 10**9)
    options = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048, device="cuda")
    found = cuda.plan(checkpoint, options, Trace()).default_kv_bytes
    assert emptied, "torch's cached memory counts as free, too"
    assert 0.8 * 8 * 10**9 < found < 8 * 10**9
    small = SimpleNamespace(config=config, num_parameters=13 * 10**9)
    assert cuda.plan(small, options, Trace()).default_kv_bytes == 0
