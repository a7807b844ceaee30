"""The cost of sampling 32 tokens, by torch and by the kernel: `python benchmarks/34_sampling.py`.

The logits come from the default model, in a step that decodes 32 different texts.
"""

import statistics
from typing import Any

import torch
from common import interleaved, json_option, write_results

from minigen import LLM, SamplingParams
from minigen.hardware import torch_threads
from minigen.kernels.cpu.runner import KernelChooser
from minigen.sampling.sampler import choose_tokens
from minigen.sequence import Sequence

ROWS, REPEATS = 32, 15
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 40, top-p 0.9, repetition 1.1": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
}
TOPICS = "rain bread iron music trees glass paper salt".split()
BEGINNINGS = ("The history of", "How to make", "A story about", "I once saw")


def logits_of_a_step(llm: LLM) -> tuple[torch.Tensor, list[Sequence]]:
    """Return the logits of the last of five steps, and the sequences that they belong to."""
    found: list[tuple[torch.Tensor, list[Sequence]]] = []
    sampler = llm.engine.sampler

    def listen(logits: torch.Tensor, sequences: Any) -> Any:
        if len(sequences) == ROWS:
            found.append((logits.clone(), list(sequences)))
        return sampler(logits, sequences)

    llm.engine.sampler = listen
    prompts = [f"{beginning} {topic}" for beginning in BEGINNINGS for topic in TOPICS]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    return found[-1]


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    num_threads = torch_threads()
    llm = LLM.load(max_num_seqs=ROWS)
    logits, sequences = logits_of_a_step(llm)
    kernel = KernelChooser(logits.shape[1], num_threads)
    results: dict[str, Any] = {}
    for name, asked in SETTINGS.items():
        own = [
            Sequence(i, each.prompt_ids, SamplingParams(seed=i, **asked), i, 99, each.end_ids)
            for i, each in enumerate(sequences)
        ]

        def by_torch(own: list[Sequence] = own) -> list[int]:
            torch.set_num_threads(num_threads)
            return choose_tokens(logits, own)

        def by_kernel(own: list[Sequence] = own) -> list[int]:
            return kernel(logits, own)

        equal = sum(a == b for a, b in zip(by_torch(), by_kernel(), strict=True))
        seconds = interleaved({"torch": by_torch, "kernel": by_kernel}, REPEATS)
        medians = {each: statistics.median(times) * 1e3 for each, times in seconds.items()}
        ratio = medians["torch"] / medians["kernel"]
        results[name] = {"milliseconds": medians, "ratio": ratio, "equal tokens": equal}
        print(
            f"{name:38} torch {medians['torch']:7.2f} ms, kernel {medians['kernel']:5.2f} ms, "
            f"{ratio:5.1f}x, {equal} of {ROWS} tokens equal"
        )
    if path := json_option():
        write_results(path, {"rows": ROWS, "threads": num_threads, "settings": results})


if __name__ == "__main__":
    main()
