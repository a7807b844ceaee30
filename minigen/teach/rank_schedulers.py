"""Ranks that each schedule for themselves, around a toy model: what comes of it if they disagree.

Some engines broadcast requests instead of steps, and have every rank decide for itself who runs.
All ranks must then decide alike. Here each has half of every token, as it were: the next token
follows from the sum of what all ranks have read, row by row of the batch.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import zip_longest

from minigen.cache.blocks import BlockAllocator
from minigen.cache.manager import BlockManager
from minigen.engine.scheduler import ContinuousScheduler
from minigen.parallel.comm import Comm, run_ranks
from minigen.params import SamplingParams
from minigen.sequence import Chunk, SampledToken, Sequence
from minigen.teach.toy_engine import MOST_STEPS, VOCAB, right_slots
from minigen.trace import Trace

BLOCK_SIZE = 4
PADDED_TO = 8  # tokens: engines record their steps for some sizes, and fill batches up
Batch = dict[int, int]  # request -> tokens
AgreedBlocks = Callable[[Comm, int, int, int], int]


@dataclass(frozen=True)
class Parted:
    """What became of prompts: each rank's answers, and each rank's batch at every step.

    `stuck` if the ranks came to send messages of different sizes, and waited for ever.
    """

    answers: list[list[list[int]]]
    batches: list[list[Batch]]
    stuck: bool

    @property
    def first_difference(self) -> int | None:
        """The step in which the ranks ran different batches first; None if they never did."""
        for step, each in enumerate(self.batches):
            if any(batch != each[0] for batch in each):
                return step
        return None


class _Rank:
    def __init__(
        self, rank: int, num_blocks: int, prompts: SequenceOf[SequenceOf[int]], max_tokens: int
    ):
        self.factor = 31 + 2 * rank
        blocks, seats = BlockAllocator(num_blocks), len(prompts)
        self.manager = BlockManager(blocks, None, BLOCK_SIZE, seats, num_blocks, Trace())
        self.scheduler = ContinuousScheduler(self.manager, seats, 64)
        self.pool = [0] * (BLOCK_SIZE * (num_blocks + 1))
        greedy = SamplingParams(temperature=0.0)
        self.sequences = [
            Sequence(number, tuple(prompt), greedy, 0, max_tokens, frozenset())
            for number, prompt in enumerate(prompts)
        ]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        return any(each.finish_reason is None for each in self.sequences)

    def rows(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Store what is new; then this rank's part of each sum that a next token follows from."""
        self.manager.take_copies()
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            slots = right_slots(sequence.block_ids, first, chunk.num_tokens, BLOCK_SIZE)
            for slot, token in zip(slots, sequence.new_ids, strict=False):
                self.pool[slot] = token
        return [self._mixed(chunk) for chunk in chunks if chunk.samples]

    def _mixed(self, chunk: Chunk) -> int:
        length = chunk.sequence.num_computed + chunk.num_tokens
        mixed = length
        for slot in right_slots(chunk.sequence.block_ids, 0, length, BLOCK_SIZE):
            mixed = (mixed * self.factor + self.pool[slot]) % 1_000_003
        return mixed


def serve_on_ranks(
    prompts: SequenceOf[SequenceOf[int]], num_blocks: SequenceOf[int], max_tokens: int = 12
) -> Parted:
    """Serve all prompts, `max_tokens` to each, on ranks that have so many blocks each."""
    ranks = [_Rank(rank, each, prompts, max_tokens) for rank, each in enumerate(num_blocks)]
    batches: list[list[Batch]] = []
    stuck = False
    while any(rank.has_work for rank in ranks) and len(batches) < MOST_STEPS:
        chunks = [rank.scheduler.next_batch() for rank in ranks]
        batches.append(
            [{each.sequence.sequence_id: each.num_tokens for each in own} for own in chunks]
        )
        stuck = len({message_size(each) for each in batches[-1]}) > 1
        if stuck:
            break
        rows = [rank.rows(own) for rank, own in zip(ranks, chunks, strict=True)]
        sums = [sum(each) % VOCAB for each in zip_longest(*rows, fillvalue=0)]
        for rank, own, mine in zip(ranks, chunks, rows, strict=True):
            rank.scheduler.commit(own, [SampledToken(each) for each in sums[: len(mine)]])
    answers = [[each.output_ids for each in rank.sequences] for rank in ranks]
    return Parted(answers, batches, stuck)


def message_size(batch: Batch) -> int:
    """Tokens that a batch's all-reduce is for: those of the batch, filled up."""
    return -(-sum(batch.values()) // PADDED_TO) * PADDED_TO


def on_ranks(
    agreed_blocks: AgreedBlocks, memories: SequenceOf[tuple[int, int]], block_bytes: int
) -> list[int]:
    """What each rank's call of `agreed_blocks` returns, for each rank's (free, working) bytes.

    Raises what a rank raises, and `WorkerError` if one waits for a message that never comes.
    """
    return run_ranks(
        len(memories), lambda comm: agreed_blocks(comm, *memories[comm.rank], block_bytes), 1.0
    )
