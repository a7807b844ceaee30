"""An engine's events, step by step: requests, tokens and blocks; and figures of a step.

Record from the engine's start, because sequences that started earlier are unknown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.trace.events import Event
from minigen.trace.timeline import MARKS, Request, State, Timeline
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    INK,
    QUIET,
    SKY,
    figure,
    printable,
    title,
)

QUEUED, PREFILL, DECODE, PREEMPTED, PAUSED = "queued", "prefill", "decode", "preempted", "paused"
NEWS = {"prefix hit", "forked", "preempted", "block copied", "finished", "aborted", "failed"}
_OTHERS = {State.QUEUED: QUEUED, State.PREEMPTED: PREEMPTED, State.RUNNING: PAUSED}


@dataclass(frozen=True)
class Part:
    """The tokens that a step computes for one request: positions from `first` up to before `end`.

    `kind` is `PREFILL` (a chunk of a prompt, or of recomputed tokens) or `DECODE`; `gives` says
    whether it leads to a new token. `blocks` are the ids of the request's blocks, in order.
    """

    request: int
    kind: str
    first: int
    end: int
    gives: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StepSeen:
    """A step: its start and end in nanoseconds, its parts, and the requests that are not in it.

    `others` has the states of requests that have arrived and are not in the step: `QUEUED`,
    `PREEMPTED`, or `PAUSED` (it holds blocks and got no tokens). `num_blocks` is the number of
    blocks that requests hold in this step.
    """

    started_ns: int
    ended_ns: int
    parts: tuple[Part, ...]
    others: dict[int, str]
    num_blocks: int

    @property
    def num_prefill(self) -> int:
        """The number of prefill tokens."""
        return sum(part.end - part.first for part in self.parts if part.kind == PREFILL)

    @property
    def num_decode(self) -> int:
        """The number of decode tokens, one per sequence."""
        return sum(part.end - part.first for part in self.parts if part.kind == DECODE)


@dataclass
class Story:
    """The history of a run: requests in the order of arrival, and steps in order.

    `arrived` has, per request, the number of steps that had ended by then, and the time in
    nanoseconds; `ended` likewise, for requests that have ended.
    """

    requests: list[int] = field(default_factory=list)
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)


def story(events: Iterable[Event]) -> Story:
    """Build a story from events, oldest first, without requests whose arrival is missing."""
    made, parts, started_ns = Story(), list[Part](), 0

    def arrive(request: Request) -> None:
        if request.queued_ns is not None:
            made.requests.append(request.sequence_id)
            made.arrived[request.sequence_id] = (len(made), request.queued_ns)

    def end(request: Request, event: Event) -> None:
        if request.queued_ns is not None:
            made.ended[request.sequence_id] = (len(made), event.time_ns)

    def add_part(request: Request, event: Event) -> None:
        if request.prompt_tokens is None:
            return
        nonlocal started_ns
        started_ns = started_ns if parts else event.time_ns
        first, end = event.counts["computed"], request.num_computed
        gives = end == request.prompt_tokens + request.output_tokens
        kind = DECODE if gives and end - first == 1 and first > 0 else PREFILL
        parts.append(Part(request.sequence_id, kind, first, end, gives, tuple(request.table)))

    def end_step(event: Event) -> None:
        held = {block for part in parts for block in part.blocks}
        held.update(*(each.table for each in timeline.requests.values()))
        others = {number: _OTHERS[each.state] for number, each in timeline.requests.items()}
        for part in parts:
            others.pop(part.request, None)
        made.steps.append(StepSeen(started_ns, event.time_ns, tuple(parts), others, len(held)))
        parts.clear()

    timeline = Timeline(on_request=arrive, on_chunk=add_part, on_end=end, on_step=end_step)
    timeline.replay(events)
    return made


@dataclass(frozen=True)
class PoolState:
    """The pool of blocks at the end of a step.

    `tables` are the block tables of the sequences, `held` the tokens in them, `lanes` a small
    number per sequence that no other has at the same time. `kept` are the blocks of the prefix
    cache, with or without other owners. `events` are the step's events that change the owners of
    blocks.
    """

    tables: Mapping[int, tuple[int, ...]]
    held: Mapping[int, int]
    lanes: Mapping[int, int]
    kept: frozenset[int]
    events: tuple[Event, ...]

    def owners(self, block_id: int) -> list[int]:
        """Return the sequences that own a block, in the order of their arrival."""
        return [each for each, table in self.tables.items() if block_id in table]

    def fills(self, block_size: int) -> dict[int, int]:
        """Return the tokens in each block that a sequence owns; shared blocks count once."""
        found: dict[int, int] = {}
        for sequence_id, table in self.tables.items():
            for index, block_id in enumerate(table):
                tokens = self.held[sequence_id] - index * block_size
                filled = min(max(tokens, 0), block_size)
                found[block_id] = max(found.get(block_id, 0), filled)
        return found

    def waste(self, block_size: int) -> float:
        """Return the share of empty slots in owned blocks; 0 if no block is owned."""
        fills = self.fills(block_size)
        return 1 - sum(fills.values()) / (len(fills) * block_size) if fills else 0.0

    def num_references(self, block_id: int) -> int:
        """Return a block's reference count: its owners, including the prefix cache."""
        return len(self.owners(block_id)) + (block_id in self.kept)


def pool_states(events: Iterable[Event]) -> list[PoolState]:
    """Return the pool's state at the end of each recorded step."""
    states, news = list[PoolState](), list[Event]()

    def end_step(_: Event) -> None:
        rows = {each.sequence_id: row for each, row in timeline.rows.items()}
        tables = {each.sequence_id: tuple(each.table) for each in timeline.rows}
        held = {each.sequence_id: each.num_computed for each in timeline.rows}
        states.append(PoolState(tables, held, rows, frozenset(timeline.cached), tuple(news)))
        news.clear()

    timeline = Timeline(on_step=end_step)
    for event in events:
        if MARKS.get(event.kind) in NEWS:
            news.append(event)
        timeline(event)
    return states


MOST_CELLS = 14  # per chunk; the middle of a longer one is left out
SHADES = {DECODE: SKY, PREFILL: AMBER}
_ROW = 0.62


def step_view(
    run: Iterable[Event] | Story,
    step: int,
    *,
    block_size: int,
    budget: int,
    texts: Mapping[int, Sequence[str]] | None = None,
) -> Figure:
    """Draw a row for each sequence of a step: its tokens, their positions and their slots.

    A token is framed if its row of logits is needed to sample the next token. The last row is the
    budget. `texts` has the tokens of each request as text, by the request's id. Raises `ValueError`
    for a step that does not exist.
    """
    history = run if isinstance(run, Story) else story(run)
    if not 0 <= step < len(history):
        raise ValueError(f"Steps are 0 to {len(history) - 1}: there is no step {step}.")
    seen = history.steps[step]
    numbers = {request: number for number, request in enumerate(history.requests, 1)}
    most = max(len(each.parts) for each in history.steps)  # so that a replay keeps its size
    made, axes = figure(10.5, _ROW * (most + 1) + 0.9)
    for row, part in enumerate(seen.parts):
        known = (texts or {}).get(part.request, ())
        _draw_part(axes, row, part, printable(known), block_size)
        kind = "decode" if part.kind == DECODE else "prefill"
        axes.text(-0.2, row, f"request {numbers[part.request]}, {kind}", ha="right", va="center")
    _draw_budget(axes, len(seen.parts), seen.num_decode, seen.num_prefill, budget)
    axes.set(xlim=(-3.2, MOST_CELLS + 1.1), ylim=(most + 0.45, -0.55))
    axes.axis("off")
    rows = sum(part.gives for part in seen.parts)
    tokens = seen.num_decode + seen.num_prefill
    title(
        axes,
        f"Step {step}: {tokens} tokens of {len(seen.parts)} sequences, "
        f"{rows} {'row' if rows == 1 else 'rows'} of logits (framed)",
    )
    return made


def shown_places(part: Part) -> list[int | None]:
    """Return the positions of a part that are drawn; None stands for the omitted middle."""
    places = list(range(part.first, part.end))
    if len(places) <= MOST_CELLS:
        return list(places)
    kept = MOST_CELLS - 1
    return [*places[: kept - kept // 2], None, *places[-(kept // 2) :]]


def slot_of(part: Part, position: int, block_size: int) -> int | None:
    """Return the slot of a position's keys and values; None if its block is unknown."""
    block = position // block_size
    if block >= len(part.blocks):
        return None
    return part.blocks[block] * block_size + position % block_size


def _draw_part(axes: Axes, row: int, part: Part, known: list[str], block_size: int) -> None:
    for column, position in enumerate(shown_places(part)):
        middle = column + 0.47
        if position is None:
            left_out = part.end - part.first - (MOST_CELLS - 1)
            axes.text(middle, row, f"{left_out}\nmore", ha="center", va="center", fontsize=8)
            continue
        framed = part.gives and position == part.end - 1
        axes.add_patch(
            Rectangle(
                *((column, row - 0.4), 0.94, 0.8),
                facecolor=SHADES[part.kind],
                edgecolor=INK if framed else "none",
                linewidth=2.0,
            )
        )
        text = known[position] if position < len(known) else "·"
        slot = slot_of(part, position, block_size)
        where = f"{position} → {'?' if slot is None else slot}"
        short = text if len(text) <= 8 else f"{text[:7]}…"
        axes.text(middle, row - 0.13, short, ha="center", va="center", fontsize=8, color=INK)
        axes.text(middle, row + 0.22, where, ha="center", va="center", fontsize=7, color=INK)


def _draw_budget(axes: Axes, row: int, decode: int, prefill: int, budget: int) -> None:
    """Draw how much of the budget is used; the whole budget is as wide as the row."""
    axes.text(-0.2, row, "budget", ha="right", va="center")
    scale, left = MOST_CELLS / budget, 0.0
    for count, colour in ((decode, BLUE), (prefill, AMBER), (budget - decode - prefill, FAINT)):
        axes.add_patch(Rectangle((left, row - 0.2), count * scale, 0.28, color=colour, linewidth=0))
        left += count * scale
    axes.text(
        *(0, row + 0.3),
        f"{decode} for decodes, {prefill} for prompts, {budget - decode - prefill} left "
        f"of {budget}; below a token: position → slot",
        va="center",
        fontsize=8,
        color=QUIET,
    )
