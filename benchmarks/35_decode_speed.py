"""Decode from quantized checkpoints, beside today's int4 and int8, and beside llama.cpp.

`python benchmarks/35_decode_speed.py [--python PATH] [--json FILE]`; `--python` is a Python with
`llama-cpp-python`, and without it llama.cpp is left out.

The default model is written in each scheme. All engines then decode the same number of tokens after
the same prompt, in turns, one sequence at a time; the seconds of the prompt are not counted. The
ratios are those of the medians: above 1 is faster than the baseline, which is the default model
with `weights="int4"` or `weights="int8"`, so files of 4 bits are judged against 4 bits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import check_compiled, interleaved, random_prompts, write_results

from minigen import LLM, SamplingParams, hub
from minigen.export.conversion import quantize_model
from minigen.export.plan import QuantizeOptions

PROMPT_TOKENS, TOKENS = 64, 128
LIMIT = 0.90  # within 10 % of the baseline

LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
path, prompt, count, threads = json.loads(sys.stdin.readline())
llm = Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
print(json.dumps("ready"), flush=True)
for _ in sys.stdin:
    llm.reset()
    tokens = llm.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
    next(tokens)
    start = time.perf_counter()
    for _, _ in zip(range(count), tokens):
        pass
    print(json.dumps(time.perf_counter() - start), flush=True)
"""


@dataclass(frozen=True)
class Form:
    """A checkpoint to decode from: how it is written, and which baseline it is judged by."""

    scheme: str | None  # None is the default model itself
    weights: str = "auto"
    group_size: int | None = None
    suffix: str = ""
    baseline: str = "int4"


FORMS = {
    "int4": Form(None, "int4"),
    "Q4_0 file": Form("q4_0", suffix=".gguf"),
    "4 bits, groups of 32": Form("rtn", group_size=32),
    "4 bits, groups of 64": Form("rtn", group_size=64),
    "int8": Form(None, "int8", baseline="int8"),
    "Q8_0 file": Form("q8_0", suffix=".gguf", baseline="int8"),
    "8 bits, whole rows": Form("int8", baseline="int8"),
}


class Decoder:
    """An engine of minigen that decodes after one prompt, and times the decoding alone."""

    def __init__(self, path: Path, weights: str, prompt: list[int], threads: int):
        self.llm = LLM.load(path, weights=weights, threads=threads, max_num_seqs=1)
        check_compiled(self.llm)
        self.prompt = prompt
        self.params = SamplingParams(temperature=0, max_tokens=TOKENS + 1, ignore_eos=True)

    def __call__(self) -> float:
        """Return the seconds of all tokens after the first."""
        times = [time.perf_counter() for _ in self.llm.stream_deltas([self.prompt], self.params)]
        return times[-1] - times[0]


class LlamaCpp:
    """llama.cpp in a process of its own, which does the same."""

    def __init__(self, python: str, path: Path, prompt: list[int], threads: int):
        self.process = subprocess.Popen(
            [python, "-c", LLAMA_CPP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self._ask([str(path), prompt, TOKENS, threads])

    def _ask(self, message: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("llama.cpp ended before it answered; is llama-cpp-python installed there?")
        return json.loads(line)

    def __call__(self) -> float:
        """Return the seconds of all tokens after the first."""
        return float(self._ask("go"))


def write_forms(folder: Path) -> dict[str, Path]:
    """Write the default model in each scheme, and return the paths by the forms' names."""
    source = hub.resolve(hub.DEFAULT_MODEL)
    paths = {}
    for number, (name, form) in enumerate(FORMS.items()):
        paths[name] = source
        if form.scheme is not None:
            paths[name] = folder / f"{number}{form.suffix}"
            options = QuantizeOptions(
                form.scheme, group_size=form.group_size, allow_requantize=True
            )
            print(f"writing {name}", file=sys.stderr, flush=True)
            quantize_model(source, paths[name], options)
    return paths


def main() -> None:
    """Write the files, decode in turns, compare, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", metavar="PATH", help="a Python with llama-cpp-python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--repeats", type=int, default=9, help="turns")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    options = parser.parse_args()
    (prompt,) = random_prompts(1, PROMPT_TOKENS, seed=0)
    with tempfile.TemporaryDirectory() as name:
        paths = write_forms(Path(name))
        engines: dict[str, Callable[[], float]] = {
            form: Decoder(path, FORMS[form].weights, prompt, options.threads)
            for form, path in paths.items()
        }
        if options.python is not None:
            for kind, form in (("Q4_0", "Q4_0 file"), ("Q8_0", "Q8_0 file")):
                path = paths[form]
                engines[f"llama.cpp {kind}"] = LlamaCpp(
                    options.python, path, prompt, options.threads
                )
        results = compare(engines, options.repeats)
    if options.json is not None:
        write_results(options.json, {"threads": options.threads, **results})


def compare(engines: dict[str, Callable[[], float]], repeats: int) -> dict[str, Any]:
    """Let each engine decode by turns, and return the ratios of the medians."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}

    def turn(name: str) -> Callable[[], None]:
        return lambda: seconds[name].append(engines[name]())

    interleaved({name: turn(name) for name in engines}, repeats)
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    rows = {}
    for name in engines:
        form = FORMS.get(name)
        baseline = form.baseline if form else "int4" if "Q4" in name else "int8"
        ratio = medians[baseline] / medians[name]
        rows[name] = {"baseline": baseline, "speed": round(ratio, 3)}
        if form is not None:
            rows[name]["within 10 %"] = ratio >= LIMIT
        print(f"{name:24} {ratio:.3f} times the speed of {baseline}", flush=True)
    return {"tokens": TOKENS, "turns": repeats, "load": psutil.getloadavg()[0], "speed": rows}


if __name__ == "__main__":
    main()
