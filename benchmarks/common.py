"""What every benchmark needs: facts about the machine, and fair turns for compared calls."""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minigen import LLM
from minigen.hardware import cpu_name, num_cores

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for `tests`, when a benchmark runs by its path

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "gguf",
    "safetensors",
    "tokenizers",
    "transformers",
    "llama-cpp-python",
    "llguidance",
    "jsonschema",
)


def environment() -> dict[str, Any]:
    """Return the machine and the versions that were measured; no date, no path, no user."""
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: found for package in PACKAGES if (found := _version(package)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def interleaved(
    functions: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of each call, by turns, so that a slow minute affects all of them.

    One call of each goes before and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def check_compiled(llm: LLM) -> None:
    """Exit with a sentence if a model's steps are not compiled: their kernels are compiled once."""
    runner = llm.describe()["runner"]
    if not runner.startswith("a whole step compiled"):
        sys.exit(f"Compile the kernels first (minigen compile): the runner is {runner}.")


def random_prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of ordinary tokens (no special ones) that share no prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(num_tokens)] for _ in range(count)]


def json_option() -> Path | None:
    """Return the file of `--json FILE`, if it was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser.parse_args().json


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results with the environment in which they were measured."""
    text = json.dumps({"environment": environment(), **results}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
