"""Check and time everything on this machine's GPU: `python -m benchmarks.gpu [--json FILE]`.

Needs torch with CUDA, triton, numpy, safetensors, tokenizers and pytest, and transformers for the
comparison. The results of each part are written as soon as they are known; a part that fails is
recorded as failed, and the exit code reports it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.parts import MOST_SECONDS, ROOT, beside_targets, parts, tidy
from benchmarks.gpu.supervised import measure, read, supervise


def main() -> None:
    """Measure all parts in another process, and in a new one after each failed process."""
    folder = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=folder / "gpu.json", metavar="FILE")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="start no part after this time (default 8.5)"
    )
    parser.add_argument(
        "--until", type=float, help="measure in this process, and start no part after this time"
    )
    options = parser.parse_args()
    if options.until is not None:
        measure(options.json, parts(), options.until, MOST_SECONDS, tidy)
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs an NVIDIA GPU; torch finds none.")
    until = time.time() + 60 * options.minutes
    here = [sys.executable, "-m", "benchmarks.gpu", "--json", str(options.json.resolve())]
    command = [*here, "--until", str(until)]
    failed = supervise(
        options.json, list(parts()), lambda: subprocess.run(command, cwd=ROOT).returncode
    )
    print(*beside_targets(read(options.json)), sep="\n", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
