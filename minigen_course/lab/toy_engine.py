"""The real engine around a toy model, which shows at once when keys and values are mixed up.

A slot of its KV cache holds a token. The next token follows from all tokens in a sequence's slots,
in order. So a part that writes into a wrong slot, or forgets a token, changes an answer.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache import paged
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline

VOCAB = 97
MOST_STEPS = 500
SlotsOf = Callable[[list[int], int, int, int], list[int]]


def right_slots(
    block_ids: list[int], num_computed: int, num_new: int, block_size: int
) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` earlier ones."""
    return paged.slots_of(block_ids, range(num_computed, num_computed + num_new), block_size)


@dataclass(frozen=True)
class Served:
    """The result of serving prompts: the answers, what clients received, and the work.

    `answers` are token ids per prompt, as the finished sequences hold them; `streamed` are the
    tokens that each client received.
    """

    answers: list[list[int]]
    streamed: list[list[int]]
    num_steps: int = field(compare=False)
    num_preempted: int = field(compare=False)


class ToyRunner:
    """Stores every chunk's tokens in their slots, then reads each sequence's context back."""

    def __init__(self, manager: BlockManager, slots_of: SlotsOf):
        self.manager, self.slots_of = manager, slots_of
        size = manager.block_size
        self.pool = [0] * (size * (manager.tables.shape[1] + 1))

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Tensor:
        """Return one row of logits for each chunk that gets a token."""
        self._copy_blocks()
        for chunk in chunks:
            self._store(chunk)
        ends = [chunk for chunk in chunks if chunk.samples]
        rows = torch.zeros(len(ends), VOCAB)
        for row, chunk in zip(rows, ends, strict=True):
            row[self._next_token(chunk)] = 1.0
        return rows

    def _copy_blocks(self) -> None:
        size = self.manager.block_size
        for source, target in self.manager.pop_pending_copies():
            self.pool[target * size : (target + 1) * size] = self.pool[
                source * size : (source + 1) * size
            ]

    def _store(self, chunk: ScheduledChunk) -> None:
        sequence, size = chunk.sequence, self.manager.block_size
        first, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        slots = self.slots_of(sequence.block_ids, first, chunk.num_tokens, size)
        for slot, token in zip(slots, sequence.token_ids[first:end], strict=True):
            self.pool[slot] = token

    def _next_token(self, chunk: ScheduledChunk) -> int:
        sequence, size = chunk.sequence, self.manager.block_size
        length = sequence.num_computed + chunk.num_tokens
        mixed = length
        for slot in right_slots(sequence.block_ids, 0, length, size):
            mixed = (mixed * 31 + self.pool[slot]) % 1_000_003
        return mixed % VOCAB


def likeliest(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
    """Return the token with the largest logit of each row."""
    return [SampledToken(int(row.argmax())) for row in logits]


def serve_toy(
    prompts: SequenceOf[SequenceOf[int]],
    *,
    scheduler: Any = ContinuousScheduler,
    prefix_cache: Any = None,
    slots_of: SlotsOf = right_slots,
    num_blocks: int = 100,
    block_size: int = 4,
    max_tokens: int = 12,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
) -> Served:
    """Serve all prompts at once, with `max_tokens` each; few `num_blocks` lead to preemption.

    Parts are classes, which are built as in `LLM.load`. Raises `RuntimeError` if requests are
    unfinished after `MOST_STEPS` steps, and any error of a part.
    """
    allocator, trace, timeline = BlockAllocator(num_blocks), Trace(), Timeline()
    cache = None if prefix_cache is None else prefix_cache(allocator, block_size)
    manager = BlockManager(allocator, cache, block_size, max_num_seqs, num_blocks, trace)
    planner = scheduler(manager, max_num_seqs, max_num_batched_tokens)
    engine = Engine(planner, ToyRunner(manager, slots_of), likeliest, trace)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sequences = [
        Sequence(number, tuple(prompt), greedy, 0, max_tokens, frozenset())
        for number, prompt in enumerate(prompts)
    ]
    streamed: list[list[int]] = [[] for _ in sequences]
    for sequence in sequences:
        engine.add(sequence)
    num_steps = 0
    with trace.subscribed(timeline):
        while engine.has_work():
            num_steps += 1
            if num_steps > MOST_STEPS:
                raise RuntimeError(f"after {MOST_STEPS} steps some requests are unfinished")
            for sequence, token in engine.step():
                streamed[sequence.sequence_id].append(token.token_id)
    answers = [each.output_ids for each in sequences]
    return Served(answers, streamed, num_steps, timeline.work.preemptions)
