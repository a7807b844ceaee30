"""What speculation gains and costs: `python benchmarks/speculation.py`.

A load of copying and editing, whose answers repeat their prompts, and a control whose sampled
answers do not. In each form of the weights and each batch, the decode of the same requests is timed
without speculation and with each proposer, by turns. All give the same texts, which is checked.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from common import write_results

from minigen import LLM, SamplingParams
from minigen.trace.events import EventKind

TOKENS = 128
BATCHES = (1, 2, 4, 8, 16)
WAYS: dict[str, Any] = {
    "without": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 12},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12},
}
ALWAYS_WRONG = "always wrong"
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


def decode_seconds(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, list[list[int]], int]:
    """Return the seconds from the first token of all to the last, the answers, and the steps."""
    with llm.record() as recorder:
        outputs = llm.generate(prompts, params, progress=False)
    tokens = [each for each in recorder.events if each.kind is EventKind.NEW_TOKEN]
    firsts: dict[int | None, int] = {}
    for each in tokens:
        firsts.setdefault(each.sequence_id, each.time_ns)
    start, end = max(firsts.values()), tokens[-1].time_ns
    steps = sum(each.kind is EventKind.STEP for each in recorder.events)
    return (end - start) / 1e9, [each.token_ids for each in outputs], steps


def measure(weights: str, load: str, batch: int, repeats: int, llms: dict[str, LLM]) -> Any:
    """Return the ratios of decode time without speculation to that of each way."""
    make, temperature = LOADS[load]
    tokenizer = llms["without"].tokenizer
    seconds: dict[str, list[float]] = {way: [] for way in llms}
    steps: dict[str, int] = {}
    drafted, accepted = dict.fromkeys(llms, 0), dict.fromkeys(llms, 0)
    for turn in range(repeats + 1):
        prompts = [tokenizer.encode(make(100 * turn + row)) for row in range(batch)]
        params = [
            SamplingParams(temperature=temperature, seed=row, max_tokens=TOKENS, ignore_eos=True)
            for row in range(batch)
        ]
        texts: list[Any] = []
        for way, llm in llms.items():
            speculator = llm.engine.speculator
            assert speculator is not None
            before = (speculator.counts.drafted, speculator.counts.accepted)
            spent, answers, steps[way] = decode_seconds(llm, prompts, params)
            texts.append(answers)
            if turn:
                seconds[way].append(spent)
                drafted[way] += speculator.counts.drafted - before[0]
                accepted[way] += speculator.counts.accepted - before[1]
        assert all(each == texts[0] for each in texts), "speculation changed a text"
    found: dict[str, Any] = {
        "tokens a second without": batch * (TOKENS - 1) / statistics.median(seconds["without"])
    }
    for way in [*llms][1:]:
        ratios = [a / b for a, b in zip(seconds["without"], seconds[way], strict=True)]
        found[way] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "accepted of drafted": accepted[way] / drafted[way] if drafted[way] else None,
            "tokens a step and sequence": (TOKENS - 1) / (steps[way] - 1),
        }
    return found


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--repeats", type=int, default=5, help="number of counted turns")
    parser.add_argument("--weights", nargs="*", default=["bfloat16", "auto"])
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    options = parser.parse_args()
    results: dict[str, Any] = {"tokens": TOKENS, "turns": options.repeats}
    results["load average"] = [psutil.getloadavg()[0]]
    for weights in options.weights:
        llms = {
            way: LLM.load(weights=weights, speculative_config=config, kv_cache_memory="256M")
            for way, config in WAYS.items()
        }
        llms[ALWAYS_WRONG] = LLM.load(
            weights=weights,
            proposer=AlwaysWrong(),
            speculative_config={"num_speculative_tokens": 12},
            kv_cache_memory="256M",
        )
        runner = llms["without"].describe()["runner"]
        if not runner.startswith("a whole step compiled"):
            parser.error(f"compile the kernels first (minigen compile): the runner is {runner}.")
        for load in LOADS:
            for batch in options.batches:
                name = f"{weights}, {load}, batch {batch}"
                results[name] = measure(weights, load, batch, options.repeats, llms)
                ratios = {w: r["ratio"] for w, r in results[name].items() if isinstance(r, dict)}
                print(name, json.dumps(ratios), flush=True)
    results["load average"].append(psutil.getloadavg()[0])
    print(json.dumps(results, indent=1))
    if options.json is not None:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
