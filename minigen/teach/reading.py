"""Texts that a loaded engine reads a token a step, as decode does: its logits, and its time."""

import math
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.llm import LLM
from minigen.params import SamplingParams
from minigen.sequence import Chunk, Sequence

_salts = count()  # nothing is taken from texts that were read before


@dataclass(frozen=True)
class Reading:
    """The logits after each token of each text, and the seconds of each step."""

    logits: tuple[Float[Tensor, "tokens vocab"], ...]
    seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """Of a step that nothing disturbed: one in ten takes less."""
        return sorted(self.seconds)[len(self.seconds) // 10]


def read_along(llm: LLM, *texts: SequenceOf[int]) -> Reading:
    """Give the engine's runner one token of every text a step, whatever it would say itself."""
    runner = llm.engine.runner
    manager = runner.manager  # type: ignore[attr-defined]
    greedy, salt = SamplingParams(temperature=0.0), f"reading {next(_salts)}"
    sequences = [
        Sequence(-1 - number, (ids[0],), greedy, 0, len(ids), frozenset(), cache_salt=salt)
        for number, ids in enumerate(texts)
    ]
    logits: list[list[Tensor]] = [[] for _ in texts]
    seconds = []
    try:
        for step in range(max(len(ids) for ids in texts)):
            running = [number for number, ids in enumerate(texts) if step < len(ids)]
            for number in running:
                if step == 0:
                    manager.begin(sequences[number], 1)
                else:
                    sequences[number].append(texts[number][step])
                    manager.reserve(sequences[number], 1)
            begun = time.perf_counter()
            found = runner.logits([Chunk(sequences[number], 1) for number in running])
            seconds.append(time.perf_counter() - begun)
            for number, row in zip(running, found.clone(), strict=True):
                logits[number].append(row)
                manager.advance(sequences[number], 1)
    finally:
        for sequence in sequences:
            manager.release(sequence)
    return Reading(tuple(torch.stack(rows) for rows in logits), tuple(seconds))


def agreement(one: SequenceOf[Tensor], other: SequenceOf[Tensor]) -> float:
    """Share of the places where both readings find the same token the likeliest.

    Each is the logits of the same texts, [tokens, vocab] for each text.
    """
    likeliest, others = (torch.cat([text.argmax(-1) for text in each]) for each in (one, other))
    return float((likeliest == others).float().mean())


def perplexity_of(logits: SequenceOf[Tensor], texts: SequenceOf[SequenceOf[int]]) -> float:
    """Among how many equally likely tokens one might as well have chosen, over these texts."""
    found = [
        scores[:-1].double().log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
        for scores, ids in zip(logits, texts, strict=True)
    ]
    return math.exp(-float(torch.cat(found).mean()))
