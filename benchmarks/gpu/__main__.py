"""Check and time everything on this machine's GPU: `python -m benchmarks.gpu [--json FILE]`.

Needs torch with CUDA, triton, numpy, safetensors, tokenizers, pytest; transformers for the
comparison. Each part's results are written as soon as they are there; a part that fails says so
in its place, and the exit code tells.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels, timing, workloads

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """The card, its driver, and the versions of what was measured."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    packages = ("torch", "triton", "numpy")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def kernels_equal_twins() -> dict[str, Any]:
    """The checks of `make test-gpu`, in a process of their own."""
    command = (sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini")
    files = [str(each) for each in sorted((ROOT / "tests" / "gpu").glob("equal_*.py"))]
    told = subprocess.run([*command, *files], cwd=ROOT, capture_output=True)
    lines = told.stdout.decode().strip().splitlines()
    if told.returncode:
        raise AssertionError("\n".join(lines[-40:]))
    return {"told": lines[-1]}


def against_transformers(ours: float) -> dict[str, Any]:
    """transformers one at a time and in a static batch; the ratio is to the faster."""
    if find_spec("transformers") is None:
        return {"left out": "transformers is not installed"}
    found = [workloads.transformers_streams(1, 128), workloads.transformers_streams(32, 1024)]
    fastest = max(each["output_tokens_a_second"] for each in found)
    return {
        "transformers": version("transformers"),
        "one_at_a_time": found[0],
        "batched": found[1],
        "ratio": ours / fastest,
        "ratio_to_one_at_a_time": ours / found[0]["output_tokens_a_second"],
    }


class Record:
    """Results by part, written to a file after each."""

    def __init__(self, path: Path):
        self.path, self.failed = path, 0
        self.results: dict[str, Any] = {"environment": environment()}

    def measure(self, name: str, part: Callable[[], Any]) -> Any:
        """Run a part, keep what it returns or how it failed, and write all down."""
        begun = time.perf_counter()
        try:
            self.results[name] = part()
        except Exception as error:
            traceback.print_exc()
            self.failed += 1
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        gc.collect()
        torch.cuda.empty_cache()
        spent = time.perf_counter() - begun
        print(f"{name} ({spent:.0f} s): {json.dumps(self.results[name])}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=2) + "\n", encoding="utf-8")
        return self.results[name]


def main() -> None:
    """All parts, those that checks rest on first."""
    folder = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=folder / "gpu.json", metavar="FILE")
    path = parser.parse_args().json
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs an NVIDIA GPU; torch finds none.")
    record = Record(path)
    record.measure("kernels_equal_twins", kernels_equal_twins)
    bandwidth = record.measure("copy_bandwidth", timing.copy_bandwidth)
    for batch, context in ((64, 4096), (1, 32_768), (8, 1024)):
        name = f"decode_{batch}_{context}"
        record.measure(name, lambda b=batch, c=context: kernels.decode(b, c, bandwidth))
    for length in (1024, 4096, 16_384):
        record.measure(f"prefill_{length}", lambda n=length: kernels.prefill(n))
    record.measure("agreement", workloads.agreement)
    record.measure("one_stream", lambda: workloads.one_stream(bandwidth))
    many = record.measure("many_streams", workloads.many_streams)
    ours = many.get("output_tokens_a_second", 0.0)
    record.measure("against_transformers", lambda: against_transformers(ours))
    sys.exit(1 if record.failed else 0)


if __name__ == "__main__":
    main()
