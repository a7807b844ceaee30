"""A layer on one rank, written out with its messages; what they cost; ranks that schedule alone.

The package wraps two of a layer's products instead (`minigen.parallel.sharding`), so that the
model's own code does not know of ranks; the messages are the same.

Some engines broadcast requests instead of steps, and every rank schedules for itself. All ranks
must then decide alike. In the toy model here the next token follows from the sum of what all ranks
have read, row by row of the batch, so a disagreement shows at once.

Source: Patarasuk and Yuan 2009 for the ring; Shoeybi et al. 2019 for two all-reduces per layer.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm, swiglu
from minigen.model.transformer import AttendInLayer, Layer, Rotation, dense_linear, project_qkv
from minigen.parallel.comm import Comm, run_ranks
from minigen.parallel.sharding import ShardedTransformer, SummedLinear, build_share
from minigen.protocols import Linear
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence
from minigen.trace.events import Trace
from minigen_course.lab.cost_model import Machine, ModelShape, Step, decode_step
from minigen_course.lab.toy_engine import MOST_STEPS, VOCAB, right_slots


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Comm,
) -> Float[Tensor, "tokens hidden"]:
    """`run_layer` on one rank, whose `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x, and the norms; all return what the whole layer would.
    """
    normalised = rms_norm(x, layer.attention_norm, norm_eps)
    q, k, v = project_qkv(layer, normalised, rotation, head_dim, norm_eps)
    x = x + comm.all_reduce(layer.out(attend(q, k, v).flatten(-2)))
    hidden = layer.gate_up(rms_norm(x, layer.ffn_norm, norm_eps))
    gate, up = hidden.split(layer.gate_up.parts, dim=-1)
    return x + comm.all_reduce(layer.down(swiglu(gate, up)))


def continue_split(
    checkpoint: Checkpoint,
    num_ranks: int,
    token_ids: SequenceOf[int],
    num_tokens: int,
    run_layer: Callable[..., Tensor] = run_split_layer,
) -> list[int]:
    """The likeliest continuation, by ranks that are threads of this process.

    Every layer is run by `run_layer`. In float32, and without a cache: for a few tokens.
    """
    config = checkpoint.config

    def work(comm: Comm) -> list[int]:
        made: list[int] = []
        with torch.inference_mode():
            linear = dense_linear(torch.float32)
            model = build_share(config, checkpoint.tensors, torch.float32, linear, comm)
            layers = tuple(map(_without_messages, model.share.layers))
            bare = replace(model, share=replace(model.share, layers=layers))
            while len(made) < num_tokens:
                ids = [*token_ids, *made]
                hidden = _hidden(bare, ids, config.sliding_windows, run_layer)
                made.append(int(model.logits(hidden[-1:])[0].argmax()))
        return made

    return run_ranks(num_ranks, work)[0]


def _hidden(
    model: ShardedTransformer,
    token_ids: list[int],
    windows: SequenceOf[int | None],
    run_layer: Callable[..., Tensor],
) -> Tensor:
    share, x = model.share, model.embed(torch.tensor(token_ids))
    rotation = share.rotation(torch.arange(len(token_ids)))
    attend = attend_packed([len(token_ids)], windows)
    for layer_id, layer in enumerate(share.layers):
        in_layer = partial(attend, layer_id)
        x = run_layer(layer, x, rotation, in_layer, share.head_dim, share.norm_eps, model.comm)
    return x


def _without_messages(layer: Layer) -> Layer:
    return replace(layer, out=_own(layer.out), down=_own(layer.down))


def _own(linear: Linear) -> Linear:
    assert isinstance(linear, SummedLinear), "the rank's own part of a sum"
    return linear.linear


BYTES_A_NUMBER = 2  # activations travel in bfloat16


@dataclass(frozen=True)
class Link:
    """A connection between ranks: seconds that any message takes, bytes a second on top."""

    name: str
    latency: float
    bandwidth: float

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """The faster of a ring, which moves the fewest bytes, and a tree, which takes few turns.

        A ring takes 2 (n - 1) turns with an n-th of the bytes in each, a tree 2 log2 n with all.
        """
        if num_ranks == 1:
            return 0.0
        ring_turns, tree_turns = 2 * (num_ranks - 1), 2 * math.ceil(math.log2(num_ranks))
        ring = ring_turns * (self.latency + num_bytes / num_ranks / self.bandwidth)
        return min(ring, tree_turns * (self.latency + num_bytes / self.bandwidth))


LINKS: dict[
    str, Link
] = {  # orders of magnitude: bytes one way as data sheets say, and a usual turn
    each.name: each
    for each in (
        Link("NVLink 4", 2e-6, 450e9),
        Link("PCIe 5 x16", 5e-6, 63e9),
        Link("Ethernet 25 Gbit/s", 30e-6, 3.1e9),
    )
}


def fit_link(name: str, seconds_by_bytes: Mapping[int, float], num_ranks: int) -> Link:
    """The link that explains measured all-reduces best, small ones and large ones alike.

    As a ring: the time is 2 (n - 1) turns, each with a latency and an n-th of the bytes.
    """
    sizes = np.array(list(seconds_by_bytes), dtype=float)
    seconds = np.array(list(seconds_by_bytes.values()))
    turns = 2 * (num_ranks - 1)
    terms = np.stack([np.full(len(sizes), turns), turns * sizes / num_ranks], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(
        terms / seconds[:, None], np.ones(len(sizes)), rcond=None
    )
    return Link(name, float(latency), float(1 / per_byte))


def split_step_seconds(
    shape: ModelShape, machine: Machine, link: Link, num_ranks: int, batch: int, context: int
) -> tuple[float, float]:
    """Seconds of a decode step in its layers' work, and in its messages, on so many ranks.

    Each rank reads and computes an n-th. The messages are two all-reduces a layer and one for the
    embedding; the gather of the logits is left out.
    """
    whole = decode_step(shape, batch=batch, context=context, weight_bits=16)
    share = Step(
        whole.weight_bytes / num_ranks, whole.kv_bytes / num_ranks, whole.flops / num_ranks
    )
    message = link.all_reduce_seconds(batch * shape.hidden * BYTES_A_NUMBER, num_ranks)
    return share.seconds(machine), (2 * shape.layers + 1) * message


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

    def rows(self, chunks: SequenceOf[ScheduledChunk]) -> list[int]:
        """Store what is new; then this rank's part of each sum that a next token follows from."""
        self.manager.pop_pending_copies()
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            slots = right_slots(sequence.block_ids, first, chunk.num_tokens, BLOCK_SIZE)
            for slot, token in zip(slots, sequence.new_ids, strict=False):
                self.pool[slot] = token
        return [self._mixed(chunk) for chunk in chunks if chunk.samples]

    def _mixed(self, chunk: ScheduledChunk) -> int:
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
        chunks = [rank.scheduler.schedule() for rank in ranks]
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
