"""A layer on one rank with its messages, the messages and their cost, ranks that schedule alone.

The package wraps two of a layer's products instead (`minigen.parallel.sharding`), so the model's
code does not depend on ranks; the messages are the same.

Some engines broadcast requests instead of steps, and every rank schedules for itself. Then all
ranks must make the same decisions. In the toy model here, the next token depends on a sum over all
ranks, one sum per row of the batch, so a disagreement shows at once.

Sources: Patarasuk and Yuan 2009 for the ring; Shoeybi et al. 2019 for two all-reduces per layer.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from queue import Empty, SimpleQueue

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import WorkerError
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm, swiglu
from minigen.model.transformer import AttendInLayer, Layer, Rotation, dense_linear, project_qkv
from minigen.parallel.comm import Collectives, run_ranks
from minigen.parallel.sharding import ShardedTransformer, SummedLinear, build_share
from minigen.protocols import Linear
from minigen.sequence import SampledToken
from minigen_course.lab.cost_model import Machine, ModelShape, Step, decode_step
from minigen_course.lab.toy_engine import MOST_STEPS, VOCAB, TokenMemory, toy_family, toy_manager


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer on one rank; its `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x and the norms, and all return the result of the whole layer.
    """
    normalised = rms_norm(x, layer.attention_norm, norm_eps)
    q, k, v = project_qkv(layer, normalised, rotation, head_dim, norm_eps)
    x = x + comm.all_reduce(layer.out(attend(q, k, v).flatten(-2)))
    hidden = layer.gate_up(rms_norm(x, layer.ffn_norm, norm_eps))
    gate, up = hidden.split(layer.gate_up.parts, dim=-1)
    return x + comm.all_reduce(layer.down(swiglu(gate, up)))


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer whose attention and feed-forward both read x after `attention_norm`.

    Both results are added to x. As in `run_split_layer`, `layer` has some of the heads and a slice
    of the ffn, and all ranks return the result of the whole layer, here after one message.
    """
    normalised = rms_norm(x, layer.attention_norm, norm_eps)
    q, k, v = project_qkv(layer, normalised, rotation, head_dim, norm_eps)
    gate, up = layer.gate_up(normalised).split(layer.gate_up.parts, dim=-1)
    mixture = attend(q, k, v).flatten(-2)
    return x + comm.all_reduce(layer.out(mixture) + layer.down(swiglu(gate, up)))


def fused_rows(parts: SequenceOf[int], rank: int, num_ranks: int) -> list[range]:
    """Return the stored rows that a rank needs of several matrices that lie in one tensor.

    The tensor has the rows of all matrices one after another, `parts` says how many rows each
    matrix has, and each is cut evenly, by columns in the sense of y = x W. There is one range for
    each matrix.

    >>> fused_rows([4, 4], rank=1, num_ranks=2)
    [range(2, 4), range(6, 8)]
    """
    found, first = [], 0
    for num_rows in parts:
        width = num_rows // num_ranks
        found.append(range(first + rank * width, first + (rank + 1) * width))
        first += num_rows
    return found


PassOn = Callable[[Tensor], Tensor]


def ring_all_reduce(
    x: Float[Tensor, " numbers"], rank: int, num_ranks: int, pass_on: PassOn
) -> Float[Tensor, " numbers"]:
    """Return the sum of all ranks' x, by messages to the next rank in a ring only.

    `pass_on(piece)` sends a piece to the next rank, and returns the piece that came from the rank
    before. All ranks call it 2 (n - 1) times, with an n-th of the numbers each time; x has a
    multiple of n numbers, and stays as it is.
    """
    pieces = list(x.chunk(num_ranks))
    for turn in range(num_ranks - 1):  # reduce-scatter: each piece grows on its way round
        received = pass_on(pieces[(rank - turn) % num_ranks])
        place = (rank - turn - 1) % num_ranks
        pieces[place] = pieces[place] + received
    for turn in range(num_ranks - 1):  # all-gather: each finished piece goes round once more
        received = pass_on(pieces[(rank + 1 - turn) % num_ranks])
        pieces[(rank - turn) % num_ranks] = received
    return torch.cat(pieces)


RingAllReduce = Callable[[Tensor, int, int, PassOn], Tensor]


PATIENCE = 30.0  # seconds that a rank of a ring waits for the rank before


@dataclass(frozen=True)
class RingComm:
    """A rank among threads that sends to the next rank only; `inboxes` has a queue for each rank.

    Raises `WorkerError` if the rank before sends nothing for `PATIENCE` seconds.
    """

    rank: int
    num_ranks: int
    ring: RingAllReduce
    inboxes: SequenceOf[SimpleQueue[Tensor]]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Fill x up to a multiple of n numbers, and add it up in the ring."""
        missing = -x.numel() % self.num_ranks
        numbers = functional.pad(x.flatten(), (0, missing))
        summed = self.ring(numbers, self.rank, self.num_ranks, self.pass_on)
        return summed[: x.numel()].view_as(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Pass every rank's x round the ring once."""
        arrived = [x]  # this rank's own, then that of the rank before, and so on
        for _ in range(self.num_ranks - 1):
            arrived.append(self.pass_on(arrived[-1]))
        ordered = [arrived[(self.rank - rank) % self.num_ranks] for rank in range(self.num_ranks)]
        return torch.cat(ordered, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Pass rank 0's x on from rank to rank; what rank 0 receives it ignores."""
        for _ in range(self.num_ranks - 1):
            received = self.pass_on(x)
            x = received if self.rank else x
        return x

    def pass_on(self, piece: Tensor) -> Tensor:
        """Send a piece to the next rank, and return the one that the rank before has sent."""
        self.inboxes[(self.rank + 1) % self.num_ranks].put(piece.clone())
        try:
            return self.inboxes[self.rank].get(timeout=PATIENCE)
        except Empty:
            raise WorkerError(f"Rank {self.rank} waited for a piece that did not come.") from None


def continue_split(
    checkpoint: Checkpoint,
    num_ranks: int,
    token_ids: SequenceOf[int],
    num_tokens: int,
    run_layer: Callable[..., Tensor] = run_split_layer,
    ring: RingAllReduce | None = None,
) -> list[int]:
    """Continue a prompt greedily on ranks that are threads of this process.

    Every layer is run by `run_layer`. If `ring` is given, it runs every all-reduce, and all
    messages go from each rank to the next one only. It runs in float32 without a KV cache, so it
    suits only a few tokens.
    """
    config = checkpoint.config
    inboxes = [SimpleQueue[Tensor]() for _ in range(num_ranks)]

    def work(threads: Collectives) -> list[int]:
        comm = RingComm(threads.rank, num_ranks, ring, inboxes) if ring else threads
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
    assert isinstance(linear, SummedLinear), "a row split, whose result is a partial sum"
    return linear.linear


def choose_all_reduce(
    num_bytes: float, num_ranks: int, latency: float, bandwidth: float
) -> tuple[str, float]:
    """Return "ring" or "tree", whichever takes fewer seconds, and these seconds.

    If both take equally long, it is a ring. The latency is in seconds per turn, the bandwidth in
    bytes per second.
    """
    in_ring = 2 * (num_ranks - 1) * (latency + num_bytes / num_ranks / bandwidth)
    in_tree = 2 * math.ceil(math.log2(num_ranks)) * (latency + num_bytes / bandwidth)
    return ("tree", in_tree) if in_tree < in_ring else ("ring", in_ring)


BYTES_A_NUMBER = 2  # activations are sent in bfloat16


@dataclass(frozen=True)
class Link:
    """A connection between ranks: seconds per message, and bytes per second on top."""

    name: str
    latency: float
    bandwidth: float

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of a ring or of a tree, whichever is faster.

        Both move the same bytes in all. A ring spreads them evenly over the links, which all work
        in every turn; a tree takes fewer turns, from four ranks on.
        """
        return min(self.ring_seconds(num_bytes, num_ranks), self.tree_seconds(num_bytes, num_ranks))

    def ring_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of 2 (n - 1) turns, each with 1/n of the bytes."""
        turns = 2 * (num_ranks - 1)
        return turns * (self.latency + num_bytes / num_ranks / self.bandwidth)

    def tree_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of 2 log2(n) turns, rounded up, each with all bytes."""
        turns = 2 * math.ceil(math.log2(num_ranks))
        return turns * (self.latency + num_bytes / self.bandwidth)


# Bytes in one direction from data sheets. The latencies per turn are assumptions. NCCL's constants
# for a ring are 0.6 to 3.4 and 1.0 to 5.7 µs, by its protocols, with 6.6 µs or more per call; a
# network has 5 µs and more (src/graph/tuning.cc). 30 µs is the order of a TCP message between
# machines. Inside one machine NCCL's tree is a chain; the logarithm is what kernels that read
# each other's memory can reach.
LINKS: dict[str, Link] = {
    each.name: each
    for each in (
        Link("NVLink 4", 2e-6, 450e9),
        Link("PCIe 5 x16", 5e-6, 63e9),
        Link("InfiniBand 400 Gbit/s", 5e-6, 50e9),
        Link("Ethernet 25 Gbit/s", 30e-6, 3.1e9),
    )
}


def fit_link(name: str, seconds_by_bytes: Mapping[int, float], num_ranks: int) -> Link:
    """Fit a link to measured all-reduces, with the same weight for small and large ones.

    The model is a ring: 2 (n - 1) turns, each with a latency and 1/n of the bytes.
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
    """Return the seconds of a decode step in the layers' work, and in messages.

    Each rank reads and computes 1/`num_ranks` of the model. The messages are two all-reduces per
    layer and one for the embedding; the gather of the logits is left out.
    """
    whole = decode_step(shape, batch=batch, context=context, weight_bits=16)
    share = Step(
        whole.weight_bytes / num_ranks, whole.kv_bytes / num_ranks, whole.flops / num_ranks
    )
    message = link.all_reduce_seconds(batch * shape.hidden * BYTES_A_NUMBER, num_ranks)
    return share.seconds(machine), (2 * shape.layers + 1) * message


BLOCK_SIZE = 4
PADDED_TO = 8  # tokens: engines record their steps for a few sizes, and pad batches to them
Batch = dict[int, int]  # request -> tokens
AgreedBlocks = Callable[[Collectives, int, int, int], int]


@dataclass(frozen=True)
class RankRuns:
    """A run on ranks: each rank's answers by request, and each step's batch by rank.

    `stuck` is true if the ranks sent messages of different sizes, and waited for ever.
    """

    answers: list[list[list[int]]]
    batches: list[list[Batch]]
    stuck: bool

    @property
    def first_difference(self) -> int | None:
        """The first step in which the ranks ran different batches; None if they never did."""
        for step, each in enumerate(self.batches):
            if any(batch != each[0] for batch in each):
                return step
        return None


class _Rank:
    def __init__(
        self, rank: int, num_blocks: int, prompts: SequenceOf[SequenceOf[int]], max_tokens: int
    ):
        max_num_seqs = len(prompts)
        manager = toy_manager(num_blocks, BLOCK_SIZE, max_num_seqs)
        self.memory = TokenMemory(manager, factor=31 + 2 * rank)
        self.scheduler = ContinuousScheduler(manager, max_num_seqs, 64)
        self.sequences = [
            toy_family(number, prompt, max_tokens)[0] for number, prompt in enumerate(prompts)
        ]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        return any(each.finish_reason is None for each in self.sequences)


def serve_on_ranks(
    prompts: SequenceOf[SequenceOf[int]], num_blocks: SequenceOf[int], max_tokens: int = 12
) -> RankRuns:
    """Serve prompts with `max_tokens` each; rank r has `num_blocks[r]` blocks."""
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
        rows = [rank.memory.digests(own) for rank, own in zip(ranks, chunks, strict=True)]
        sums = [sum(each) % VOCAB for each in zip_longest(*rows, fillvalue=0)]
        for rank, own, mine in zip(ranks, chunks, rows, strict=True):
            rank.scheduler.commit(own, [SampledToken(each) for each in sums[: len(mine)]])
    answers = [[each.output_ids for each in rank.sequences] for rank in ranks]
    return RankRuns(answers, batches, stuck)


def message_size(batch: Batch) -> int:
    """Return the number of tokens in a batch's all-reduce: those of the batch, with padding."""
    return -(-sum(batch.values()) // PADDED_TO) * PADDED_TO


def on_ranks(
    agreed_blocks: AgreedBlocks, memories: SequenceOf[tuple[int, int]], block_bytes: int
) -> list[int]:
    """Call `agreed_blocks` on one rank per (free, working) bytes, and return each rank's result.

    Raises what a rank raises, and `WorkerError` if a rank waits for a message that never comes.
    """
    return run_ranks(
        len(memories), lambda comm: agreed_blocks(comm, *memories[comm.rank], block_bytes), 1.0
    )
