"""An answer from the dense cache alone: the runner of chapter 17, without the engine around it."""

import torch

from minigen.llm import LLM
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.ch17_dense_cache import reference
from minigen_course.lab.inspect_model import transformer_of


def continue_dense(llm: LLM, prompt: str, num_tokens: int) -> list[int]:
    """The likeliest continuation of a prompt, so many tokens long, by `DenseRunner`."""
    model, config = transformer_of(llm), llm.config
    # Looked up when it is called, so that `using` can put a learner's own in its place.
    runner = reference.DenseRunner(
        model, config.kv_heads, config.sliding_windows, model.embedding.dtype
    )
    prompt_ids = tuple(llm.tokenizer.encode(prompt))
    greedy = SamplingParams(temperature=0.0)
    sequence = Sequence(0, prompt_ids, greedy, 0, num_tokens, frozenset())
    while len(sequence.output_ids) < num_tokens:
        best = int(torch.argmax(runner.logits([sequence])[0]))
        sequence.num_computed = len(sequence)
        sequence.append(best)
    return sequence.output_ids
