"""One cost model for all cuts: what each rank stores, reads, computes and sends, and how long.

A layout has t ranks that cut every matrix, c ranks that share the tokens of a sequence, p stages,
and d replicas. The ranks of a tensor split are next to each other, then those of a context, then
the stages, then the replicas, so that the cut with the most messages has the shortest way. A step
is a decode step of all sequences, or the prefill of one prompt. FLOPs and bytes are those of
`minigen_course.lab.cost_model`; messages take a latency and their bytes (chapter 41).
Left out: overheads per step, sampling, the embedding's all-reduce, and the overlap of messages with
computing, except in a ring. Sources: Pope et al. 2022; Narayanan et al. 2021; Liu et al. 2023.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from minigen_course.ch41_tensor_parallel.lesson import BYTES_A_NUMBER, Link
from minigen_course.ch42_pipeline.lesson.timeline import Timeline, run_schedule
from minigen_course.lab.cost_model import Machine, ModelShape


@dataclass(frozen=True)
class Cluster:
    """Equal devices in nodes: a fast link inside of a node, and a slower one between nodes."""

    device: Machine
    num_devices: int
    node_size: int
    inside: Link
    between: Link

    def link(self, reach: int) -> Link:
        """Return the link of a group of ranks whose numbers span `reach`."""
        return self.inside if reach <= self.node_size else self.between

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of an all-reduce of ranks that are next to each other.

        Beyond a node it has three parts: the node's ranks add up an equal share of the bytes each,
        each rank adds its share to those of its twins in the other nodes, and the sums go back.
        """
        if num_ranks <= self.node_size:
            return self.inside.all_reduce_seconds(num_bytes, num_ranks)
        share = num_bytes / self.node_size
        nodes = math.ceil(num_ranks / self.node_size)
        inside = self.inside.all_reduce_seconds(num_bytes, self.node_size)
        return inside + self.between.all_reduce_seconds(share, nodes)


@dataclass(frozen=True)
class Layout:
    """How many ranks share a matrix (t), a sequence (c), the layers (p), and the requests (d)."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """The product of all four."""
        return self.tensor * self.context * self.pipeline * self.data

    def __str__(self) -> str:
        names = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        shown = [
            f"{name} {size}" for name, size in {**names, "data": self.data}.items() if size > 1
        ]
        return " × ".join(shown) or "one device"


LLAMA_405B = ModelShape(16384, 126, 128, 8, 128, 53248, 128256, tied=False)


@dataclass(frozen=True)
class Load:
    """Sequences that decode, each with a context of this number of tokens."""

    num_sequences: int
    context: int


@dataclass(frozen=True)
class Cost:
    """What a step costs under a layout.

    `seconds` is the time of a decode step of all sequences, or of a prefill. `rank_bytes` are the
    bytes of weights and cache on the rank with the most. `sent_bytes` and `num_messages` are those
    of one rank in the step: an all-reduce or a turn of a ring counts as one message, and its bytes
    are those of the rank's tensor. `message_seconds` is the part of the time in messages; of a ring
    it counts only the time that computing does not hide. `idle` is the fraction of the time in
    which a stage has no micro-batch.
    """

    seconds: float
    rank_bytes: float
    num_messages: float
    sent_bytes: float
    message_seconds: float
    idle: float
    timeline: Timeline

    def fits(self, cluster: Cluster) -> bool:
        """Return whether 90 % of a device's memory holds the weights and the cache."""
        return cluster.device.memory is None or self.rank_bytes <= 0.9 * cluster.device.memory


def obstacle(shape: ModelShape, layout: Layout, num_sequences: int) -> str | None:
    """Return why a model or a load cannot be cut so, as a sentence; None if it can."""
    t = layout.tensor
    if shape.q_heads % t or shape.ffn % t:
        return f"{shape.q_heads} heads and {shape.ffn} units cannot be divided by {t}."
    if shape.kv_heads % t and t % shape.kv_heads:
        return f"{shape.kv_heads} KV heads cannot be shared by {t} ranks."
    if layout.pipeline > shape.layers:
        return f"{shape.layers} layers cannot fill {layout.pipeline} stages."
    if layout.data > num_sequences:
        return f"{num_sequences} sequences cannot fill {layout.data} replicas."
    return None


def rank_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return the bytes of weights (16 bits) and cache on the rank with the most layers."""
    t, c, p, d = layout.tensor, layout.context, layout.pipeline, layout.data
    layers = math.ceil(shape.layers / p)
    table = shape.vocab * shape.hidden
    in_layers = (shape.multiplied - table) * layers / shape.layers
    tables = table if p > 1 or shape.tied else 2 * table
    sequences = math.ceil(load.num_sequences / d)
    heads = max(shape.kv_heads / t, 1) / shape.kv_heads
    cache = sequences * shape.kv_numbers(load.context) * heads * layers / shape.layers / c
    return 2 * ((in_layers + tables) / t + cache)


def decode_cost(shape: ModelShape, cluster: Cluster, layout: Layout, load: Load) -> Cost:
    """Return the cost of one token for each sequence.

    A replica's sequences are cut into as many micro-batches as there are stages, or fewer if there
    are fewer sequences. A micro-batch enters the first stage again when it has its token, so a step
    lasts as long as one micro-batch takes to come back.
    """
    t, c, p, d = layout.tensor, layout.context, layout.pipeline, layout.data
    sequences = math.ceil(load.num_sequences / d)
    num_batches = min(p, sequences)
    batch = sequences / num_batches
    layers = shape.layers / p
    heads = max(shape.kv_heads / t, 1) / shape.kv_heads
    read = shape.multiplied / (t * p) + batch * shape.kv_numbers(load.context) * heads / (p * c)
    linear, context_flops = shape.flops(0), shape.flops(load.context) - shape.flops(0)
    flops = batch * (linear + context_flops / c) / (t * p)
    compute = max(2 * read / cluster.device.bandwidth, flops / cluster.device.flops)

    vectors = batch * shape.hidden * BYTES_A_NUMBER
    messages = _Messages()
    messages.add(2 * layers, vectors, t, cluster.all_reduce_seconds(vectors, t))
    partial = batch * shape.q_heads / t * (shape.head_dim + 1) * 4  # float32, with the log-sum-exp
    link = cluster.link(t * c)
    messages.add(layers, partial, c, (c - 1) * (link.latency + partial / link.bandwidth))
    hop = cluster.link(t * c * p)
    transfer = hop.latency + vectors / hop.bandwidth if p > 1 else 0.0
    stage = compute + messages.seconds
    step = p * (stage + transfer)
    order = [[(step_id, each, 0) for step_id in range(2) for each in range(num_batches)]] * p
    timeline = run_schedule(order, lambda *_: stage, transfer)
    return Cost(
        step,
        rank_bytes(shape, layout, load),
        num_batches * (messages.count + (p > 1)),
        num_batches * (messages.num_bytes + (vectors if p > 1 else 0.0)),
        p * (messages.seconds + transfer),
        1 - num_batches * stage / step,
        timeline,
    )


def prefill_cost(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    num_tokens: int,
    num_chunks: int | None = None,
) -> Cost:
    """Return the cost of one prompt; replicas do not help it.

    Stages get the prompt in chunks, by default four for each stage, as far as a chunk has 256
    tokens. With a context split each rank has an equal part of each chunk's work (zig-zag), and in
    each layer the keys and values go round while attention is computed.
    """
    t, c, p = layout.tensor, layout.context, layout.pipeline
    if num_chunks is None:
        num_chunks = max(1, min(4 * p, num_tokens // 256)) if p > 1 else 1
    layers = shape.layers / p
    size = num_tokens / num_chunks
    linear = 2 * (shape.multiplied - shape.vocab * shape.hidden) / shape.layers
    pair = (shape.flops(1) - shape.flops(0)) / shape.layers  # FLOPs of a query and a key
    device = cluster.device
    weights = (shape.multiplied - shape.vocab * shape.hidden) / shape.layers * 2 / t

    vectors = size / c * shape.hidden * BYTES_A_NUMBER
    messages = _Messages()
    messages.add(2 * layers, vectors, t, cluster.all_reduce_seconds(vectors, t))
    hop = cluster.link(t * c * p)
    transfer = hop.latency + vectors / hop.bandwidth if p > 1 else 0.0
    ring = cluster.link(t * c)
    heads = max(shape.kv_heads / t, 1)
    shift_bytes = [
        2 * (chunk + 1) * size / c * heads * shape.head_dim * BYTES_A_NUMBER
        for chunk in range(num_chunks)
    ]

    products = max(size / c * linear / t / device.flops, weights / device.bandwidth)
    attention = [
        size * (chunk * size + (size + 1) / 2) * pair / (t * c) / device.flops
        for chunk in range(num_chunks)
    ]
    waits = [0.0] * num_chunks  # in each layer, for blocks of the ring that come late
    if c > 1:
        waits = [
            (c - 1) * max(0.0, ring.latency + num_bytes / ring.bandwidth - each / c)
            for each, num_bytes in zip(attention, shift_bytes, strict=True)
        ]

    def seconds(_: int, chunk: int) -> float:
        return layers * (products + attention[chunk] + waits[chunk]) + messages.seconds

    order = [[(0, chunk, 0) for chunk in range(num_chunks)]] * p
    timeline = run_schedule(order, seconds, transfer)
    busy = sum(seconds(0, chunk) for chunk in range(num_chunks))
    shifts = layers * (c - 1)
    return Cost(
        timeline.end,
        rank_bytes(shape, layout, Load(1, num_tokens)),
        num_chunks * (messages.count + shifts + (p > 1)),
        num_chunks * (messages.num_bytes + vectors * (p > 1)) + shifts * sum(shift_bytes),
        num_chunks * messages.seconds + layers * sum(waits) + (p - 1) * transfer,
        1 - busy / timeline.end,
        timeline,
    )


@dataclass
class _Messages:
    """The messages of a rank in one visit of a micro-batch."""

    count: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, count: float, num_bytes: float, num_ranks: int, seconds: float) -> None:
        """Add `count` messages of a group, none for a group of one."""
        if num_ranks > 1:
            self.count += count
            self.num_bytes += count * num_bytes
            self.seconds += count * seconds


def layouts(num_devices: int) -> Iterator[Layout]:
    """Yield all layouts that use all devices, with sizes that are powers of two or the number."""
    sizes = [each for each in range(1, num_devices + 1) if num_devices % each == 0]
    for t in sizes:
        for c in sizes:
            for p in sizes:
                if num_devices % (t * c * p) == 0:
                    yield Layout(t, c, p, num_devices // (t * c * p))
