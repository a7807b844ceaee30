"""Run every benchmark and write its JSON: `python -m benchmarks`, or `make bench`."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NOT_BENCHMARKS = {
    *("__init__", "__main__", "common", "questions", "sure"),
    *("schemas", "witness", "hostile", "server_process", "quantized_quality"),
    *("quantized_agreement",),
    *("gguf_float32", "llama_cpp_agreement", "step_cost", "step_cost_figures", "step_timing"),
}

if __name__ == "__main__":
    for script in sorted(FOLDER.glob("*.py")):
        if script.stem in NOT_BENCHMARKS:
            continue
        print(f"\n{script.stem}", flush=True)
        results = FOLDER / "results" / f"{script.stem}.json"
        subprocess.run([sys.executable, str(script), "--json", str(results)], check=True)
