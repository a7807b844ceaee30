"""The parts measured on a GPU, in order: first the basis of the checks, last the riskiest."""

import gc
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.gpu import kernels, ranks, timing, workloads
from benchmarks.gpu.engines import LLAMA_3_8B, QWEN3_0_6B
from benchmarks.gpu.supervised import Part, Results

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 300  # time limit of one part
# Targets, as shares of what the same card gives or as multiples of what other engines reach on it.
TARGETS = {
    ("decode_64_4096", "of_copy_bandwidth"): 0.8,
    ("prefill_1024", "of_torch"): 0.6,
    ("prefill_4096", "of_torch"): 0.6,
    ("prefill_16384", "of_torch"): 0.6,
    ("one_stream", "of_limit"): 0.8,
    ("against_transformers", "ratio"): 15.0,
}


def environment(results: Results) -> dict[str, Any]:
    """Return the card, its driver, and the versions that were measured."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "cores": os.cpu_count(),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, encoding="utf-8").stdout.split("\n")[0]
    except OSError as error:
        return f"unknown: {error}"


def kernels_equal_twins(results: Results) -> dict[str, Any]:
    """Run the checks of `make test-gpu` in a separate process."""
    command = (sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini")
    files = [str(each) for each in sorted((ROOT / "tests" / "gpu").glob("equal_*.py"))]
    finished = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, timeout=MOST_SECONDS - 10
    )
    lines = finished.stdout.decode().strip().splitlines()
    if finished.returncode:
        raise AssertionError(
            "\n".join([*lines[-40:], *finished.stderr.decode().splitlines()[-10:]])
        )
    return {"pytest": lines[-1]}


def bandwidth_of(results: Results) -> float | None:
    """Return the copy bandwidth, if it could be measured."""
    found = results.get("copy_bandwidth")
    return found if isinstance(found, float) else None


def _decode(batch: int, context: int, results: Results) -> dict[str, Any]:
    return kernels.decode(batch, context, bandwidth_of(results))


def _against_transformers(results: Results) -> dict[str, Any]:
    ways = ("one_at_a_time", "batched", "compiled")
    theirs = [results[f"transformers_{way}"] for way in ways]
    return workloads.against_transformers(results["many_streams"], theirs)


def parts() -> dict[str, Part]:
    """Return all parts by name, in order."""
    decodes = ((64, 4096), (1, 32_768), (8, 1024))
    return {
        "environment": environment,
        "copy_bandwidth": lambda results: timing.copy_bandwidth(),
        **{f"decode_{b}_{c}": partial(_decode, b, c) for b, c in decodes},
        **{
            f"prefill_{length}": lambda results, length=length: kernels.prefill(length)
            for length in (1024, 4096, 16_384)
        },
        "agreement": lambda results: workloads.agreement(),
        "one_stream": lambda results: workloads.one_stream(bandwidth_of(results)),
        "many_streams": lambda results: workloads.many_streams(),
        "transformers_one_at_a_time": lambda results: workloads.transformers_streams(1, 128),
        "transformers_batched": lambda results: workloads.transformers_streams(32, 1024),
        "transformers_compiled": lambda results: workloads.transformers_streams(32, 1024, True),
        "against_transformers": _against_transformers,
        "kernels_equal_twins": kernels_equal_twins,
        "products_of_one_row": lambda results: kernels.products_of_one_row(
            LLAMA_3_8B, bandwidth_of(results)
        ),
        "group_of_one_rank": lambda results: ranks.group_of_one(),
        "two_gpus": lambda results: ranks.two_gpus(),
        "where_one_stream_goes": lambda results: workloads.where_time_goes(LLAMA_3_8B, 1, 512),
        "where_many_streams_go": lambda results: workloads.where_time_goes(QWEN3_0_6B, 256, 560),
    }


def beside_targets(results: Results) -> list[str]:
    """Return a line for each target: the target and the measured value."""
    lines = []
    for (name, what), wanted in TARGETS.items():
        found = results.get(name)
        value = found.get(what) if isinstance(found, dict) else None
        shown = "not measured" if value is None else f"{value:.2f}"
        lines.append(f"{name}, {what}: {wanted} wanted, {shown}")
    return lines


def tidy() -> None:
    """Free the device's memory; raises if this process can no longer use the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
