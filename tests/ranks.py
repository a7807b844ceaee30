"""Tiny models that ranks can share, loaded over real processes and closed again."""

import contextlib
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

from minigen import LLM, SamplingParams
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["abc", "abcdefghij" * 3, "abcdefghij" * 3 + "k", "q", "the end", "xyz" * 7]


def save_eight_heads(directory: Path) -> Path:
    """Save a model of 8 query heads and 2 KV heads, for 1, 2, 4 or 8 ranks; context 128."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    save_model(directory, "llama", vocab_size=TINY_VOCAB, hidden_size=64, **heads)
    save_tokenizer(directory)
    return directory


def save_six_heads(directory: Path, context: int) -> Path:
    """Save a model with 6 query heads and 6 KV heads, for 1, 2, 3 or 6 ranks."""
    sizes = {"intermediate_size": 96, "max_position_embeddings": context}
    save_model(directory, "llama-mha", vocab_size=TINY_VOCAB, **sizes)
    save_tokenizer(directory)
    return directory


@contextlib.contextmanager
def split(directory: Path, num_ranks: int, **options: Any) -> Generator[LLM, None, None]:
    """Load a model in float32 over `num_ranks` processes, which end with the block."""
    llm = LLM.load(directory, weights="float32", tensor_parallel_size=num_ranks, **options)
    try:
        yield llm
    finally:
        llm.close()


def answers(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    """Return the tokens of every answer to each prompt."""
    outputs = llm.generate(PROMPTS, params, progress=False)
    return [[choice.token_ids for choice in output.choices] for output in outputs]


FEW_BLOCKS: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 24}  # for 200
EIGHT_TOKENS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompts_of_200() -> list[list[int]]:
    """Return 200 short prompts with ten beginnings, of random tokens of the tiny vocabulary."""
    rng = random.Random(42)
    beginnings = [[rng.randrange(3, 60) for _ in range(8)] for _ in range(10)]
    return [
        beginnings[number % 10] + [rng.randrange(3, 60) for _ in range(number % 5 + 1)]
        for number in range(200)
    ]


def given_up(number: int) -> bool:
    return number % 10 == 3


def run_200(llm: LLM) -> dict[int, list[int]]:
    """Return the tokens of 200 requests at once, of which each tenth is aborted on its way."""
    states = llm.process_requests(prompts_of_200(), EIGHT_TOKENS)
    numbers = {state.sequence.sequence_id: number for number, state in enumerate(states)}
    for state in states:
        llm.engine.add(state.sequence)
    tokens: dict[int, list[int]] = {number: [] for number in range(len(states))}
    while llm.engine.has_work():
        for sequence, sampled in llm.engine.step():
            number = numbers[sequence.sequence_id]
            tokens[number].append(sampled.token_id)
            if given_up(number) and len(tokens[number]) == 3:
                llm.engine.abort(sequence.sequence_id)
    return tokens


def equal_for_200(llm: LLM, alone: LLM) -> None:
    """Check that 200 requests get the tokens of one process, with preemptions and aborts."""
    expected = run_200(alone)
    with llm.count_work() as counted:
        assert run_200(llm) == expected
    assert counted.preemptions > 0
    assert counted.tokens_cached > 0
    assert all(len(each) == (3 if given_up(n) else 8) for n, each in expected.items())
