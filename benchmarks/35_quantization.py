"""What quantizing costs in quality, time and memory: `python benchmarks/35_quantization.py`.

The default model is quantized in memory, in float32 arithmetic; its embedding, which is also its
head, stays as it is. Its matrices are already on a 4-bit grid in groups of 32 (Q4_1), so all
figures are against the file's own values, and groups have 64 weights. Parts:
- matrices: the error of rounding two matrices to many grids and codes; with `--minilm FILE` also
  two of all-MiniLM-L6-v2, whose weights are float32 (its `model.safetensors`);
- methods: round to nearest (RTN), AWQ and GPTQ at 4, 3 and 2 bits, with the verdict on their order;
- variants: the choices that the methods leave open, at 3 bits;
- codes: NF4, FP8, int8 with and without SmoothQuant (W8A8);
- mixed: each matrix's sensitivity, and mixtures of 2 to 5 bits at the bytes of uniform 3 bits;
- costs: seconds and peak memory of each method, alone in its process.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from common import write_results
from quantized_quality import (
    Judge,
    Lazy,
    Quality,
    compare,
    evaluation_texts,
    split_texts,
    windows_of,
)
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open
from torch import Tensor

from minigen import hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.safetensors import StoredTensor
from minigen.protocols import Linear
from minigen.quantization.awq import awq, shared_by_heads
from minigen.quantization.calibration import SharedInput, calibrate, collect
from minigen.quantization.float_codes import round_to_fp8, round_to_nf4
from minigen.quantization.gptq import gptq
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen.quantization.importance import round_by_importance, weight_importance
from minigen.quantization.mixed import (
    Choice,
    choose_exhaustively,
    choose_greedily,
    least_loss_bound,
    measure_sensitivity,
)
from minigen.quantization.smoothquant import int8_linear, round_rows_to_int8, smoothing_factors

GROUP, BITS = 64, (4, 3, 2)
SIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")  # of one layer
Maker = Callable[[], Tensor]
Method = Callable[[SharedInput, Grid, Checkpoint], Mapping[str, Maker]]


def by_rounding(shared: SharedInput, grid: Grid, _: Checkpoint, **options: Any) -> dict[str, Maker]:
    """Round to nearest."""
    return {
        name: round_to_nearest(weight, grid, **options).dequantize
        for name, weight in shared.weights.items()
    }


def by_importance(shared: SharedInput, grid: Grid, _: Checkpoint) -> dict[str, Maker]:
    """Round to nearest by the importance of each weight."""
    mean_square = shared.statistics.mean_square
    return {
        name: round_by_importance(weight, weight_importance(weight, mean_square), grid).dequantize
        for name, weight in shared.weights.items()
    }


def by_awq(
    shared: SharedInput, grid: Grid, checkpoint: Checkpoint, **options: Any
) -> dict[str, Maker]:
    """Search AWQ's factors; those of `o_proj` can be folded into the rows of V."""
    magnitudes = shared.statistics.mean_abs
    if any(name.endswith("o_proj.weight") for name in shared.weights):
        config = checkpoint.config
        magnitudes = shared_by_heads(magnitudes, config.q_heads, config.kv_heads)
    found = awq(shared.weights, shared.statistics, grid, magnitudes=magnitudes, **options)
    return {name: partial(found.dequantize, name) for name in found.matrices}


def by_gptq(shared: SharedInput, grid: Grid, _: Checkpoint, **options: Any) -> dict[str, Maker]:
    """Round column by column."""
    return {
        name: gptq(weight, shared.statistics.hessian, grid, **options).dequantize
        for name, weight in shared.weights.items()
    }


METHODS: dict[str, Method] = {  # GPTQ as `minigen quantize` has it
    "RTN": by_rounding,
    "AWQ": by_awq,
    "GPTQ": partial(by_gptq, act_order=True, clip_search=True),
}
VARIANTS: dict[str, tuple[Method, bool]] = {  # and whether later layers see the quantized ones
    "GPTQ, not clipped": (partial(by_gptq, act_order=True), True),
    "GPTQ, in the columns' order": (partial(by_gptq, clip_search=True), True),
    "GPTQ, neither": (by_gptq, True),
    "GPTQ, damping 0.1": (
        partial(by_gptq, act_order=True, clip_search=True, damping=0.1),
        True,
    ),
    "GPTQ, not sequential": (partial(by_gptq, act_order=True, clip_search=True), False),
    "AWQ, not clipped": (partial(by_awq, clip_search=False), True),
    "AWQ, not sequential": (by_awq, False),
    "RTN, clipped": (partial(by_rounding, clip_search=True), False),
    "importance": (by_importance, False),
}


def quantize_model(
    checkpoint: Checkpoint,
    windows: list[Tensor],
    method: Method,
    grid: Grid,
    label: str,
    *,
    sequential: bool = True,
) -> Lazy:
    """Return all matrices of the model's layers, quantized, while a bar shows the layers."""
    makers: dict[str, Maker] = {}

    def quantize(shared: SharedInput) -> Lazy:
        made = method(shared, grid, checkpoint)
        makers.update(made)
        return Lazy(made)

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(label)
        calibrate(
            checkpoint.config,
            checkpoint.tensors,
            windows,
            quantize,
            sequential=sequential,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    return Lazy(makers)


class Bench:
    """The model, its windows, and the judges; each is made when a part first needs it."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
        self.windows = windows_of(
            self.checkpoint, split_texts()[0], options.length, options.calibration
        )
        self._judges: dict[str, Judge] = {}

    @property
    def judges(self) -> dict[str, Judge]:
        """A judge for each text."""
        if not self._judges:
            texts = evaluation_texts(self.checkpoint, self.options.windows)
            self._judges = {name: Judge(self.checkpoint, each) for name, each in texts.items()}
        return self._judges

    def quality(self, replaced: Mapping[str, Tensor], label: str) -> dict[str, Quality]:
        """Measure a model on each text, and print its figures."""
        found = {text: judge.measure(replaced) for text, judge in self.judges.items()}
        tell(label, found)
        return found

    def itself(self) -> dict[str, Quality]:
        """Return the quality of the checkpoint itself."""
        return {text: judge.judge(judge.reference) for text, judge in self.judges.items()}


def tell(label: str, found: Mapping[str, Quality]) -> None:
    """Print one line of figures."""
    figures = ", ".join(
        f"{text}: perplexity {each.perplexity:.3f}, "
        f"KL {sum(each.divergence) / len(each.divergence):.4f}"
        for text, each in found.items()
    )
    print(f"{label:28} {figures}", flush=True)


def summaries(found: Mapping[str, Quality]) -> dict[str, Any]:
    """Return the figures of each text."""
    return {text: each.summary() for text, each in found.items()}


def matrices(bench: Bench) -> dict[str, Any]:
    """Measure the relative error of grids and codes on single matrices."""
    layer = "model.layers.0."
    tensors = {
        "SmolLM2 down": bench.checkpoint.tensors[f"{layer}mlp.down_proj.weight"].dequantize(),
        "SmolLM2 query": bench.checkpoint.tensors[f"{layer}self_attn.q_proj.weight"].dequantize(),
    }
    if bench.options.minilm is not None:
        with safe_open(bench.options.minilm, framework="pt") as file:
            layer = "encoder.layer.0."
            tensors["MiniLM down"] = file.get_tensor(f"{layer}output.dense.weight")
            tensors["MiniLM query"] = file.get_tensor(f"{layer}attention.self.query.weight")
    found: dict[str, Any] = {}
    for name, weight in tensors.items():
        found[name] = {form: relative_error(weight, make(weight)) for form, make in FORMS.items()}
        found[name]["weights beyond 6 sigma"] = int((weight.abs() > 6 * weight.std()).sum())
        print(name, found[name])
    return found


def _on_grid(grid: Grid, weight: Tensor, **options: Any) -> Tensor:
    return round_to_nearest(weight, grid, **options).dequantize()


def _int8_per_tensor(weight: Tensor) -> Tensor:
    codes, scales = round_rows_to_int8(weight.reshape(1, -1))
    return (codes * scales).view_as(weight)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8 per tensor": _int8_per_tensor,
    "int8 per row": partial(_on_grid, Grid(8, -1, True)),
    "int4 per row": partial(_on_grid, Grid(4, -1, True)),
    "4 bits, groups of 64": partial(_on_grid, Grid(4, 64, False)),
    "4 bits, groups of 32": partial(_on_grid, Grid(4, 32, False)),
    "4 bits, groups of 32, any minimum": partial(_on_grid, Grid(4, 32, False), whole_zeros=False),
    "3 bits, groups of 64": partial(_on_grid, Grid(3, 64, False)),
    "2 bits, groups of 64": partial(_on_grid, Grid(2, 64, False)),
    "NF4": lambda weight: round_to_nf4(weight).dequantize(),
    "FP8 per row": lambda weight: round_to_fp8(weight).dequantize(),
}


def methods(bench: Bench) -> dict[str, Any]:
    """Measure RTN, AWQ and GPTQ at each number of bits, and compute their order."""
    found: dict[str, Any] = {"none": summaries(bench.itself())}
    for bits in bench.options.bits:
        qualities: dict[str, dict[str, Quality]] = {}
        for name, method in METHODS.items():
            label = f"{name}, {bits} bits"
            grid = Grid(bits, GROUP, symmetric=False)
            replaced = quantize_model(bench.checkpoint, bench.windows, method, grid, label)
            qualities[name] = bench.quality(replaced, label)
            found[label] = summaries(qualities[name])
        found[f"order at {bits} bits"] = verdicts(qualities)
    return found


def verdicts(qualities: Mapping[str, Mapping[str, Quality]]) -> dict[str, Any]:
    """Compare neighbours in the order in which papers have them: RTN > AWQ > GPTQ in error."""
    found: dict[str, Any] = {}
    for text in next(iter(qualities.values())):
        pairs: dict[str, Any] = {}
        for first, second in [*pairwise(qualities), ("RTN", "GPTQ")]:
            one, other = qualities[first][text], qualities[second][text]
            pairs[f"{first} - {second}"] = {
                "kl divergence": compare(one.divergence, other.divergence),
                "nll": compare(one.nll, other.nll),
            }
        holds = all(each["kl divergence"]["verdict"] == "larger" for each in pairs.values())
        found[text] = {**pairs, "RTN > AWQ > GPTQ in KL divergence": holds}
        print(text, {pair: each["kl divergence"] for pair, each in pairs.items()}, holds)
    return found


def variants(bench: Bench) -> dict[str, Any]:
    """Measure at 3 bits what the methods leave open."""
    found: dict[str, Any] = {}
    for name, (method, sequential) in VARIANTS.items():
        replaced = quantize_model(
            bench.checkpoint,
            bench.windows,
            method,
            Grid(3, GROUP, symmetric=False),
            name,
            sequential=sequential,
        )
        found[name] = summaries(bench.quality(replaced, name))
    return found


def codes(bench: Bench) -> dict[str, Any]:
    """Measure NF4, FP8, and W8A8 without and with SmoothQuant."""
    stored = {
        name: each
        for name, each in bench.checkpoint.tensors.items()
        if name.endswith("proj.weight")
    }
    found: dict[str, Any] = {}
    for label, rounded in (("NF4", round_to_nf4), ("FP8", round_to_fp8)):
        makers = {
            name: partial(
                lambda each, rounded: rounded(each.dequantize()).dequantize(), each, rounded
            )
            for name, each in stored.items()
        }
        found[label] = summaries(bench.quality(Lazy(makers), label))
    statistics = collect(bench.checkpoint.config, bench.checkpoint.tensors, bench.windows)
    for alpha in (None, 0.5, 0.85):

        def make(
            weights: Iterable[StoredTensor],
            biases: Iterable[StoredTensor],
            alpha: float | None = alpha,
        ) -> Linear:
            dense = {each.name: each.dequantize() for each in weights}
            max_abs = statistics[next(iter(dense))].max_abs
            factors = torch.ones_like(max_abs)
            if alpha is not None:
                factors = smoothing_factors(max_abs, dense, alpha)
            parts = tuple(len(each) for each in dense.values())
            return int8_linear(torch.cat([*dense.values()]), factors, None, parts)

        label = "W8A8" if alpha is None else f"W8A8, SmoothQuant {alpha}"
        qualities = {text: judge.judge(judge.run(make)) for text, judge in bench.judges.items()}
        tell(label, qualities)
        found[label] = summaries(qualities)
    return found


def mixed(bench: Bench) -> dict[str, Any]:
    """Measure each matrix's sensitivity, and mixtures at the bytes of uniform 3 bits."""
    checkpoint, grids = bench.checkpoint, {f"{b}": Grid(b, GROUP, False) for b in (2, 3, 4, 5)}
    stored = {n: e for n, e in checkpoint.tensors.items() if n.endswith("proj.weight")}
    texts = windows_of(checkpoint, split_texts()[0], 256, bench.options.probes)
    probe = Judge(checkpoint, texts)  # on the calibration text: the choice must not see the test

    def num_bytes(name: str, grid: Grid) -> int:
        return grid.num_bytes(*stored[name].shape)

    def loss(name: str, grid: Grid) -> float:
        rounded = {name: _on_grid(grid, stored[name].dequantize())}
        quality = probe.measure(rounded, int(name.split(".")[2]))
        return sum(quality.divergence) / len(quality.divergence)

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task("sensitivity")
        choices = measure_sensitivity(
            [*stored],
            grids,
            num_bytes,
            loss,
            lambda done, total: bars.update(task, completed=done, total=total),
        )
    uniform = {
        name: next(each for each in own if each.form == "3") for name, own in choices.items()
    }
    max_bytes = sum(each.num_bytes for each in uniform.values())
    mixture = choose_greedily(choices, max_bytes)
    found: dict[str, Any] = {
        "bytes": {"uniform": max_bytes, "mixed": mixture.num_bytes},
        "predicted loss": {
            "uniform": sum(each.loss for each in uniform.values()),
            "mixed": mixture.loss,
            "bound": least_loss_bound(choices, max_bytes),
        },
        "bits": {name: each.form for name, each in mixture.choices.items()},
        "sensitivity": {n: {each.form: each.loss for each in own} for n, own in choices.items()},
        "six matrices": _six(choices),
    }
    qualities = {}
    for label, chosen in (("uniform", uniform), ("mixed", mixture.choices)):
        makers = {
            name: partial(lambda n, g: _on_grid(g, stored[n].dequantize()), name, grids[each.form])
            for name, each in chosen.items()
        }
        qualities[label] = bench.quality(Lazy(makers), label)
        found[label] = summaries(qualities[label])
    found["uniform - mixed"] = {
        text: compare(each.divergence, qualities["mixed"][text].divergence)
        for text, each in qualities["uniform"].items()
    }
    return found


def _six(choices: Mapping[str, tuple[Choice, ...]]) -> dict[str, Any]:
    """Compare the greedy choice with the optimum on six matrices of one layer, at each size."""
    few = {
        name: own
        for name, own in choices.items()
        if ".layers.0." in name and any(s in name for s in SIX)
    }
    few = {name: [each for each in own if each.form != "5"] for name, own in few.items()}
    least, most = (
        sum(pick(each.num_bytes for each in own) for own in few.values()) for pick in (min, max)
    )
    rows = []
    for part in range(11):
        size = least + (most - least) * part // 10
        greedy, best = choose_greedily(few, size), choose_exhaustively(few, size)
        rows.append(
            {
                "bytes": size,
                "greedy": greedy.loss,
                "optimum": best.loss,
                "bound": least_loss_bound(few, size),
            }
        )
    equal = sum(row["greedy"] <= row["optimum"] * (1 + 1e-9) for row in rows)
    print(f"greedy equals the optimum of six matrices at {equal} of {len(rows)} sizes")
    return {"sizes": rows, "equal": equal}


def costs(bench: Bench) -> dict[str, Any]:
    """Measure the seconds and the peak memory of each method, each alone in a new process."""
    found: dict[str, Any] = {}
    for name in METHODS:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_cost, args=(name, bench.options, theirs)
        )
        process.start()
        found[name] = ours.recv()
        process.join()
        print(name, found[name], flush=True)
    return found


def _cost(name: str, options: argparse.Namespace, connection: Connection) -> None:
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    start = time.perf_counter()
    grid = Grid(4, GROUP, symmetric=False)
    quantize_model(bench.checkpoint, bench.windows, METHODS[name], grid, name)
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    connection.send({"seconds": seconds, "peak bytes": peak, "threads": options.threads})


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "matrices": matrices,
    "methods": methods,
    "variants": variants,
    "codes": codes,
    "mixed": mixed,
    "costs": costs,
}


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--bits", nargs="*", type=int, default=BITS)
    parser.add_argument("--calibration", type=int, default=32, help="windows to calibrate on")
    parser.add_argument("--length", type=int, default=512, help="tokens of such a window")
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens to measure")
    parser.add_argument("--probes", type=int, default=2, help="windows for each sensitivity")
    parser.add_argument("--minilm", type=Path, metavar="FILE", help="all-MiniLM-L6-v2's weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
    bench = Bench(options)
    results |= {
        "calibration": {"windows": len(bench.windows), "tokens": options.length},
        "group size": GROUP,
        "symmetric": False,
    }
    for part in options.parts:
        print(f"{part}:", flush=True)
        results[part] = PARTS[part](bench)
        results["load average"] = psutil.getloadavg()[0]
        if options.json is not None:
            write_results(options.json, results)


if __name__ == "__main__":
    main()
