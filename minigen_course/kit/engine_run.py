"""Run a small engine with a learner's part in it, and draw what its steps did.

The engine runs in the box, and only numbers leave it: they are checked here, and the picture is
drawn in this process. The model is tiny and random, and the requests are always the same.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from minigen.engine.engine import Engine
from minigen.engine.model_runner import PagedRunner
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache import paged
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import BatchSampler
from minigen.sequence import SampledToken, ScheduledChunk, Sequence
from minigen.sockets.checks_cache import CheckedAllocator, CheckedPrefixCache, TrackedAllocator
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.trace.events import EventKind, Recorder, Trace
from minigen_course.ch23_prefix.lesson import WithoutEviction
from minigen_course.figures.explore import png
from minigen_course.figures.gantt import gantt
from minigen_course.figures.trace_views import (
    DECODE,
    PAUSED,
    PREEMPTED,
    PREFILL,
    QUEUED,
    Part,
    StepSeen,
    Story,
    story,
)
from minigen_course.grading.exercise import exercises
from minigen_course.grading.plug_in import using
from minigen_course.lab.small_model import HEAD_DIM, KV_HEADS, VOCAB, recording_model

BLOCK_SIZE, MAX_NUM_SEQS, BUDGET, NUM_LAYERS = 5, 3, 20, 2
SHARED = (5, 17, 2, 23, 11, 8, 26, 14, 1, 24)  # tokens that all prompts begin with: two blocks
PROMPTS = ((3, 19, 7, 12, 20), (9, 1), (4, 13, 22, 6, 16, 10, 25), (18, 21, 0))
MAX_OUTPUTS = (8, 12, 6, 9)
FORKED = 2  # the number of the request with several answers
LATE = 3  # steps before the last request arrives
# Every token ends a request, apart from those that it gets if all parts are right.
ENDS_GREEDY = frozenset(range(VOCAB)) - {4, 10, 11, 12, 22, 24}
ENDS_DRAWN = frozenset(range(VOCAB)) - {2, 6, 7, 10, 11, 12, 16, 19, 20, 22, 26}
MOST_STEPS, MOST_REQUESTS, LARGEST = 80, 8, 1000
MOST_BYTES = 300_000  # of a picture
KINDS = (PREFILL, DECODE)
STATES = (QUEUED, PREEMPTED, PAUSED)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(
    temperature=1.0, top_p=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.4
)


Deliver = Callable[[Sequence, SampledToken], None]


@dataclass(frozen=True)
class Parts:
    """The parts of a small engine; the package's own, apart from the one to be seen.

    `loop` makes an engine's loop of scheduler, runner, sampler and `deliver`; None is the package's
    engine. `replaced` are functions and classes of the package that are exchanged by name. One
    request has `num_answers`.
    """

    allocator: Callable[[int], Any] = BlockAllocator
    prefix_cache: Callable[[Any, int], Any] | None = None
    scheduler: Callable[..., Any] = ContinuousScheduler
    loop: Callable[..., Any] | None = None
    chapter: str = ""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams = GREEDY
    end_ids: frozenset[int] = ENDS_GREEDY
    num_blocks: int = 24
    num_answers: int = 1


def _replaced(chapter: str, name: str, part: Any, **others: Any) -> Parts:
    return Parts(chapter=chapter, replaced={name: part}, **others)


def _prefix_tree(part: Any) -> Parts:
    return Parts(prefix_cache=lambda allocator, size: WithoutEviction(part(allocator, size)))


VISIBLE: dict[tuple[str, str], Callable[[Any], Parts]] = {
    **{
        ("16", name): partial(_replaced, "16", name, params=DRAWN, end_ids=ENDS_DRAWN)
        for name in ("keep_top_p", "apply_penalties", "draw")
    },
    ("21", "BlockAllocator"): lambda part: Parts(allocator=part, num_answers=2),
    ("21", "copy_on_write"): partial(_replaced, "21", "copy_on_write", num_answers=2),
    ("22", "slots_of"): partial(_replaced, "22", "slots_of"),
    ("22", "KVPool"): partial(_replaced, "22", "KVPool", num_answers=2),
    ("23", "PrefixTree"): _prefix_tree,
    ("23", "RadixPrefixCache"): lambda part: Parts(prefix_cache=part, num_blocks=8),
    ("24", "SlotScheduler"): lambda part: Parts(scheduler=part, num_blocks=12),
    ("24", "ChunkingScheduler"): lambda part: Parts(scheduler=part, num_blocks=12),
    ("24", "PreemptingScheduler"): lambda part: Parts(scheduler=part, num_blocks=8),
    ("25", "StepLoop"): lambda part: Parts(loop=part),
}


@dataclass(frozen=True)
class Run:
    """What a small engine did: its story, and the tokens that each request got."""

    story: Story
    tokens: tuple[tuple[int, ...], ...]


def watch(chapter: str, name: str, part: Any) -> str:
    """Run a small engine with a part, and return its steps as JSON, which `read_run` reads.

    Raises any error of the part.
    """
    parts = VISIBLE[chapter, name](part)
    with contextlib.redirect_stdout(io.StringIO()):
        if not parts.replaced:
            return _run(parts)
        with using(parts.chapter, **parts.replaced):
            return _run(parts)


@cache
def package_run(chapter: str, name: str) -> str:
    """Return the steps of a small engine whose parts are all the package's own."""
    return watch(chapter, name, exercises(chapter)[name].solution)


class _Watched:
    """A scheduler that passes every call on, and emits the events of an engine."""

    def __init__(self, scheduler: Any, trace: Trace):
        self.scheduler, self.trace = scheduler, trace

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        for each in (sequence, *sequence.siblings):
            self.trace.emit(
                EventKind.QUEUED,
                each.sequence_id,
                prompt_tokens=len(each.prompt_ids),
                waited_ns=0,
            )
        self.scheduler.add(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule the next step."""
        found: list[ScheduledChunk] = self.scheduler.schedule()
        return found

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Commit a step."""
        for chunk in chunks:
            self.trace.emit(
                EventKind.SCHEDULED,
                chunk.sequence.sequence_id,
                tokens=chunk.num_tokens,
                computed=chunk.sequence.num_computed,
            )
        progress: list[tuple[Sequence, SampledToken]] = self.scheduler.commit(chunks, tokens)
        for sequence, token in progress:
            number = sequence.sequence_id
            self.trace.emit(EventKind.NEW_TOKEN, number, token=token.token_id)
            if sequence.finish_reason is not None:
                count = len(sequence.output_ids)
                self.trace.emit(EventKind.FINISHED, number, output_tokens=count, stopped=0)
        self.trace.emit(EventKind.STEP, sequences=len(chunks), tokens=0, duration_ns=0)
        return progress

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence."""
        self.scheduler.abort(sequence)


@dataclass(frozen=True)
class _Delivering:
    """The package's engine as a loop that delivers each token."""

    engine: Engine
    deliver: Deliver

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.engine.add(sequence)

    def step(self) -> None:
        """Run one step."""
        for sequence, token in self.engine.step():
            self.deliver(sequence, token)


def _run(parts: Parts) -> str:
    """Serve the requests, and return what was done and delivered."""
    trace, recorder = Trace(), Recorder()
    trace.subscribe(recorder)
    arrivals = list(_requests(parts))
    tokens = {each: list[int]() for family in arrivals for each in (family, *family.siblings)}
    loop = _loop(parts, trace, lambda sequence, token: tokens[sequence].append(token.token_id))
    for step in range(MOST_STEPS):
        for sequence in arrivals[:-1] if step == 0 else arrivals[-1:] if step == LATE else ():
            loop.add(sequence)
        if step > LATE and all(each.finish_reason for each in tokens):
            return _written(story(recorder.events), list(tokens.values()))
        loop.step()
    raise RuntimeError(f"after {MOST_STEPS} steps some requests are unfinished")


def _loop(parts: Parts, trace: Trace, deliver: Deliver) -> Any:
    """Build an engine; one of a learner delivers tokens itself."""
    manager = _manager(parts, trace)
    planned = parts.scheduler(manager, MAX_NUM_SEQS, BUDGET)
    scheduler = _Watched(CheckedScheduler(planned, manager, BUDGET), trace)
    windows = [None] * NUM_LAYERS
    pool = paged.KVPool(  # looked up here, because a learner's may stand there
        NUM_LAYERS, parts.num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.float32
    )
    runner = PagedRunner(recording_model(windows), pool, manager, windows, BUDGET, 1)
    if parts.loop is not None:
        return parts.loop(scheduler, runner, BatchSampler(), deliver)
    return _Delivering(Engine(scheduler, runner, BatchSampler(), Trace()), deliver)


def _manager(parts: Parts, trace: Trace) -> BlockManager:
    allocator = CheckedAllocator(parts.allocator(parts.num_blocks), parts.num_blocks)
    kept = None
    if parts.prefix_cache is not None:
        tracked = TrackedAllocator(allocator, parts.prefix_cache)
        made = parts.prefix_cache(tracked, BLOCK_SIZE)
        kept = CheckedPrefixCache(made, tracked, BLOCK_SIZE)
    rows = MAX_NUM_SEQS + parts.num_answers
    return BlockManager(allocator, kept, BLOCK_SIZE, rows, parts.num_blocks, trace)


def _requests(parts: Parts) -> Iterator[Sequence]:
    """Yield the requests, each with its siblings."""
    number = 1
    for index, (prompt, most) in enumerate(zip(PROMPTS, MAX_OUTPUTS, strict=True)):
        given = ((*SHARED, *prompt), parts.params, index, most, parts.end_ids)
        count = parts.num_answers if index + 1 == FORKED else 1
        others = tuple(Sequence(number + choice, *given, choice) for choice in range(1, count))
        yield Sequence(number, *given, siblings=others)
        number += count


def _written(found: Story, tokens: list[list[int]]) -> str:
    """Return a run as lists of small whole numbers, in JSON."""
    steps = [
        [
            seen.num_blocks,
            [
                [each.request, KINDS.index(each.kind), each.first, each.end, int(each.gives)]
                for each in seen.parts
            ],
            [[request, STATES.index(state)] for request, state in seen.others.items()],
        ]
        for seen in found.steps
    ]
    times = [
        [[request, at[0]] for request, at in each.items()] for each in (found.arrived, found.ended)
    ]
    return json.dumps([steps, *times, tokens])


def read_run(text: str) -> Run | None:
    """Return the run that a box said; None for what cannot be one."""
    try:
        steps, arrived, ended, tokens = json.loads(text)
        if not 0 < len(steps) <= MOST_STEPS or not 0 < len(arrived) <= MOST_REQUESTS:
            return None
        times = {_number(request): _time(at, steps) for request, at in arrived}
        found = Story(
            requests=list(times),
            arrived=times,
            ended={_known(request, times): _time(at, steps) for request, at in ended},
            steps=[_step(number, each, times) for number, each in enumerate(steps)],
        )
        return Run(found, tuple(tuple(map(_number, each)) for each in tokens))
    except (ValueError, TypeError, IndexError, RecursionError):
        return None


def _step(number: int, step: Any, known: Mapping[int, Any]) -> StepSeen:
    num_blocks, parts, others = step
    return StepSeen(
        *(number, number + 1, tuple(_part(each, known) for each in parts)),
        {_known(request, known): STATES[_number(state)] for request, state in others},
        _number(num_blocks),
    )


def _part(part: Any, known: Mapping[int, Any]) -> Part:
    request, kind, first, end, gives = part
    if _number(end) <= _number(first):
        raise ValueError(f"a part from {first} to {end} has no tokens")
    return Part(_known(request, known), KINDS[_number(kind)], first, end, gives == 1, ())


def _time(num_steps: Any, steps: SequenceOf[Any]) -> tuple[int, int]:
    if _number(num_steps) >= len(steps):
        raise ValueError(f"there is no step {num_steps}")
    return num_steps, 0


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is no number of a run")
    return value


def _known(request: Any, known: Mapping[int, Any]) -> int:
    if _number(request) not in known:
        raise ValueError(f"request {request} never arrived")
    return _number(request)


@dataclass(frozen=True)
class Picture:
    """A picture of a run as PNG (empty if it is too large), and a sentence on it.

    `is_same` says whether the package's part did the same.
    """

    png: bytes
    said: str
    is_same: bool


@cache
def picture(chapter: str, name: str, run: str) -> Picture:
    """Draw a run with a learner's part, and beside it one with the package's if they differ."""
    mine, its = read_run(run), read_run(package_run(chapter, name))
    assert mine is not None, "a run is stored only if it can be read"
    assert its is not None, "the package's own parts run"
    runs = {f"with your {name}": mine.story}
    if mine.story != its.story:
        runs["with the package's"] = its.story
    parts = VISIBLE[chapter, name](None)
    names = [
        f"request {number}" + (", 2nd answer" if choice else "")
        for number in range(1, len(PROMPTS) + 1)
        for choice in range(parts.num_answers if number == FORKED else 1)
    ]
    made = png(gantt(runs, names=names, num_blocks=parts.num_blocks, budget=BUDGET))
    return Picture(made if len(made) <= MOST_BYTES else b"", _said(mine, its), mine == its)


def _said(mine: Run, its: Run) -> str:
    """Return what is the same in two runs, and what is not."""
    if mine == its:
        return (
            "Your part and the package's took the same steps, and the requests got the same tokens."
        )
    same = "the same tokens" if mine.tokens == its.tokens else "other tokens"
    if mine.story == its.story:
        return f"Your part took the same steps as the package's, but the requests got {same}."
    count, right = len(mine.story), len(its.story)
    steps = f"{count} steps, as the package's, but did other work in them"
    if count != right:
        steps = f"{count} steps, and the package's {right}"
    return f"Your part took {steps}; the requests got {same}."
