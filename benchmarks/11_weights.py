"""Reading weights: minigen against the gguf library, and mapping against loading.

    python benchmarks/11_weights.py [--json FILE]

Measures on the default model (run `minigen pull` first): the time to read the header, the time to
dequantize all tensors one after the other, and the cost of having a model open. Figures are
medians; the two of each pair take turns. Everything runs on one thread: the gguf library has no
more, and on a busy machine torch's threads, which wait for each other after every small step, would
measure the other processes.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import gguf
import torch

from minigen import hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.gguf import read_gguf

sys.path.insert(0, str(Path(__file__).parent))
from common import interleaved, json_option, write_results

REPEATS = 9


def main() -> None:
    output = json_option()
    path = hub.find(hub.DEFAULT_MODEL)
    if path is None:
        sys.exit(f"{hub.DEFAULT_MODEL} is not on this machine; run `minigen pull` first.")
    results = {
        "repeats": REPEATS,
        "header": header(path),
        "dequantise_all": dequantise_all(path),
        "open": opened(path),
    }
    for name in ("header", "dequantise_all"):
        row = results[name]
        print(
            f"{name:15} minigen {row['minigen_seconds']:8.3f} s   "
            f"gguf {row['gguf_seconds']:8.3f} s   {row['ratio']:5.1f} times as long"
        )
    for name, row in results["open"].items():
        print(f"{name:15} {row['seconds']:8.3f} s   {row['resident_mb']:8.1f} MB resident")
    if output is not None:
        write_results(output, results)


def header(path: Path) -> dict[str, float]:
    """Read the header with its vocabulary, including all strings."""
    return compared(
        interleaved(
            {"minigen": lambda: read_gguf(path), "gguf": lambda: gguf.GGUFReader(path)}, REPEATS
        )
    )


def dequantise_all(path: Path) -> dict[str, float]:
    """Dequantize every tensor into float32 and free each one before the next."""
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)

    def by_minigen() -> None:
        for tensor in ours.tensors.values():
            tensor.dequantize()

    def by_gguf() -> None:
        for tensor in theirs.tensors:
            gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    return compared(interleaved({"minigen": by_minigen, "gguf": by_gguf}, REPEATS))


def compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return both medians, and the median of the ratios within each turn."""
    ours, theirs = seconds["minigen"], seconds["gguf"]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "minigen_seconds": round(median(ours), 4),
        "gguf_seconds": round(median(theirs), 4),
        "ratio": round(median(ratios), 2),
    }


def opened(path: Path) -> dict[str, dict[str, float]]:
    """Open a model by mapping and by loading into float32, each in its own process."""
    found: dict[str, list[dict[str, float]]] = {"map": [], "load": []}
    for _ in range(REPEATS):
        for how, rows in found.items():
            done = subprocess.run(
                [sys.executable, __file__, "--child", how, str(path)],
                capture_output=True,
                encoding="utf-8",
                check=True,
            )
            rows.append(json.loads(done.stdout))
    return {
        how: {
            "seconds": round(median(row["seconds"] for row in rows), 4),
            "resident_mb": round(median(row["bytes"] for row in rows) / 1e6, 1),
        }
        for how, rows in found.items()
    }


def child(how: str, path: Path) -> None:
    """Open the model in this process; print the seconds and the bytes that it added."""
    before, start = resident_bytes(), time.perf_counter()
    checkpoint = open_checkpoint(path)
    if how == "load":
        kept = [tensor.dequantize() for tensor in checkpoint.tensors.values()]
        assert len(kept) == len(checkpoint.tensors)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "bytes": resident_bytes() - before}))


def resident_bytes() -> int:
    """Return this process's resident memory, mapped files included; off Linux, its peak so far."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text("utf-8").split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
