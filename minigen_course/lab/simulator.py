"""A simulator of serving: requests that arrive while others run, under a simulated clock.

The engine, its scheduler, block manager and prefix cache are the real ones. Only the time is
simulated: a step takes as long as a cost model predicts. So the results are the same on every
machine. The model is a loaded one, or there is none, and then minutes of traffic take a second.
"""

import gc
import random
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import cycle, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from minigen.bench.report import Outcome
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.errors import RequestError
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.llm import LLM
from minigen.protocols import Runner, Scheduler
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of
from minigen.server.metrics import Metrics, Readings
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.trace.counters import WorkCounters
from minigen.trace.events import Event, Trace
from minigen.trace.timeline import Request, Timeline
from minigen_course.lab.cost_model import Card
from minigen_course.lab.inspect_model import manager_of

MakeScheduler = Callable[[BlockManager, int, int], Scheduler]
CARD = Card()
TICK = 1e-3  # seconds that pass in a step without a batch
ANY_TOKEN = SampledToken(1)
MOST_SEQS = 4096  # a learner's `max_num_seqs`: each has a row of the block table


@dataclass(frozen=True)
class Ask:
    """A request: its arrival `at` in seconds, its prompt, and the length of its output."""

    at: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    tenant: str = ""
    priority: int = 0

    @classmethod
    def of_lengths(cls, at: float, prompt: int, output: int) -> "Ask":
        """Return a request whose prompt has this many tokens, all of them equal."""
        return cls(at, (1,) * prompt, output)


def asks(
    times: Iterable[float],
    prompt: tuple[int, int],
    output: tuple[int, int],
    seed: int = 0,
    shared: SequenceOf[int] = (),
    tenant: str = "",
    priority: int = 0,
) -> list[Ask]:
    """Return requests at these times, with lengths drawn uniformly between the bounds.

    Every prompt is `shared` followed by tokens of its own, whose number `prompt` bounds.
    """
    rng = np.random.default_rng(seed)
    made = []
    for at in times:
        own = rng.integers(1000, 100_000, rng.integers(*prompt, endpoint=True)).tolist()
        num_output = int(rng.integers(*output, endpoint=True))
        made.append(Ask(at, (*shared, *own), num_output, tenant, priority))
    return made


def random_arrivals(
    count: int,
    a_second: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    seed: int = 24,
) -> list[Ask]:
    """Return `count` requests that arrive independently, with lengths within the bounds.

    Arrivals are a Poisson process of `a_second` requests per second; lengths are equally likely,
    and prompts are as in `Ask.of_lengths`. The same seed gives the same requests.
    """
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Ask.of_lengths(now, rng.randint(*prompts), rng.randint(*outputs)))
        now += rng.expovariate(a_second)
    return found


@dataclass(frozen=True)
class Knobs:
    """The settings of a run: options of `LLM.load` and of the server, under the same names.

    `scheduler` is "static", "dynamic" (which waits `max_wait` seconds), "continuous", or a class.
    Only `max_wait` is no option of either: the simulator passes it to `DynamicScheduler`.
    """

    scheduler: str | MakeScheduler = "continuous"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_blocks: int = 3300  # what 24 GB leave beside 16 GB of weights and 1 GB to work in
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_wait: float = 0.05
    max_queue: int | None = None
    max_in_flight_per_key: int | None = None


@dataclass(frozen=True)
class Moment:
    """The gauges after a step."""

    at: float
    running: int
    waiting: int
    kv_used: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """The result of serving requests; all times are those of the simulated clock.

    `outcomes`, `ids` (of the sequences) and `outputs` (token ids) are in the order of `asks`;
    `moments` has an element for each step.
    """

    asks: tuple[Ask, ...]
    ids: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    outcomes: tuple[Outcome, ...]
    moments: tuple[Moment, ...]
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

    @cached_property
    def readings(self) -> Readings:
        """The server's metrics after these events."""
        metrics = Metrics("simulated", lambda: 0.0)
        for event in self.events:
            metrics(event)
        return metrics.read()

    def of(self, tenant: str) -> list[Outcome]:
        """Return the outcomes of one tenant."""
        pairs = zip(self.asks, self.outcomes, strict=True)
        return [outcome for ask, outcome in pairs if ask.tenant == tenant]

    def token_times(self) -> list[list[float]]:
        """Return the times of each request's tokens, in seconds."""
        return token_times(self.events, self.ids)

    def first_tokens(self) -> list[float]:
        """Return each request's time to first token (TTFT), in seconds from its arrival."""
        return [each.ttft for each in self.outcomes if each.ttft is not None]

    def gaps(self) -> list[list[float]]:
        """Return each request's times between tokens (inter-token latency), in seconds."""
        return [each.gaps for each in self.outcomes]


def token_times(events: Iterable[Event], ids: Iterable[int]) -> list[list[float]]:
    """Return the times of the tokens of each of these requests, in seconds, from the events."""
    found: dict[int, list[float]] = {each: [] for each in ids}

    def add(request: Request, event: Event) -> None:
        if request.sequence_id in found:
            found[request.sequence_id].append(event.time_ns / 1e9)

    Timeline(on_token=add).replay(events)
    return list(found.values())


@runtime_checkable
class StepCost(Protocol):
    """A cost model of a step: its `seconds`, before the chunks are counted as computed."""

    def seconds(self, chunks: SequenceOf[ScheduledChunk]) -> float: ...


@dataclass
class Clock:
    """A simulated clock: the time `now`, in seconds, and the tokens computed up to it."""

    now: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True)
class ClockedRunner:
    """A runner under a simulated clock; each step takes the seconds of `step_cost`.

    If `runner` is None, nothing is computed and all logits are zero.
    """

    runner: Runner | None
    clock: Clock
    step_cost: StepCost

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Tensor:
        """Advance the clock by the step's time and tokens, and return the runner's logits."""
        self.clock.now += self.step_cost.seconds(chunks)
        self.clock.num_tokens += sum(chunk.num_tokens for chunk in chunks)
        if self.runner is None:
            return torch.zeros(len(samples_of(chunks)), 1)
        return self.runner.logits(chunks)


Stall = tuple[float, float]  # start and length, in seconds, of a time in which no step runs
Then = Callable[[Ask, float], Ask | None]


def simulate(
    load: Iterable[Ask],
    knobs: Knobs = Knobs(),  # frozen
    step_cost: StepCost = CARD,
    then: Then = lambda ask, now: None,
    stall: Stall | None = None,
) -> Run:
    """Serve requests without a model; `then(ask, now)` may add one when a request has ended.

    Raises `RequestError` for a request that is too long to run, or has an empty prompt.
    """
    load, clock, trace = tuple(load), Clock(), Trace()
    for number, each in enumerate(load):
        if not each.prompt_ids:
            raise RequestError(f"Request {number} has an empty prompt; give it a token or more.")
        longest = len(each.prompt_ids) + each.output_tokens
        if blocks_needed(longest, knobs.block_size) > knobs.num_blocks:
            raise RequestError(
                f"Request {number} ({longest} tokens) does not fit into {knobs.num_blocks} blocks "
                f"of {knobs.block_size}."
            )
    allocator, size = BlockAllocator(knobs.num_blocks), knobs.block_size
    cache = RadixPrefixCache(allocator, size) if knobs.enable_prefix_caching else None
    manager = BlockManager(allocator, cache, size, knobs.max_num_seqs, knobs.num_blocks, trace)
    runner = ClockedRunner(None, clock, step_cost)
    engine = Engine(_scheduler(knobs, manager, clock), runner, _any_token, trace)
    return _drive(engine, manager, clock, load, knobs, then, stall)


def serve(llm: LLM, load: Iterable[Ask], text_ids: SequenceOf[int], step_cost: StepCost) -> Run:
    """Serve requests with a loaded model, its scheduler and its blocks; only the time is simulated.

    Prompts are pieces of a text, of the requests' lengths; greedy answers have as many tokens as
    each request states.
    """
    clock, endless = Clock(), cycle(text_ids)
    load = [replace(each, prompt_ids=tuple(islice(endless, len(each.prompt_ids)))) for each in load]
    runner = ClockedRunner(llm.engine.runner, clock, step_cost)
    engine = Engine(llm.engine.scheduler, runner, llm.engine.sampler, llm.trace)
    return _drive(engine, manager_of(llm), clock, load, Knobs(), lambda ask, now: None, None)


def _scheduler(knobs: Knobs, manager: BlockManager, clock: Clock) -> Scheduler:
    limits = (manager, knobs.max_num_seqs, knobs.max_num_batched_tokens)
    if not isinstance(knobs.scheduler, str):
        return CheckedScheduler(knobs.scheduler(*limits), manager, knobs.max_num_batched_tokens)
    own: dict[str, Any] = {
        "static": StaticScheduler,
        "dynamic": partial(DynamicScheduler, max_wait=knobs.max_wait, clock=lambda: clock.now),
        "continuous": ContinuousScheduler,
    }
    made: Scheduler = own[knobs.scheduler](*limits)
    return made


def _drive(
    engine: Engine,
    manager: BlockManager,
    clock: Clock,
    load: Iterable[Ask],
    knobs: Knobs,
    then: Then,
    stall: Stall | None,
) -> Run:
    """Step an engine until all requests are answered; each is added at its time on the clock."""
    asks, sequences, moments = list(load), dict[int, Sequence](), list[Moment]()
    times, outcomes, events = dict[int, list[float]](), dict[int, Outcome](), list[Event]()
    coming = [(ask.at, number) for number, ask in enumerate(asks)]
    heapify(coming)
    started, num_blocks = 0.0, manager.num_available  # of an idle engine
    at, at_ns = 0.0, 0  # of the last event, because many share a time

    def record(event: Event) -> None:
        """Keep an event; its time and its durations become those of the simulated clock."""
        nonlocal at, at_ns
        if at != clock.now:
            at, at_ns = clock.now, round(1e9 * clock.now)
        counts = event.counts
        if "waited_ns" in counts and event.sequence_id is not None:
            arrival = asks[_number(event.sequence_id)].at
            counts = {**counts, "waited_ns": round(1e9 * (clock.now - arrival))}
        elif "duration_ns" in counts:
            counts = {**counts, "duration_ns": round(1e9 * (clock.now - started))}
        events.append(Event(event.kind, at_ns, event.sequence_id, counts))

    def conclude(number: int, error: str | None = None) -> None:
        ask, text_times = asks[number], tuple(times.pop(number, ()))
        outcomes[number] = Outcome(
            *(ask.at, ask.at, clock.now, text_times, len(text_times), len(ask.prompt_ids)),
            *(True, error),
        )
        another = then(ask, clock.now)
        if another is not None:
            heappush(coming, (another.at, len(asks)))
            asks.append(another)

    with engine.trace.subscribed(record), _no_collection():
        while coming or engine.has_work():
            if not engine.has_work():
                clock.now = max(clock.now, coming[0][0])
            if stall is not None and clock.now >= stall[0]:
                clock.now, stall = clock.now + stall[1], None
            while coming and coming[0][0] <= clock.now:
                number = heappop(coming)[1]
                if _is_refused(asks[number].tenant, engine, asks, knobs):
                    conclude(number, "HTTP 429")
                    continue
                sequences[number], times[number] = _sequence(number, asks[number]), []
                engine.add(sequences[number])
            if not engine.has_work():
                continue
            started, num_before = clock.now, clock.num_tokens
            progress = engine.step()
            clock.now += TICK if clock.now == started else 0.0
            for sequence, _ in progress:
                number = _number(sequence.sequence_id)
                times[number].append(clock.now)
                if sequence.finish_reason is not None:
                    conclude(number)
            running = len(manager.rows)
            kv_used = 1 - manager.num_available / num_blocks
            computed = clock.num_tokens - num_before
            gauges = (running, len(engine.live) - running, kv_used, computed)
            moments.append(Moment(clock.now, *gauges))
    numbers = range(len(asks))
    ids = tuple(-1 - number for number in numbers)
    outputs = tuple(
        tuple(sequences[each].output_ids) if each in sequences else () for each in numbers
    )
    in_order = tuple(outcomes[each] for each in numbers)
    return Run(tuple(asks), ids, outputs, in_order, tuple(moments), tuple(events))


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Pause the garbage collector: a run keeps its events, and the collector would go through them.

    With half a million events it would take a third of the run's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_refused(tenant: str, engine: Engine, asks: SequenceOf[Ask], knobs: Knobs) -> bool:
    """Return whether the queue is full, or the tenant's key has too many requests."""
    live, limit, of_key = engine.live, knobs.max_queue, knobs.max_in_flight_per_key
    if limit is not None and sum(each.num_cached is None for each in live.values()) >= limit:
        return True
    return of_key is not None and sum(asks[_number(e)].tenant == tenant for e in live) >= of_key


def _sequence(number: int, ask: Ask) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True)
    given = (ask.prompt_ids, params, 0, ask.output_tokens, frozenset[int]())
    return Sequence(-1 - number, *given, priority=ask.priority)


def _number(sequence_id: int) -> int:
    """Return the number of the request with this id; ids are negative, unlike a model's own."""
    return -1 - sequence_id


def _any_token(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
    return [ANY_TOKEN] * len(sequences)
