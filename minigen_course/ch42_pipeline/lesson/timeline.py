"""Timelines of ranks: when each one computes, sends or is idle, and the schedules of a pipeline.

A schedule is an order of work for each stage and one rule: a stage begins a piece of work when it
has ended the piece before and the piece's input has arrived. Sources: Huang et al. 2019 (GPipe);
Narayanan et al. 2021 (interleaved stages).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

COMPUTE, MESSAGE = "compute", "message"


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time, in seconds: what it did, for which micro-batch or block.

    `kind` is `COMPUTE` or `MESSAGE`. `batch` numbers micro-batches, or the blocks of a ring;
    `chunk` numbers a rank's groups of layers, and `step` tokens, or the turns of a ring.
    """

    rank: int
    start: float
    end: float
    kind: str = COMPUTE
    batch: int = 0
    chunk: int = 0
    step: int = 0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What each of `num_ranks` ranks did, as spans in the order in which they ended."""

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def start(self) -> float:
        """The first start, 0 without spans."""
        return min((each.start for each in self.spans), default=0.0)

    @property
    def end(self) -> float:
        """The last end, 0 without spans."""
        return max((each.end for each in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end."""
        return self.end - self.start

    def computing(self) -> list[tuple[int, float, float]]:
        """Return (rank, start, end) of each span in which a rank computes."""
        return [(each.rank, each.start, each.end) for each in self.spans if each.kind == COMPUTE]

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(
            each.seconds for each in self.spans if each.rank == rank and each.kind == COMPUTE
        )

    def upto(self, seconds: float) -> "Timeline":
        """Return what happened in the first seconds."""
        kept = [each for each in self.spans if each.start < self.start + seconds]
        return Timeline(self.num_ranks, tuple(kept))


Work = tuple[int, int, int]  # token, micro-batch, group of layers
StageSeconds = Callable[[int, int], float]  # of a stage and a micro-batch


def run_schedule(
    orders: Sequence[Sequence[Work]],
    seconds: StageSeconds,
    transfer: float,
    num_groups: int = 1,
    barrier: bool = False,
) -> Timeline:
    """Return the timeline of stages that do their work in a given order.

    `orders[s]` is the order of stage s. A micro-batch visits all stages once for each of the
    `num_groups` groups of layers; its next token begins where its last one has ended, and with a
    `barrier`, where the last tokens of all micro-batches have ended. Each visit takes
    `seconds(stage, micro_batch) / num_groups`, and each way to another stage `transfer` seconds, in
    which the stage that sends may compute. Raises `ValueError` for orders that wait for each other.
    """
    num_stages = len(orders)
    left = [iter(each) for each in orders]
    heads = [next(each, None) for each in left]
    free = [0.0] * num_stages
    ends: dict[tuple[Work, int], float] = {}
    batches = {batch for order in orders for _, batch, _ in order}
    last = (num_groups - 1, num_stages - 1)
    hop = transfer if num_stages > 1 else 0.0

    def arrival(work: Work, stage: int) -> float | None:
        """Return when a stage has the input of its work; None if that is not known yet."""
        step, batch, group = work
        if (group, stage) != (0, 0):
            before = (stage - 1) if stage else num_stages - 1
            end = ends.get(((step, batch, group - (stage == 0)), before))
            return None if end is None else end + hop
        if step == 0:
            return 0.0
        waits = batches if barrier else {batch}
        found = [ends.get(((step - 1, each, last[0]), last[1])) for each in waits]
        known = [each for each in found if each is not None]
        return max(known) + hop if len(known) == len(found) else None

    spans: list[Span] = []
    while any(head is not None for head in heads):
        moved = False
        for stage, head in enumerate(heads):
            while head is not None and (ready := arrival(head, stage)) is not None:
                begin = max(free[stage], ready)
                end = free[stage] = begin + seconds(stage, head[1]) / num_groups
                ends[head, stage] = end
                step, batch, group = head
                spans.append(Span(stage, begin, end, COMPUTE, batch, group, step))
                head = heads[stage] = next(left[stage], None)
                moved = True
        if not moved:
            raise ValueError("Each stage waits for another one: no order of work can go on.")
    return Timeline(num_stages, tuple(sorted(spans, key=lambda each: (each.end, each.rank))))


def pass_once(stage_seconds: Sequence[float], num_batches: int, transfer: float = 0.0) -> Timeline:
    """Return the timeline of micro-batches that pass all stages once, as in GPipe's forward pass.

    `stage_seconds[s]` is the time of stage s for one micro-batch.
    """
    order = [(0, batch, 0) for batch in range(num_batches)]
    orders = [order] * len(stage_seconds)
    return run_schedule(orders, lambda stage, _: stage_seconds[stage], transfer)


def decode_tokens(
    stage_seconds: Sequence[float],
    num_batches: int,
    num_tokens: int,
    transfer: float = 0.0,
    *,
    barrier: bool,
) -> Timeline:
    """Return the timeline of micro-batches that each compute `num_tokens` tokens, one by one.

    With a `barrier`, a step ends when all micro-batches have their token, and the pipeline runs
    empty after each step. Without one, a micro-batch enters the first stage again as soon as its
    own token is known.
    """
    order = [(step, batch, 0) for step in range(num_tokens) for batch in range(num_batches)]
    orders = [order] * len(stage_seconds)
    return run_schedule(orders, lambda stage, _: stage_seconds[stage], transfer, barrier=barrier)


def interleaved(
    stage_seconds: Sequence[float], num_batches: int, num_groups: int, transfer: float = 0.0
) -> Timeline:
    """Return the timeline of stages that each hold several groups of layers.

    Stage s of p has the groups s, s + p, s + 2 p and so on of a model that is cut into p times
    `num_groups` groups, so that a micro-batch goes round `num_groups` times (v in the paper). As
    many micro-batches as stages go round together.
    """
    num_stages = len(stage_seconds)
    order = [
        (0, batch, group)
        for first in range(0, num_batches, num_stages)
        for group in range(num_groups)
        for batch in range(first, min(first + num_stages, num_batches))
    ]
    return run_schedule(
        [order] * num_stages, lambda stage, _: stage_seconds[stage], transfer, num_groups
    )


def least_bubble(num_stages: int, num_batches: int, num_groups: int = 1) -> float:
    """Return (p - 1) / (v m + p - 1): the idle fraction with equal stages and free transfers.

    For v > 1 it holds if the stages' number divides that of the micro-batches.
    """
    return (num_stages - 1) / (num_groups * num_batches + num_stages - 1)


def ring_turns(
    pairs: Sequence[Sequence[float]], seconds_a_pair: float, transfer: float, barrier: bool = False
) -> Timeline:
    """Return the timeline of a ring: n turns, in each of which a rank computes one block.

    `pairs[turn][rank]` are the pairs of query and key that a rank computes in a turn. While it
    computes, it sends its block of keys and values on, which takes `transfer` seconds, and receives
    the block for the next turn. So it begins a turn when its own last turn and the message of the
    rank before have ended. With a `barrier` all ranks begin each turn together.
    """
    num_ranks = len(pairs[0])
    free, arrived = [0.0] * num_ranks, [0.0] * num_ranks
    spans: list[Span] = []
    for turn, work in enumerate(pairs):
        begins = [max(each) for each in zip(free, arrived, strict=True)]
        if barrier:
            begins = [max(begins)] * num_ranks
        is_last = turn == len(pairs) - 1
        sent = list(begins) if is_last else [begin + transfer for begin in begins]
        for rank, begin in enumerate(begins):
            block = (rank - turn) % num_ranks
            free[rank] = begin + work[rank] * seconds_a_pair
            spans.append(Span(rank, begin, free[rank], COMPUTE, block, 0, turn))
            if not is_last and transfer:
                spans.append(Span(rank, begin, sent[rank], MESSAGE, block, 0, turn))
        arrived = [sent[rank - 1] for rank in range(num_ranks)]
    return Timeline(num_ranks, tuple(sorted(spans, key=lambda each: (each.end, each.rank))))
