"""What batching gains: `python benchmarks/25_engine.py`.

Two comparisons on the default model, each by turns:

- 128 requests (64 tokens in, answers log-uniform in 8 to 256 tokens), at most 8 at once, by
  continuous and by static batching. Static batching is measured twice: minigen's, which drops
  finished rows from a batch, and padded, as in engines that compute finished rows until the batch's
  last answer (Yu et al. 2022, Orca, section 3);
- 32 requests (64 in, 64 out) together, and one at a time (only the first few of them).
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from common import interleaved, random_prompts, write_results

from minigen import LLM, SamplingParams

PROMPT_TOKENS = 64
CROWD, AT_ONCE, SHORTEST, LONGEST = 128, 8, 8, 256
TOGETHER, ONE_BY_ONE, OUTPUT_TOKENS = 32, 4, 64


def exactly(num_tokens: int) -> SamplingParams:
    """Return greedy params for exactly `num_tokens` tokens; the model's own end is ignored."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def log_uniform(count: int, seed: int) -> list[int]:
    """Return lengths from SHORTEST to LONGEST, log-uniform, in random order.

    There are as many from 8 to 16 as from 128 to 256. They are spaced evenly, not drawn: only the
    order is random.
    """
    ratio = LONGEST / SHORTEST
    lengths = [round(SHORTEST * ratio ** ((index + 0.5) / count)) for index in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def padded(lengths: list[int]) -> list[int]:
    """Return the answer lengths with padding: a row runs until its batch's longest answer ends."""
    batches = [lengths[begin : begin + AT_ONCE] for begin in range(0, len(lengths), AT_ONCE)]
    return [max(batch) for batch in batches for _ in batch]


def continuous_against_static(repeats: int) -> dict[str, object]:
    """Return the output tokens per second of each policy on the same requests.

    The order of the requests changes with each turn. Tokens that padding computes do not count as
    output.
    """
    prompts = random_prompts(CROWD, PROMPT_TOKENS, seed=1)
    engines = {
        name: LLM.load(scheduler=name.split()[0], max_num_seqs=AT_ONCE, enable_prefix_caching=False)
        for name in ("continuous", "static", "static padded")
    }
    for llm in engines.values():
        llm.generate(prompts[:AT_ONCE], exactly(SHORTEST), progress=False)  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    steps: dict[str, list[int]] = {name: [] for name in engines}
    for turn in range(repeats):
        lengths = log_uniform(CROWD, seed=turn)
        for name, llm in engines.items():
            params = [exactly(n) for n in (padded(lengths) if "padded" in name else lengths)]
            with llm.count_work() as counters:
                started = time.perf_counter()
                llm.generate(prompts, params, progress=False)
                seconds[name].append(time.perf_counter() - started)
            steps[name].append(counters.steps)
    num_tokens = sum(log_uniform(CROWD, seed=0))
    ratios = {
        name: [other / own for own, other in zip(seconds["continuous"], times, strict=True)]
        for name, times in seconds.items()
        if name != "continuous"
    }
    return {
        "requests": CROWD,
        "at_once": AT_ONCE,
        "output_tokens": num_tokens,
        "output_tokens_per_second": {
            name: num_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "steps": steps,
        "ratio": statistics.median(ratios["static"]),
        "ratio_to_padded": statistics.median(ratios["static padded"]),
        "ratios": ratios,
    }


def together_against_one_at_a_time(repeats: int) -> dict[str, object]:
    """Return output tokens per second for 32 requests together, and one after the other."""
    prompts = random_prompts(TOGETHER, PROMPT_TOKENS, seed=2)
    llm = LLM.load(max_num_seqs=TOGETHER, enable_prefix_caching=False)

    def one_by_one() -> None:
        for prompt in prompts[:ONE_BY_ONE]:
            llm.generate(prompt, exactly(OUTPUT_TOKENS))

    seconds = interleaved(
        {
            "together": lambda: llm.generate(prompts, exactly(OUTPUT_TOKENS), progress=False),
            "one at a time": one_by_one,
        },
        repeats,
    )
    counts = {"together": TOGETHER * OUTPUT_TOKENS, "one at a time": ONE_BY_ONE * OUTPUT_TOKENS}
    rates = {name: counts[name] / statistics.median(times) for name, times in seconds.items()}
    return {
        "requests": TOGETHER,
        "output_tokens_per_second": rates,
        "ratio": rates["together"] / rates["one at a time"],
    }


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--repeats", type=int, default=3, help="number of counted turns")
    options = parser.parse_args()
    results = {
        "together_against_one_at_a_time": together_against_one_at_a_time(options.repeats),
        "continuous_against_static": continuous_against_static(options.repeats),
    }
    for name, found in results.items():
        print(name.replace("_", " "))
        for which, rate in found["output_tokens_per_second"].items():  # type: ignore[attr-defined]
            print(f"  {which:<14} {rate:7.1f} output tokens/s")
        print(f"  ratio          {found['ratio']:7.2f}")
        if "ratio_to_padded" in found:
            print(f"  to padded      {found['ratio_to_padded']:7.2f}")
    if options.json is not None:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
