"""Time to the first token and peak memory of a cold command.

`python benchmarks/cold_start.py` runs `minigen generate` on the default model in fresh processes.
The model file is in the page cache; everything else is as a user finds it.
"""

import os
import statistics
import subprocess
import sys
import time

from common import json_option, write_results

REPEATS = 7
PROMPT = "The capital of France is"


def start(weights: str) -> tuple[float, float]:
    """Return the seconds to the first byte on stdout, and the peak resident memory in MB."""
    command = [sys.executable, "-m", "minigen", "generate", PROMPT, "--weights", weights]
    started = time.perf_counter()
    with subprocess.Popen([*command, "--max-tokens", "16"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - started
        process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return first, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    runs: dict[str, list[tuple[float, float]]] = {"auto": [], "float32": []}
    for turn in range(REPEATS + 1):
        for weights, measured in runs.items():
            result = start(weights)
            if turn:
                measured.append(result)
    results = {
        weights: {
            "first_token_s": [first for first, _ in measured],
            "median_first_token_s": statistics.median(first for first, _ in measured),
            "peak_mb": max(peak for _, peak in measured),
        }
        for weights, measured in runs.items()
    }
    for weights, result in results.items():
        print(
            f"weights={weights:<8} first token after {result['median_first_token_s']:.2f} s "
            f"(median), peak memory {result['peak_mb']:.0f} MB"
        )
    path = json_option()
    if path is not None:
        write_results(path, {"repeats": REPEATS, "runs": results})


if __name__ == "__main__":
    main()
