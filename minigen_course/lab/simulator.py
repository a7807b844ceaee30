"""Requests that arrive while others run, under a clock that says what a step takes.

The same arrivals come at the same moments whatever the machine does besides, so that policies can
be compared, and everybody sees the same. The engine, its scheduler and its blocks are the real
ones; the model is too, or there is none, and then a second of traffic takes a millisecond.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.errors import RequestError
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.llm import LLM
from minigen.protocols import Runner, Scheduler
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.trace.events import Event, EventKind, Trace

MakeScheduler = Callable[[BlockManager, int, int], Scheduler]
TICK = 1e-3  # seconds that pass while a scheduler chooses nobody
_OWN: dict[str, type] = {"static": StaticScheduler, "continuous": ContinuousScheduler}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, and how many tokens its prompt and its answer have."""

    seconds: float
    prompt: int
    output: int


@dataclass(frozen=True)
class StepTime:
    """What a step takes, in seconds: max(read, tokens x token) + overhead, as in chapter 17.

    `read` is for what every step reads, the weights; `token` for the arithmetic of one token.
    """

    read: float
    token: float
    overhead: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        return max(self.read, num_tokens * self.token) + self.overhead


class Clock:
    """A time that goes on when it is told to; calling it tells the seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Run:
    """What an engine did with arrivals; its events have the clock's times.

    `ids` are the sequences' ids, `prompts` and `outputs` their tokens, in the arrivals' order.
    """

    arrivals: tuple[Arrival, ...]
    ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """When the last answer was whole."""
        return max(event.time_ns for event in self.events) / 1e9

    @property
    def num_steps(self) -> int:
        """How often the model was run."""
        return sum(event.kind is EventKind.STEP for event in self.events)

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model, those that were computed again included."""
        steps = (event for event in self.events if event.kind is EventKind.STEP)
        return sum(event.counts["tokens"] for event in steps)

    @property
    def num_preempted(self) -> int:
        """How often a request gave its blocks back and waited again."""
        return sum(event.kind is EventKind.PREEMPTED for event in self.events)

    @property
    def throughput(self) -> float:
        """Tokens of answers a second."""
        return sum(len(each) for each in self.outputs) / self.seconds

    def token_times(self) -> list[list[float]]:
        """For each request the seconds at which its tokens came."""
        return token_times(self.events, self.ids)

    def first_tokens(self) -> list[float]:
        """For each request the seconds from its arrival to its first token (TTFT)."""
        return [
            times[0] - arrival.seconds
            for times, arrival in zip(self.token_times(), self.arrivals, strict=True)
        ]

    def gaps(self) -> list[list[float]]:
        """For each request the seconds between one token and the next (inter-token latency)."""
        return [
            [late - early for early, late in itertools.pairwise(times)]
            for times in self.token_times()
        ]


def token_times(events: Iterable[Event], ids: Iterable[int]) -> list[list[float]]:
    """For each of these requests the seconds at which its tokens came, by the events' own times."""
    found: dict[int | None, list[float]] = {each: [] for each in ids}
    for event in events:
        if event.kind is EventKind.NEW_TOKEN and event.sequence_id in found:
            found[event.sequence_id].append(event.time_ns / 1e9)
    return list(found.values())


def random_arrivals(
    count: int,
    a_second: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    seed: int = 24,
) -> list[Arrival]:
    """So many requests that come independently of each other, and whose lengths lie between two.

    The moments are a Poisson process of `a_second` requests; the same seed gives the same traffic.
    """
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Arrival(now, rng.randint(*prompts), rng.randint(*outputs)))
        now += rng.expovariate(a_second)
    return found


class ClockedRunner:
    """A runner under a clock: each step takes what `step_time` says, whatever it really takes.

    Without a `runner` nothing is computed, and all logits are zero.
    """

    def __init__(self, runner: Runner | None, clock: Clock, step_time: StepTime):
        self.runner, self.clock, self.step_time = runner, clock, step_time

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """The runner's logits, once their time has passed."""
        self.clock.now += self.step_time(sum(chunk.num_tokens for chunk in chunks))
        if self.runner is None:
            return torch.zeros(len(samples_of(chunks)), 1)
        return self.runner.logits(chunks)


def simulate(
    arrivals: Iterable[Arrival],
    scheduler: str | MakeScheduler = "continuous",
    *,
    step_time: StepTime,
    seats: int = 8,
    budget: int = 256,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_wait: float = 0.05,
) -> Run:
    """Serve arrivals without a model, by "static", "dynamic", "continuous", or a scheduler class.

    `seats` sequences run at once at most, and a step has `budget` tokens at most; `max_wait` is the
    dynamic scheduler's. Raises `RequestError` for an arrival that could never run.
    """
    arrivals, clock, trace = tuple(arrivals), Clock(), Trace()
    room = num_blocks * block_size
    for each in arrivals:
        if each.prompt + each.output > room:
            raise RequestError(f"{each} does not fit into {num_blocks} blocks of {block_size}.")
    manager = BlockManager(BlockAllocator(num_blocks), None, block_size, seats, num_blocks, trace)
    own: dict[str, Any] = {
        **_OWN,
        "dynamic": partial(DynamicScheduler, max_wait=max_wait, clock=clock),
    }
    if isinstance(scheduler, str):
        made = own[scheduler](manager, seats, budget)
    else:
        made = CheckedScheduler(scheduler(manager, seats, budget), manager, budget)
    runner = ClockedRunner(None, clock, step_time)
    engine = Engine(made, runner, _any_token, trace)
    return drive(engine, clock, arrivals, [(1,) * each.prompt for each in arrivals])


def serve(
    llm: LLM, arrivals: Iterable[Arrival], text_ids: SequenceOf[int], step_time: StepTime
) -> Run:
    """The same with a loaded model: its scheduler, blocks and weights; only time is the clock's.

    Prompts are pieces of a text, greedy answers of as many tokens as each arrival says.
    """
    arrivals, clock = tuple(arrivals), Clock()
    runner = ClockedRunner(llm.engine.runner, clock, step_time)
    engine = Engine(llm.engine.scheduler, runner, llm.engine.sampler, llm.trace)
    prompts, endless = [], itertools.cycle(text_ids)
    for each in arrivals:
        prompts.append(tuple(itertools.islice(endless, each.prompt)))
    return drive(engine, clock, arrivals, prompts)


def drive(
    engine: Engine,
    clock: Clock,
    arrivals: tuple[Arrival, ...],
    prompts: SequenceOf[tuple[int, ...]],
) -> Run:
    """Step an engine until all arrivals are answered, each added when the clock says so."""
    sequences = [
        _sequence(prompt, each.output) for prompt, each in zip(prompts, arrivals, strict=True)
    ]
    due = sorted(zip(arrivals, sequences, strict=True), key=lambda pair: pair[0].seconds)
    events: list[Event] = []
    with engine.trace.subscribed(lambda event: events.append(_stamped(event, clock))):
        while due or engine.has_work():
            if not engine.has_work():
                clock.now = max(clock.now, due[0][0].seconds)
            while due and due[0][0].seconds <= clock.now:
                engine.add(due.pop(0)[1])
            before = clock.now
            engine.step()
            if clock.now == before:
                clock.now += TICK
    ids = tuple(each.sequence_id for each in sequences)
    outputs = tuple(tuple(each.output_ids) for each in sequences)
    return Run(arrivals, ids, tuple(prompts), outputs, tuple(events))


def _sequence(prompt_ids: tuple[int, ...], output: int) -> Sequence:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    return Sequence(-next(_numbers), prompt_ids, greedy, 0, output, frozenset())


def _stamped(event: Event, clock: Clock) -> Event:
    return replace(event, time_ns=round(1e9 * clock.now))


def _any_token(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
    return [SampledToken(0) for _ in sequences]
