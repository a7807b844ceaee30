"""What structured outputs keep, and what they cost: `python benchmarks/53_structured_output.py`.

Answers of the default model to seeded schemas are judged by jsonschema: with its own logits, with
random ones in their place (no form comes by itself then), and without a grammar. Then: the cost of
masks, memory over many schemas, a server under hostile forms, and steps without any grammar against
those of the commit before structured outputs.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import torch
from common import check_compiled, write_results
from hostile import HOSTILE
from schemas import as_text, keywords, prompts, schema_of
from server_process import server
from witness import failure

from minigen import LLM, SamplingParams, hub
from minigen.child_process import environment
from minigen.errors import ParamsError
from minigen.sampling.grammar import LLGuidanceBackend
from minigen.sampling.structured_outputs import StructuredOutputsParams

ROOT = Path(__file__).parents[1]
BEFORE = "b2d98ec"  # the last commit without structured outputs
MAX_TOKENS, FREE = 160, 200
DECODING = """
import sys, time
from minigen import LLM, SamplingParams
llm = LLM.load(max_num_seqs=8, enable_prefix_caching=False)
prompts = [[1000 + 7 * row + each for each in range(64)] for row in range(8)]
for line in sys.stdin:
    rows, tokens = map(int, line.split())
    seconds = []
    for length in (2, tokens + 2):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts[:rows], params, progress=False)
        seconds.append(time.perf_counter() - start)
    print("seconds", (seconds[1] - seconds[0]) / tokens, flush=True)
"""


class Noise:
    """Puts seeded random logits in place of the model's."""

    def __init__(self, params: SamplingParams, prompt_ids: tuple[int, ...]):
        self.seed = params.seed or 0

    def __call__(self, logits: torch.Tensor, output_ids: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + len(output_ids))
        return torch.randn(logits.shape, generator=generator, dtype=logits.dtype)


def accepted(
    backend: LLGuidanceBackend, schemas: list[Any]
) -> tuple[list[int], list[float], dict[str, Any]]:
    """Compile all schemas; return the seeds of those accepted, seconds to a first mask, counts."""
    kept, seconds, used, refused = [], [], Counter[str](), Counter[str]()
    reasons: Counter[str] = Counter()
    for seed, schema in enumerate(schemas):
        used.update(keywords(schema))
        start = time.perf_counter()
        try:
            backend.compile(StructuredOutputsParams(json=schema)).allowed()
        except ParamsError as error:
            refused.update(keywords(schema))
            reasons[str(error).partition("used: ")[2][:90]] += 1
        else:
            seconds.append(time.perf_counter() - start)
            kept.append(seed)
        progress("compiled", seed + 1, len(schemas))
    rare = {name: f"{refused[name]} of {used[name]}" for name in refused}
    always = sorted(name for name in refused if refused[name] == used[name])
    return (
        kept,
        seconds,
        {
            "schemas": len(schemas),
            "accepted": len(kept),
            "share": len(kept) / len(schemas),
            "reasons": dict(reasons.most_common()),
            "keywords always refused": always,
            "schemas refused by keyword": rare,
            "schemas by keyword": dict(used.most_common()),
        },
    )


def answers(
    llm: LLM, schemas: dict[int, Any], form: bool, show: bool
) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """Answer each schema once; return the counts, and the tokens of each answer."""
    texts, asked, params = prompts(), [], []
    for seed, schema in schemas.items():
        wanted = f" Answer only with JSON of this schema: {as_text(schema)}" if show else ""
        message = {"role": "user", "content": texts[seed % len(texts)] + wanted}
        asked.append(llm.chat_prompt([message]))
        more = {"structured_outputs": {"json": schema}} if form else {}
        params.append(SamplingParams(temperature=0.8, seed=seed, max_tokens=MAX_TOKENS, **more))
    outputs = llm.generate(asked, params, progress=True)
    ended = [each.finish_reason == "stop" for each in outputs]
    faults = {
        seed: found
        for (seed, schema), output, by_itself in zip(schemas.items(), outputs, ended, strict=True)
        if by_itself and (found := failure(schema, output.text)) is not None
    }
    for seed, found in [*faults.items()][: 5 if form else 0]:
        print("not valid:", seed, found)
    num_ended = sum(ended)
    return {
        "answers": len(outputs),
        "ended by themselves": num_ended,
        "ended by length": len(outputs) - num_ended,
        "valid": num_ended - len(faults),
        "valid share of those that ended": (num_ended - len(faults)) / max(1, num_ended),
        "valid share of all": (num_ended - len(faults)) / len(outputs),
        "tokens": sum(len(each.token_ids) for each in outputs),
    }, {seed: output.token_ids for seed, output in zip(schemas, outputs, strict=True)}


def mask_costs(
    backend: LLGuidanceBackend, schemas: list[Any], tokens: dict[int, list[int]], ends: set[int]
) -> list[float]:
    """Return the seconds per token that a mask and its matcher's step take, over real answers."""
    seconds = []
    for seed, token_ids in tokens.items():
        matcher = backend.compile(StructuredOutputsParams(json=schemas[seed]))
        for token_id in token_ids:
            start = time.perf_counter()
            matcher.allowed()
            if token_id not in ends:
                matcher.accept(token_id)
            seconds.append(time.perf_counter() - start)
    return seconds


def memory(backend: LLGuidanceBackend, count: int) -> dict[str, Any]:
    """Compile many different schemas; return the resident memory along the way, in MiB."""
    process = psutil.Process()
    steps = max(1, count // 10)
    found = {"0": _mebibytes(process)}
    for number in range(count):
        form = StructuredOutputsParams(json=schema_of(1_000_000 + number))
        with suppress(ParamsError):
            backend.compile(form).allowed()
        if (number + 1) % steps == 0:
            found[str(number + 1)] = _mebibytes(process)
        progress("schemas in memory", number + 1, count)
    return {"schemas": count, "process and its child in MiB": found}


def _mebibytes(process: psutil.Process) -> list[int]:
    return [each.memory_info().rss >> 20 for each in (process, *process.children())]


async def attacked(host: str, port: int, seconds_of_rest: float) -> dict[str, Any]:
    """Stream answers while hostile forms come; return the gaps between tokens, and the answers."""
    gaps: list[list[float]] = [[], []]
    phase, stop = 0, False

    async def stream() -> None:
        while not stop:
            body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            reader, writer = await post(host, port, body)
            last = None
            while line := await reader.readline():
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    now = time.perf_counter()
                    if last is not None:
                        gaps[phase].append(now - last)
                    last = now
                if stop:
                    break
            writer.close()

    streaming = asyncio.create_task(stream())
    easy = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
    reader, writer = await post(host, port, easy)  # it starts the process for trials
    await reader.read()
    writer.close()
    gaps[0].clear()
    await asyncio.sleep(seconds_of_rest)
    phase = 1
    found = {}
    for name, form in HOSTILE.items():
        start = time.perf_counter()
        body = {"prompt": "a", "max_tokens": 4, "structured_outputs": form}
        reader, writer = await post(host, port, body)
        whole = await reader.read()
        writer.close()
        seconds = time.perf_counter() - start
        status = int(whole.split(b" ", 2)[1])
        error = re.search(rb'"message": ?"((?:[^"\\]|\\.)*)"', whole) if status != 200 else None
        message = error[1].decode()[:160] if error else ""
        found[name] = {"status": status, "seconds": round(seconds, 3), "message": message}
        print(f"  {name:<28} {status} {seconds:6.3f} s {message[:70]}", flush=True)
        await asyncio.sleep(0.2)
    stop = True
    await streaming
    refusals = [each["seconds"] for each in found.values() if each["status"] != 200]
    return {
        "forms": found,
        "slowest refusal in seconds": max(refusals),
        "slowest answer in seconds": max(each["seconds"] for each in found.values()),
        "gaps in milliseconds": {
            name: {"tokens": len(each), **_spread(each), "longest": max(each) * 1e3}
            for name, each in zip(("at rest", "under attack"), gaps, strict=True)
        },
    }


async def post(
    host: str, port: int, body: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request for a completion."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=2**22)
    head = "POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-type: "
    writer.write(f"{head}application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


@contextmanager
def decoder(folder: Path) -> Iterator[Any]:
    """Run a process that decodes with a folder's minigen; yield a function of (rows, tokens).

    Each version compiles its own kernels first: without them it runs on torch alone.
    """
    place = {**environment(), "PYTHONPATH": str(folder)}
    compiled = [sys.executable, "-P", "-m", "minigen", "compile", "int4"]
    subprocess.run(compiled, env=place, cwd=folder, check=True)
    command = [sys.executable, "-P", "-c", DECODING]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, env=place, cwd=folder, **pipes) as process:

        def seconds(rows: int, tokens: int) -> float:
            process.stdin.write(f"{rows} {tokens}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("seconds"):
                    return float(line.split()[1])
            raise RuntimeError("the process that decodes has ended")

        yield seconds
        process.stdin.close()


def unchanged_steps(repeats: int) -> dict[str, Any]:
    """Return the milliseconds of a decode step without grammars, before and now, by turns."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", BEFORE, "minigen"], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        found = {}
        with decoder(Path(folder)) as before, decoder(ROOT) as now:
            for rows in (1, 8):
                times: dict[str, list[float]] = {"before": [], "now": []}
                for turn in range(repeats + 1):
                    pair = [("before", before), ("now", now)]
                    for name, seconds in pair if turn % 2 else pair[::-1]:
                        took = seconds(rows, 64)
                        if turn:
                            times[name].append(took * 1e3)
                    progress(f"{rows} rows", turn, repeats)
                ratios = [b / a for a, b in zip(times["before"], times["now"], strict=True)]
                quarters = statistics.quantiles(ratios, n=4)
                found[f"{rows} sequences"] = {
                    **{name: statistics.median(each) for name, each in times.items()},
                    "ratio": statistics.median(ratios),
                    "middle half of the ratios": [quarters[0], quarters[2]],
                    "ratios": ratios,
                }
    return {"commit before": BEFORE, "turns": repeats, "milliseconds": found}


def _spread(seconds: list[float], unit: float = 1e3) -> dict[str, float]:
    return {
        "median": statistics.median(seconds) * unit,
        "p99": statistics.quantiles(seconds, n=100)[98] * unit,
    }


def load(**options: Any) -> tuple[LLM, LLGuidanceBackend]:
    """Load the default model, and a grammar backend for its vocabulary."""
    llm = LLM.load(max_num_seqs=32, **options)
    check_compiled(llm)
    ends = {*llm.config.eos_token_ids, *llm.tokenizer.eos_token_ids}
    return llm, LLGuidanceBackend(llm.tokenizer, llm.config.vocab_size, ends)


def grammar(options: argparse.Namespace) -> dict[str, Any]:
    """Return which schemas are accepted, what answers to them are, and what masks cost."""
    schemas = [schema_of(seed) for seed in range(options.schemas)]
    llm, backend = load()
    start = time.perf_counter()
    backend.compile(StructuredOutputsParams(choice=["a"]))
    started = time.perf_counter() - start
    kept, to_mask, acceptance = accepted(backend, schemas)
    usable = {seed: schemas[seed] for seed in kept if seed < options.answers}
    steps = [step_seconds(llm) for _ in range(5)]
    model, tokens = answers(llm, usable, form=True, show=True)
    ends = {*llm.config.eos_token_ids, *llm.tokenizer.eos_token_ids}
    spread = _spread(mask_costs(backend, schemas, tokens, ends))
    steps += [step_seconds(llm) for _ in range(5)]
    step = statistics.median(steps) * 1e3
    free, _ = answers(llm, dict([*usable.items()][:FREE]), form=False, show=True)
    return {
        "model": hub.DEFAULT_MODEL,
        "acceptance": acceptance,
        "answers": {"model": model, "without a grammar": free},
        "mask in milliseconds": spread,
        "step of one sequence in milliseconds": step,
        "mask as a share of a step": {name: each / step for name, each in spread.items()},
        "first mask in milliseconds": _spread(to_mask),
        "start of the trial process in milliseconds": started * 1e3,
    }


def random_logits(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the answers are if nothing but the grammar gives them a form."""
    llm, backend = load(logits_processor=Noise)
    schemas = [schema_of(seed) for seed in range(options.answers)]
    kept, _, _ = accepted(backend, schemas)
    return answers(llm, {seed: schemas[seed] for seed in kept}, form=True, show=False)[0]


def step_seconds(llm: LLM) -> float:
    """Return the seconds of a decode step of one sequence without a grammar."""
    seconds = []
    for length in (2, 34):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([1000, 2000, 3000], params)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / 32


def hostile(options: argparse.Namespace) -> dict[str, Any]:
    """Return how a server answers hostile forms, and how a stream goes on beside them."""
    with server("--max-num-seqs", "8") as (host, port):
        return asyncio.run(attacked(host, port, 15))


PARTS = {
    "grammar": grammar,
    "random logits": random_logits,
    "hostile": hostile,
    "memory": lambda options: memory(load()[1], options.memory),
    "without a grammar": lambda options: unchanged_steps(options.repeats),
}


def progress(what: str, done: int, count: int) -> None:
    """Print how far it is, about twenty times."""
    if done % max(1, count // 20) == 0:
        print(f"\r{what} {done:,} of {count:,}", end="\n" if done == count else "", flush=True)


def main() -> None:
    """Measure, print, and write JSON if a file was given; parts that are left out stay in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=1000, help="schemas that models answer")
    parser.add_argument("--memory", type=int, default=10_000, help="number of schemas for memory")
    parser.add_argument("--repeats", type=int, default=15, help="number of counted turns")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    for part in options.parts:
        print(f"\n{part}", flush=True)
        loads = [psutil.getloadavg()[0]]
        results = {part: PARTS[part](options)}
        loads.append(psutil.getloadavg()[0])
        results[part]["load average before and after"] = loads
        print(json.dumps(results, indent=1)[:6000], flush=True)
        if options.json is not None:
            old = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
            write_results(options.json, {**old, **results})


if __name__ == "__main__":
    main()
