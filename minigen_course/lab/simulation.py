"""A simulated engine whose steps take the time that a cost model of a GPU predicts.

Scheduler, block manager, allocator and prefix cache are the engine's own, with their own events.
Only the model is missing, and the steps advance a simulated clock. So minutes of traffic take a
second, and the results are exact and the same on every machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from minigen.bench.report import Outcome
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import SampledToken, ScheduledChunk, samples_of
from minigen.sequence import Sequence as Answer
from minigen.server.metrics import Metrics, Readings
from minigen.trace.events import Event, EventKind, Trace
from minigen_course.lab.cost_model import MACHINES, SHAPES, Machine, ModelShape

BLOCK, LONGEST = 16, 32_768


@dataclass(frozen=True)
class Card:
    """A model in bfloat16 on a machine; `overhead` is added per step, in seconds (chapter 17)."""

    shape: ModelShape = SHAPES["Llama-3-8B"]
    machine: Machine = MACHINES["L4"]
    overhead: float = 2e-3

    def seconds(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Return a step's seconds: the longer of its bytes and its FLOPs, plus the overhead."""
        shape = self.shape
        a_token, kv_bytes = shape.flops(0), 2 * shape.kv_numbers(1)
        a_pair = shape.flops(1) - a_token
        flops, num_bytes = 0, 2 * shape.multiplied
        for chunk in chunks:
            context = chunk.sequence.num_computed + chunk.num_tokens
            flops += chunk.num_tokens * (a_token + context * a_pair)
            num_bytes += context * kv_bytes
        return max(num_bytes / self.machine.bandwidth, flops / self.machine.flops) + self.overhead


@dataclass(frozen=True)
class Ask:
    """A request: its arrival `at` in seconds, its prompt, and the length of its output."""

    at: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    tenant: str = ""
    priority: int = 0


def asks(
    times: Iterable[float],
    prompt: tuple[int, int],
    output: tuple[int, int],
    seed: int = 0,
    shared: Sequence[int] = (),
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


@dataclass(frozen=True)
class Knobs:
    """The settings of a run: options of `LLM.load` and of the server, under the same names."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_blocks: int = 3800  # what 24 GB leave beside 8 billion weights in bfloat16
    enable_prefix_caching: bool = True
    scheduler: Callable[..., ContinuousScheduler] = ContinuousScheduler
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
    """The outcomes of the requests, the gauges and the metrics; `events` are the engine's own."""

    asks: list[Ask]
    outcomes: list[Outcome]
    moments: list[Moment]
    readings: Readings
    events: list[Event]

    def of(self, tenant: str) -> list[Outcome]:
        """Return the outcomes of one tenant."""
        pairs = zip(self.asks, self.outcomes, strict=True)
        return [outcome for ask, outcome in pairs if ask.tenant == tenant]


@dataclass(eq=False)
class _Clocked(Trace):
    """A trace whose times come from the simulated clock, in seconds."""

    now: float = 0.0

    def emit(self, kind: EventKind, sequence_id: int | None = None, **counts: int) -> None:
        event = Event(kind, round(self.now * 1e9), sequence_id, counts)
        for subscriber in self._subscribers:
            subscriber(event)


@dataclass(eq=False)
class _Engine:
    """The engine's parts around a clock; `answers` are unfinished, with their tokens' times."""

    knobs: Knobs
    card: Card
    trace: _Clocked = field(default_factory=_Clocked)
    answers: dict[Answer, tuple[int, list[float]]] = field(default_factory=dict)
    keys: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        knobs, allocator = self.knobs, BlockAllocator(self.knobs.num_blocks)
        caching = knobs.enable_prefix_caching
        prefix_cache = RadixPrefixCache(allocator, BLOCK) if caching else None
        self.manager = BlockManager(
            *(allocator, prefix_cache, BLOCK, knobs.max_num_seqs),
            *(min(knobs.num_blocks, LONGEST // BLOCK), self.trace),
        )
        self.scheduler = knobs.scheduler(
            self.manager, knobs.max_num_seqs, knobs.max_num_batched_tokens
        )

    @property
    def kv_used(self) -> float:
        return 1 - self.manager.num_available / self.knobs.num_blocks

    def refusal(self, ask: Ask) -> str | None:
        """Return the server's error if the queue is full or the key has too many requests."""
        waiting = sum(answer.num_cached is None for answer in self.answers)
        most, of_key = self.knobs.max_queue, self.knobs.max_in_flight_per_key
        too_many = of_key is not None and self.keys[ask.tenant] >= of_key
        return "HTTP 429" if too_many or (most is not None and waiting >= most) else None

    def add(self, number: int, ask: Ask) -> None:
        params = SamplingParams(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True)
        given = (ask.prompt_ids, params, 0, ask.output_tokens, frozenset[int]())
        answer = Answer(number, *given, priority=ask.priority)
        self.answers[answer] = (number, [])
        self.keys[ask.tenant] += 1
        waited = round((self.trace.now - ask.at) * 1e9)
        self.trace.emit(
            EventKind.QUEUED, number, prompt_tokens=len(ask.prompt_ids), waited_ns=waited
        )
        self.scheduler.add(answer)

    def step(self) -> tuple[int, list[Answer]]:
        """Compute a batch; return its number of tokens and the finished sequences."""
        started, chunks = self.trace.now, self.scheduler.schedule()
        for chunk in chunks:
            counts = {"tokens": chunk.num_tokens, "computed": chunk.sequence.num_computed}
            self.trace.emit(EventKind.SCHEDULED, chunk.sequence.sequence_id, **counts)
        self.trace.now += self.card.seconds(chunks) if chunks else 1e-3
        tokens = [SampledToken(1)] * len(samples_of(chunks))
        ended = []
        for answer, token in self.scheduler.commit(chunks, tokens):
            self.answers[answer][1].append(self.trace.now)
            self.trace.emit(EventKind.NEW_TOKEN, answer.sequence_id, token=token.token_id)
            if answer.finish_reason is not None:
                counts = {"output_tokens": len(answer.output_ids), "stopped": 0}
                self.trace.emit(EventKind.FINISHED, answer.sequence_id, **counts)
                ended.append(answer)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        took = round((self.trace.now - started) * 1e9)
        self.trace.emit(EventKind.STEP, sequences=len(chunks), tokens=num_tokens, duration_ns=took)
        return num_tokens, ended


Stall = tuple[float, float]  # start and length, in seconds, of a time in which no step runs


def simulate(
    load: Sequence[Ask],
    knobs: Knobs = Knobs(),  # frozen
    card: Card = Card(),
    then: Callable[[Ask, float], Ask | None] = lambda ask, now: None,
    stall: Stall | None = None,
) -> Run:
    """Serve the requests; `then(ask, now)` may return another one when a request has ended."""
    engine = _Engine(knobs, card)
    metrics, events = Metrics("simulated", lambda: engine.kv_used), list[Event]()
    engine.trace.subscribe(metrics)
    engine.trace.subscribe(events.append)
    coming = [(ask.at, number) for number, ask in enumerate(load)]
    heapify(coming)
    all_asks, outcomes, moments = list(load), dict[int, Outcome](), list[Moment]()

    def conclude(number: int, times: Sequence[float], error: str | None = None) -> None:
        ask, now = all_asks[number], engine.trace.now
        outcomes[number] = Outcome(
            *(ask.at, ask.at, now, tuple(times), len(times), len(ask.prompt_ids), True, error)
        )
        another = then(ask, now)
        if another is not None:
            heappush(coming, (another.at, len(all_asks)))
            all_asks.append(another)

    while coming or engine.answers:
        if not engine.answers:
            engine.trace.now = max(engine.trace.now, coming[0][0])
        if stall is not None and engine.trace.now >= stall[0]:
            engine.trace.now, stall = engine.trace.now + stall[1], None
        while coming and coming[0][0] <= engine.trace.now:
            number = heappop(coming)[1]
            refused = engine.refusal(all_asks[number])
            if refused is None:
                engine.add(number, all_asks[number])
            else:
                conclude(number, (), refused)
        if engine.answers:
            num_tokens, ended = engine.step()
            for answer in ended:
                number, times = engine.answers.pop(answer)
                engine.keys[all_asks[number].tenant] -= 1
                conclude(number, times)
            running = len(engine.manager.rows)
            waiting = len(engine.answers) - running
            moments.append(Moment(engine.trace.now, running, waiting, engine.kv_used, num_tokens))
    in_order = [outcomes[number] for number in range(len(all_asks))]
    return Run(all_asks, in_order, moments, metrics.read(), events)
