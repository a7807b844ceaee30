"""What batching gains: `python benchmarks/25_engine.py`.

The default model, in two comparisons, each taking turns:
- 128 requests (64 tokens in, answers log-uniform in 8 to 256 tokens), at most 8 at once, by
  continuous and by static batching;
- 32 requests (64 in, 64 out) together, and one at a time (the first few of them).
"""

import argparse
import math
import random
import statistics
from pathlib import Path

from common import interleaved, random_prompts, write_results

from minigen import LLM, SamplingParams

PROMPT_TOKENS = 64
CROWD, AT_ONCE, SHORTEST, LONGEST = 128, 8, 8, 256
TOGETHER, ONE_BY_ONE, OUTPUT_TOKENS = 32, 4, 64


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, so many tokens, whatever the model would like to stop at."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def log_uniform(count: int) -> list[int]:
    """Lengths from SHORTEST to LONGEST, as many between 8 and 16 as between 128 and 256."""
    rng = random.Random(0)
    low, high = math.log(SHORTEST), math.log(LONGEST)
    return [round(math.exp(rng.uniform(low, high))) for _ in range(count)]


def continuous_against_static(repeats: int) -> dict[str, object]:
    """Output tokens a second of either scheduler on the same requests."""
    prompts = random_prompts(CROWD, PROMPT_TOKENS, seed=1)
    lengths = log_uniform(CROWD)
    params = [exactly(length) for length in lengths]
    engines = {
        name: LLM.load(scheduler=name, max_sequences=AT_ONCE, prefix_cache=False)
        for name in ("continuous", "static")
    }
    seconds = interleaved(
        {
            name: lambda llm=llm: llm.generate(prompts, params, progress=False)
            for name, llm in engines.items()
        },
        repeats,
    )
    rates = {name: sum(lengths) / statistics.median(times) for name, times in seconds.items()}
    ratios = [s / c for c, s in zip(seconds["continuous"], seconds["static"], strict=True)]
    return {
        "requests": CROWD,
        "at_once": AT_ONCE,
        "output_tokens": sum(lengths),
        "output_tokens_per_second": rates,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def together_against_one_at_a_time(repeats: int) -> dict[str, object]:
    """Output tokens a second of 32 requests at once, and of each after the other."""
    prompts = random_prompts(TOGETHER, PROMPT_TOKENS, seed=2)
    llm = LLM.load(max_sequences=TOGETHER, prefix_cache=False)

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
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--repeats", type=int, default=2, help="turns that are counted")
    options = parser.parse_args()
    results = {
        "together_against_one_at_a_time": together_against_one_at_a_time(options.repeats + 1),
        "continuous_against_static": continuous_against_static(options.repeats),
    }
    for name, found in results.items():
        print(name.replace("_", " "))
        for which, rate in found["output_tokens_per_second"].items():  # type: ignore[attr-defined]
            print(f"  {which:<14} {rate:7.1f} output tokens/s")
        print(f"  ratio          {found['ratio']:7.2f}")
    if options.json is not None:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
