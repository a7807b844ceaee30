"""Requests that arrive while others run, under a simulated clock.

The same arrivals come at the same times whatever else the machine does, so policies can be compared
and every reader sees the same result. The engine, its scheduler and its blocks are the real ones.
The model is real as well, or there is none, and then a second of traffic takes a millisecond.
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
from minigen.trace.counters import WorkCounters
from minigen.trace.events import Event, Trace
from minigen.trace.timeline import Request, Timeline

MakeScheduler = Callable[[BlockManager, int, int], Scheduler]
TICK = 1e-3  # seconds that pass in a step without a batch
_OWN: dict[str, type] = {"static": StaticScheduler, "continuous": ContinuousScheduler}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival in seconds, and the lengths of its prompt and output in tokens."""

    seconds: float
    prompt: int
    output: int


@dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds: max(read, tokens x token) + overhead, as in chapter 17.

    `read` is the time to read the weights; `token` is the time of one token's arithmetic.
    """

    read: float
    token: float
    overhead: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens`."""
        return max(self.read, num_tokens * self.token) + self.overhead


class Clock:
    """A simulated clock; call it to read the time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Run:
    """The result of serving arrivals; its events have the simulated clock's times.

    `ids` are the sequences' ids, `prompts` and `outputs` their tokens, in the arrivals' order.
    """

    arrivals: tuple[Arrival, ...]
    ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """The time at which the last answer was complete."""
        return max(event.time_ns for event in self.events) / 1e9

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return self._work.steps

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model, including recomputed ones."""
        return self._work.tokens_computed

    @property
    def num_preempted(self) -> int:
        """How often a request was preempted: it freed its blocks and waited again."""
        return self._work.preemptions

    @property
    def _work(self) -> WorkCounters:
        return Timeline().replay(self.events).work

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(len(each) for each in self.outputs) / self.seconds

    def token_times(self) -> list[list[float]]:
        """Return the times of each request's tokens, in seconds."""
        return token_times(self.events, self.ids)

    def first_tokens(self) -> list[float]:
        """Return each request's time to first token (TTFT), in seconds from its arrival."""
        return [
            times[0] - arrival.seconds
            for times, arrival in zip(self.token_times(), self.arrivals, strict=True)
        ]

    def gaps(self) -> list[list[float]]:
        """Return each request's times between tokens (inter-token latency), in seconds."""
        return [
            [late - early for early, late in itertools.pairwise(times)]
            for times in self.token_times()
        ]


def token_times(events: Iterable[Event], ids: Iterable[int]) -> list[list[float]]:
    """Return the times of the tokens of each of these requests, in seconds, from the events."""
    found: dict[int, list[float]] = {each: [] for each in ids}

    def add(request: Request, event: Event) -> None:
        if request.sequence_id in found:
            found[request.sequence_id].append(event.time_ns / 1e9)

    Timeline(on_token=add).replay(events)
    return list(found.values())


def random_arrivals(
    count: int,
    a_second: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    seed: int = 24,
) -> list[Arrival]:
    """Return `count` requests that arrive independently, with lengths within the bounds.

    Arrivals are a Poisson process of `a_second` requests per second; lengths are equally likely.
    The same seed gives the same traffic.
    """
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Arrival(now, rng.randint(*prompts), rng.randint(*outputs)))
        now += rng.expovariate(a_second)
    return found


class ClockedRunner:
    """A runner under a simulated clock, on which each step takes its `step_time`.

    If `runner` is None, nothing is computed and all logits are zero.
    """

    def __init__(self, runner: Runner | None, clock: Clock, step_time: StepTime):
        self.runner, self.clock, self.step_time = runner, clock, step_time

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """Advance the clock by the step's time, and return the runner's logits."""
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

    At most `seats` sequences run at once, and a step has at most `budget` tokens; `max_wait` is for
    the dynamic scheduler. Raises `RequestError` for an arrival that is too long to run.
    """
    arrivals, clock, trace = tuple(arrivals), Clock(), Trace()
    num_slots = num_blocks * block_size
    for each in arrivals:
        if each.prompt + each.output > num_slots:
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
    """Serve arrivals with a loaded model, its scheduler and its blocks; only the time is simulated.

    Prompts are pieces of a text; greedy answers have as many tokens as each arrival states.
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
    """Step an engine until all arrivals are answered; each is added at its time on the clock."""
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
