"""What speculation gains and costs: `python benchmarks/36_speculative.py`.

Three parts, in each form of the weights; the same requests are decoded without speculation and with
it, by turns, and all give the same texts, which is checked:
- gains: one request at a time that copies or edits its prompt, and a control whose sampled answer
  does not, beside the gain that the share of right drafts and the cost of rows predict;
- batches: copying and the control in growing batches, with always four drafts, and with as many as
  pay;
- bound: 512 tokens of the control where every draft is wrong, and with n-grams. All engines decode
  the same request side by side, a step of each in turn, so that what else the machine does slows
  all of them alike; one more engine without speculation shows what is left of that noise.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import check_compiled, write_results

from minigen import LLM, SamplingParams
from minigen.trace.events import EventKind

RESULTS = Path(__file__).parent / "results"
TOKENS, LONG = 128, 512
BATCHES = (1, 2, 4, 8, 16)  # 32 such prompts do not fit into the memory of the cache
WITHOUT, AGAIN = "without", "without, again"
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 12}
FOUR = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 12}
NAMES = (
    "river",
    "stone",
    "lamp",
    "garden",
    "window",
    "paper",
    "copper",
    "winter",
    "market",
    "bell",
)


def records(seed: int) -> str:
    """Return a list of records, as a program would print it."""
    rng = random.Random(seed)
    return "\n".join(
        f'{{"id": {number}, "name": "{rng.choice(NAMES)}", "weight": {rng.randint(10, 99)}, '
        f'"open": {rng.choice(("true", "false"))}}},'
        for number in range(1, 13)
    )


def functions(seed: int) -> str:
    """Return small functions in Python, each unlike the others in a name and a number."""
    rng = random.Random(seed)
    return "\n\n".join(
        f"def {rng.choice(NAMES)}_{number}(value):\n    total = value * {rng.randint(2, 99)}\n"
        f"    return total + {rng.randint(2, 99)}"
        for number in range(8)
    )


def copying(seed: int) -> str:
    """Return a text and the start of its repetition."""
    text = (records if seed % 2 else functions)(seed)
    start = text[: len(text) // 12]
    return f"{text}\n\nThe same text again, without any change:\n\n{text}\n\nOnce more:\n\n{start}"


def editing(seed: int) -> str:
    """Return a text, an edited version of another one as an example, and the start of its edit."""
    text, other = records(seed), records(seed + 1000)
    edited = other.replace('"weight"', '"mass"')
    start = text.replace('"weight"', '"mass"')[:60]
    change = "\n\nwith mass for weight:\n\n"
    return f"{other}{change}{edited}\n\n{text}{change}{start}"


def control(seed: int) -> str:
    """Return the start of a story."""
    rng = random.Random(seed)
    first, second = rng.sample(NAMES, 2)
    return f"The story of the {first} and the {second} begins on a cold morning, when"


LOADS: dict[str, tuple[Callable[[int], str], float]] = {
    "copying": (copying, 0.0),
    "editing": (editing, 0.0),
    "control": (control, 1.0),
}


class AlwaysWrong:
    """Proposes a token that the text does not have next, as often as it is asked."""

    def propose(self, sequences: Any, counts: Any) -> Any:
        """Return runs of one rare token."""
        return [[49_000] * count for count in counts]

    def end(self, sequence: Any) -> None:
        """Do nothing."""


Loader = Callable[..., LLM]


@dataclass
class Run:
    """One decode: its seconds, answers and steps, and the drafts that were made, tested and right.

    A draft is tested if all drafts before it in its step are right.
    """

    seconds: float
    answers: list[list[int]]
    steps: int
    drafted: int
    tested: int
    right: int


def decode(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    """Return the decode from the first token of all sequences to the last one."""
    with llm.record() as recorder:
        outputs = llm.generate(prompts, params, progress=False)
    events = recorder.events
    tokens = [each for each in events if each.kind is EventKind.NEW_TOKEN]
    firsts: dict[int | None, int] = {}
    for each in tokens:
        firsts.setdefault(each.sequence_id, each.time_ns)
    checks = [each.counts for each in events if each.kind is EventKind.VERIFIED]
    return Run(
        (tokens[-1].time_ns - max(firsts.values())) / 1e9,
        [each.token_ids for each in outputs],
        sum(each.kind is EventKind.STEP for each in events),
        sum(each["drafted"] for each in checks),
        sum(min(each["accepted"] + 1, each["drafted"]) for each in checks),
        sum(each["accepted"] for each in checks),
    )


def compare(load: str, batch: int, tokens: int, repeats: int, llms: dict[str, LLM]) -> Any:
    """Return the ratio of the time without speculation to that of each other way, and why."""
    make, temperature = LOADS[load]
    tokenizer = llms[WITHOUT].tokenizer
    runs: dict[str, list[Run]] = {way: [] for way in llms}
    for turn in range(repeats + 1):
        prompts = [tokenizer.encode(make(100 * turn + row)) for row in range(batch)]
        params = [
            SamplingParams(temperature=temperature, seed=row, max_tokens=tokens, ignore_eos=True)
            for row in range(batch)
        ]
        for way in [*llms] if turn % 2 else [*llms][::-1]:
            runs[way].append(decode(llms[way], prompts, params))
    for pairs in zip(*runs.values(), strict=True):
        assert all(each.answers == pairs[0].answers for each in pairs), "speculation changed a text"
    runs = {way: each[1:] for way, each in runs.items()}
    without = runs.pop(WITHOUT)
    found: dict[str, Any] = {
        "tokens a second without": batch
        * (tokens - 1)
        / statistics.median(each.seconds for each in without)
    }
    for way, own in runs.items():
        ratios = [a.seconds / b.seconds for a, b in zip(without, own, strict=True)]
        tested = sum(each.tested for each in own)
        found[way] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "right of tested": sum(each.right for each in own) / tested if tested else None,
            "drafted": sum(each.drafted for each in own),
            "tokens a step and sequence": (tokens - 1)
            / statistics.mean(each.steps - 1 for each in own),
        }
    return found


def step_costs(weights: str) -> dict[int, float]:
    """Return the cost of a step of several rows, of that of one row, from the stored benchmark."""
    stored = json.loads((RESULTS / "34_step_cost.json").read_text(encoding="utf-8"))
    points = [each for each in stored["forms"][weights]["points"] if each["context"] == 256]
    times = {each["sequences"]: each["measured_ms"] for each in points}
    most = 1 + NGRAM["num_speculative_tokens"]
    return {rows: times[rows] / times[1] for rows in times if rows <= most}


def predicted(share: float, costs: dict[int, float]) -> dict[str, float]:
    """Return the best number of rows for a share of right drafts, and the gain that it predicts."""
    tokens = {rows: sum(share**place for place in range(rows)) for rows in costs}
    rows = max(costs, key=lambda each: tokens[each] / costs[each])
    return {"rows": rows, "ratio": tokens[rows] / costs[rows]}


def gains(load: Loader, options: argparse.Namespace, stored_form: str) -> dict[str, Any]:
    """Measure one request at a time, by each proposer."""
    llms = {WITHOUT: load(None), "ngram": load(NGRAM), "suffix": load(SUFFIX)}
    found: dict[str, Any] = {}
    for name in LOADS:
        found[name] = compare(name, 1, TOKENS, options.repeats, llms)
        for way in ("ngram", "suffix"):
            share = found[name][way]["right of tested"]
            if share is not None:
                found[name][way]["predicted"] = predicted(share, step_costs(stored_form))
        tell(name, found[name])
    return found


def batches(load: Loader, options: argparse.Namespace, _: str) -> dict[str, Any]:
    """Measure growing batches: where four drafts lose, and what a chosen number makes of it."""
    llms = {WITHOUT: load(None), "always four": load(FOUR), "adaptive": load(NGRAM)}
    found: dict[str, Any] = {}
    for name in ("copying", "control"):
        for batch in options.batches:
            key = f"{name}, batch {batch}"
            found[key] = compare(name, batch, TOKENS, options.repeats, llms)
            tell(key, found[key])
        losing = [
            batch
            for batch in options.batches
            if found[f"{name}, batch {batch}"]["always four"]["ratio"] < 1
        ]
        found[f"{name}, first batch that loses"] = losing[0] if losing else None
    return found


def side_by_side(
    llms: dict[str, LLM], prompt: list[int], params: SamplingParams, rng: random.Random
) -> dict[str, float]:
    """Return each engine's seconds for one request, a step of each in turn, in random order."""
    streams = {way: llm.stream_deltas([prompt], params) for way, llm in llms.items()}
    answers = {way: [next(each).token_id] for way, each in streams.items()}  # the prompt's step
    seconds = dict.fromkeys(llms, 0.0)
    left = [*llms]
    while left:
        for way in rng.sample(left, len(left)):
            started = time.perf_counter()
            delta = next(streams[way], None)
            seconds[way] += time.perf_counter() - started
            if delta is None:
                left.remove(way)
            else:
                answers[way].append(delta.token_id)
    assert all(each == answers[WITHOUT] for each in answers.values()), "speculation changed a text"
    return seconds


def bound(load: Loader, options: argparse.Namespace, _: str) -> dict[str, Any]:
    """Measure 512 tokens of one request where no draft is right, and where few are."""
    wrong = load({"num_speculative_tokens": 12}, proposer=AlwaysWrong())
    llms = {WITHOUT: load(None), AGAIN: load(None), "always wrong": wrong, "ngram": load(NGRAM)}
    make, temperature = LOADS["control"]
    rng, turns = random.Random(0), []
    for turn in range(options.repeats + 1):
        params = SamplingParams(
            temperature=temperature, seed=turn, max_tokens=LONG, ignore_eos=True
        )
        prompt = llms[WITHOUT].tokenizer.encode(make(100 * turn))
        turns.append(side_by_side(llms, prompt, params, rng))
    found = {}
    for way in [*llms][1:]:
        ratios = [each[WITHOUT] / each[way] for each in turns[1:]]
        found[way] = {"ratio": statistics.median(ratios), "ratios": ratios}
    tell("512 tokens", found)
    return {"control, 512 tokens": found}


PARTS: dict[str, Callable[[Loader, argparse.Namespace, str], dict[str, Any]]] = {
    "gains": gains,
    "batches": batches,
    "bound": bound,
}


def tell(name: str, found: dict[str, Any]) -> None:
    """Print the ratios of one comparison."""
    ratios = {way: each["ratio"] for way, each in found.items() if isinstance(each, dict)}
    print(name, {way: round(each, 2) for way, each in ratios.items()}, flush=True)


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--repeats", type=int, default=5, help="number of counted turns")
    parser.add_argument("--weights", nargs="*", default=["bfloat16", "auto"])
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS])
    options = parser.parse_args()
    results: dict[str, Any] = {"tokens": TOKENS, "turns": options.repeats}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8")) | results
    for weights in options.weights:

        def load(config: Any, weights: str = weights, **parts: Any) -> LLM:
            return LLM.load(
                weights=weights, speculative_config=config, kv_cache_memory="256M", **parts
            )

        llm = load(None)
        check_compiled(llm)
        stored_form = "bfloat16" if weights == "bfloat16" else llm.describe()["weights"].split()[0]
        for part in options.parts:
            print(f"{weights}, {part}:", flush=True)
            found = PARTS[part](load, options, stored_form)
            results.setdefault(weights, {})[part] = found
            results["load average"] = psutil.getloadavg()[0]
            if options.json is not None:
                write_results(options.json, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
