"""What one step of the engine is made of, token by token."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.trace import Event
from minigen.viz.story import DECODE, PREFILL, Part, Story, story
from minigen.viz.style import AMBER, BLUE, FAINT, INK, QUIET, SKY, YELLOW, figure, printable, title

MOST_CELLS = 14  # of a chunk; of a longer one the middle is left out
SHADES = {DECODE: SKY, PREFILL: YELLOW}
_ROW = 0.62


def step_view(
    run: Iterable[Event] | Story,
    step: int,
    *,
    block_size: int,
    budget: int,
    texts: Mapping[int, Sequence[str]] | None = None,
) -> Figure:
    """A row for each sequence of a step: its tokens, their positions, the slots that they go to.

    A token whose row of logits is needed, since a token of the answer comes of it, stands in a
    frame. The last row is the budget. `texts` has the tokens of requests, as text, by the request's
    id. Raises `ValueError` for a step that there is not.
    """
    told = run if isinstance(run, Story) else story(run)
    if not 0 <= step < len(told):
        raise ValueError(f"Steps are 0 to {len(told) - 1}: there is no step {step}.")
    seen = told.steps[step]
    numbers = {request: number for number, request in enumerate(told.requests, 1)}
    most = max(len(each.parts) for each in told.steps)  # so that a replay keeps its size
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
    """The positions of a part that are drawn; None stands for a middle that is left out."""
    places = list(range(part.first, part.end))
    if len(places) <= MOST_CELLS:
        return list(places)
    kept = MOST_CELLS - 1
    return [*places[: kept - kept // 2], None, *places[-(kept // 2) :]]


def slot_of(part: Part, position: int, block_size: int) -> int | None:
    """Where the keys and values of a position go; None where the blocks are not known."""
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
    """How much of the budget is used, on the scale of the row's width."""
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
