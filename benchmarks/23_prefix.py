"""What a shared prefix saves: `python benchmarks/23_prefix.py`.

The time to first token (TTFT) of the default model on a system prompt of 500 tokens, shared by all
requests, and 20 tokens that differ; with the prefix cache and without it, by turns.
"""

import statistics
from itertools import count

from common import interleaved, json_option, random_prompts, write_results

from minigen import LLM, SamplingParams

SYSTEM_TOKENS = 500
OWN_TOKENS = 20
REPEATS = 15


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    engines = {
        "shared": LLM.load(enable_prefix_caching=True),
        "recomputed": LLM.load(enable_prefix_caching=False),
    }
    (system,) = random_prompts(1, SYSTEM_TOKENS, seed=0)
    seeds = count(1)
    params = SamplingParams(temperature=0, max_tokens=1)

    def ask(llm: LLM) -> None:
        (own,) = random_prompts(1, OWN_TOKENS, seed=next(seeds))
        llm.generate([*system, *own], params)

    seconds = interleaved(
        {name: lambda llm=llm: ask(llm) for name, llm in engines.items()}, REPEATS
    )
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    for name, milliseconds in medians.items():
        print(f"{name:<14} {milliseconds:7.1f} ms to the first token")
    ratio = medians["recomputed"] / medians["shared"]
    print(f"sharing is {ratio:.1f} times as fast")
    path = json_option()
    if path is not None:
        settings = {"system": SYSTEM_TOKENS, "own": OWN_TOKENS, "repeats": REPEATS}
        write_results(path, {"settings": settings, "milliseconds": medians, "ratio": ratio})


if __name__ == "__main__":
    main()
