"""The roofs of this processor: what memory delivers, and what the products of minigen compute.

The bandwidth is that of a sum over more memory than most caches hold. A peak is that of a product
of 256 tokens with packed weights, few enough for the cache; each number is the median of several.
The file of results has an entry for each processor that it ran on, and for each that was pretended:

  python benchmarks/34_roofs.py --json benchmarks/results/34_roofs.json
  python benchmarks/34_roofs.py --pretend avx2 --json benchmarks/results/34_roofs.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import environment
from step_timing import Probe

from benchmarks.peers.processor import PRETENDED, Processor
from minigen import LLM
from minigen.kernels.cpu.amx.scratch import instructions
from minigen.kernels.cpu.compile import compile_step

ROUNDS = 7


def roofs() -> dict[str, Any]:
    """Return this process's bandwidth and peaks, per second, and by which instructions."""
    compile_step("int4")
    llm = LLM.load(weights="int4", num_blocks=16, max_num_seqs=1)
    probe = Probe(llm)
    rounds = [asdict(probe.ceilings()) for _ in range(ROUNDS)]
    return {
        "products by": instructions(),
        "bandwidth": statistics.median(each["bandwidth"] for each in rounds),
        "peaks": {
            form: statistics.median(each["peaks"][form] for each in rounds)
            for form in rounds[0]["peaks"]
        },
    }


def main() -> None:
    """Measure, print, and write the entry of this processor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pretend = "pretend a processor without more than this"
    parser.add_argument("--pretend", choices=PRETENDED, help=pretend)
    write = "also write the entry of this processor to FILE"
    parser.add_argument("--json", type=Path, metavar="FILE", help=write)
    options = parser.parse_args()
    processor = Processor.present(options.pretend)
    if not processor.can_pretend:
        sys.exit(f"This processor lacks instructions of {options.pretend}, so cannot pretend it.")
    variables = processor.variables
    if any(os.environ.get(name) != each for name, each in variables.items()):
        command = [sys.executable, *sys.argv]  # Numba reads the variables when it is imported
        sys.exit(subprocess.run(command, env={**os.environ, **variables}, check=False).returncode)
    found = roofs()
    print(f"{processor.short_name}: {found['bandwidth'] / 1e9:.1f} GB/s", end="")
    for form, peak in found["peaks"].items():
        print(f", {form} {peak / 1e9:,.0f} billion operations per second", end="")
    print(f" ({found['products by']})")
    if options.json is not None:
        stored = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
        stored[processor.short_name] = {"environment": environment(), **found}
        text = json.dumps(dict(sorted(stored.items())), indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
