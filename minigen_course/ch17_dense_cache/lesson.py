"""Greedy generation with chapter 17's `DenseRunner` alone, without an engine."""

import torch

from minigen.llm import LLM
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.ch17_dense_cache import reference
from minigen_course.lab.inspect_model import transformer_of


def continue_dense(llm: LLM, prompt: str, num_tokens: int) -> list[int]:
    """Return the ids of the `num_tokens` tokens with which `DenseRunner` continues a prompt.

    Decoding is greedy, and does not stop at an end token.
    """
    model, config = transformer_of(llm), llm.config
    # Looked up at each call, so that `using` can replace the class with the learner's own.
    runner = reference.DenseRunner(
        model, config.kv_heads, config.sliding_windows, model.embedding.dtype
    )
    prompt_ids = tuple(llm.tokenizer.encode(prompt))
    sequence = Sequence(
        sequence_id=0,
        prompt_ids=prompt_ids,
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_output=num_tokens,
        end_ids=frozenset(),
    )
    while len(sequence.output_ids) < num_tokens:
        next_id = int(torch.argmax(runner.logits([sequence])[0]))
        sequence.num_computed = len(sequence)
        sequence.append(next_id)
    return sequence.output_ids
