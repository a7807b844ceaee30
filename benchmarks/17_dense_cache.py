"""What the KV cache saves, and what one step costs: `python benchmarks/17_dense_cache.py`.

On the default model in float32, by turns in one run: an answer with the cache and without it (every
step runs the whole text again), and eight prompts together and one after another.
"""

import statistics
from itertools import count

import torch
from common import interleaved, json_option, write_results

from minigen import LLM, SamplingParams, hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.model.attention import attend_packed
from minigen.model.transformer import build_transformer, dense_linear

NUM_TOKENS = 32
REPEATS = 3
PROMPT = "The history of the sea begins long before the first ships, when"


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
    llm = LLM.load(checkpoint.path, weights="float32")
    model = build_transformer(
        checkpoint.config, checkpoint.tensors, torch.float32, dense_linear(torch.float32)
    )
    prompt_ids = llm.tokenizer.encode(PROMPT)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    @torch.inference_mode()
    def without_cache() -> list[int]:
        ids = list(prompt_ids)
        for _ in range(NUM_TOKENS):
            attend = attend_packed([len(ids)], checkpoint.config.sliding_windows)
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
            ids.append(int(model.logits(hidden[-1:]).argmax()))
        return ids[len(prompt_ids) :]

    def with_cache() -> list[int]:
        return llm.generate(prompt_ids, greedy).token_ids

    assert without_cache() == with_cache(), "both must give the same answer"
    numbers = count()
    eight = [[*prompt_ids, next(numbers) + 1000] for _ in range(8)]
    seconds = interleaved(
        {
            "without cache": without_cache,
            "with cache": with_cache,
            "eight in turn": lambda: [llm.generate(each, greedy) for each in eight],
            "eight together": lambda: llm.generate(eight, greedy),
        },
        REPEATS,
    )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {
        "cache speeds up": medians["without cache"] / medians["with cache"],
        "batch of eight speeds up": medians["eight in turn"] / medians["eight together"],
    }
    for name, ratio in ratios.items():
        print(f"{name:<26} {ratio:5.2f}x")
    path = json_option()
    if path is not None:
        counts = {"prompt_tokens": len(prompt_ids), "output_tokens": NUM_TOKENS}
        write_results(path, {**counts, "repeats": REPEATS, "seconds": seconds, "ratios": ratios})


if __name__ == "__main__":
    main()
