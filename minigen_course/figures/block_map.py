"""A map of the KV cache, block by block, beside the sequences' block tables.

A block has the colour of its first owner, up to the level to which it is filled; the pale rest is
waste. Blocks of several owners are hatched. An arrow is a copy-on-write of this step.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minigen.trace.events import Event
from minigen.trace.timeline import MARKS
from minigen_course.figures.style import CYCLE, FAINT, INK, QUIET, draw_labels, figure, title
from minigen_course.figures.trace_views import PoolState

COLUMNS, MOST_ROWS, MOST_LABELS = (8, 16, 32), 12, 400
WIDTH, ROW, LANE = 5.3, 0.32, 0.3  # inches: the pool, a row of 16 blocks, a table
HALF = 0.6  # a block filled to more than this has a filled middle
DARK = 1.7  # a dark colour's red, green and blue add up to less
SIZE, GAP = 0.88, 0.06  # of a block's side, and half of the gap between two
CACHED = "#b3b3b3"

Colour = tuple[float, float, float]
Name = Callable[[int], str]
Place = tuple[float, float]


def block_map(
    states: SequenceOf[PoolState],
    step: int,
    num_blocks: int,
    block_size: int,
    name: Name = "request {}".format,
) -> Figure:
    """Draw blocks 1 to `num_blocks` and the block tables at the end of a step, and its events.

    `name` returns the label of a sequence id. Raises `ValueError` for a step that does not exist.
    """
    if not 0 <= step < len(states):
        raise ValueError(f"There are {len(states)} steps: there is no step {step}.")
    num_lanes = max(max(state.lanes.values(), default=0) for state in states) + 1
    longest = max(max(map(len, state.tables.values()), default=1) for state in states)
    inner = max(ROW * min(-(-num_blocks // COLUMNS[1]), MOST_ROWS), LANE * num_lanes)
    columns = min(COLUMNS, key=lambda each: abs(WIDTH / each - inner / -(-num_blocks // each)))
    num_rows, height = -(-num_blocks // columns), 1.0 + inner
    made, (pool, tables) = figure(11, height, ncols=2, width_ratios=(1, 1))
    made.set_layout_engine("none")  # a layout engine takes half of the time
    bottom, top = 0.4 / height, 1 - 0.3 / height
    pool.set_position((0.012, bottom, 0.485, top - bottom))
    tables.set_position((0.505, bottom, 0.485, top - bottom))
    state, look = states[step], _Look(states[step], block_size, num_blocks)
    for axes in (pool, tables):
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    _draw_pool(pool, look, num_blocks, columns, num_rows)
    _draw_tables(tables, look, num_lanes, longest, name)
    num_owned = len(look.fills)
    owned = f"step {step}: {num_owned} of {num_blocks} blocks owned, "
    title(pool, f"{owned}{state.waste(block_size):.1%} of their slots empty", y=1.0)
    title(tables, "block tables", y=1.0)
    made.text(0.012, 0.1 / height, caption_of(state.events, name), fontsize=9, color=INK)
    _legend(made, look, height)
    return made


def caption_of(events: SequenceOf[Event], name: Name = "request {}".format, most: int = 3) -> str:
    """Describe events in words: the first `most`, and how many more there are."""
    sentences = []
    for event in events:
        label, counts = name(event.sequence_id or 0), event.counts
        match MARKS[event.kind]:
            case "block copied":
                sentences.append(f"{label} copies block {counts['source']} to {counts['block']}")
            case "forked":
                sentences.append(f"{label} forks from {name(counts['parent'])}")
            case "prefix hit":
                sentences.append(f"{label} finds {counts['blocks']} blocks")
            case "preempted":
                sentences.append(f"{label} is preempted")
            case _:
                sentences.append(f"{label} ends")
    more = f"; and {len(sentences) - most} more" if len(sentences) > most else ""
    return "; ".join(sentences[:most]) + more


class _Look:
    """What each block looks like: its colour, how full it is, and whether it is shared."""

    def __init__(self, state: PoolState, block_size: int, num_blocks: int):
        self.state, self.num_blocks = state, num_blocks
        owners: dict[int, list[int]] = {}
        for sequence_id, table in state.tables.items():
            for block_id in table:
                owners.setdefault(block_id, []).append(sequence_id)
        self.fills = {
            block_id: filled / block_size for block_id, filled in state.fills(block_size).items()
        }
        self.shared = {block_id for block_id, those in owners.items() if len(those) > 1}
        self.colours = {block_id: self.colour_of(those[0]) for block_id, those in owners.items()}
        self.cached_only = state.kept - owners.keys()

    def colour_of(self, sequence_id: int) -> Colour:
        """Return the colour of a sequence's lane, a darker one beyond the palette.

        A paler one would look like the waste in another sequence's blocks.
        """
        lane = self.state.lanes[sequence_id]
        colour = to_rgb(CYCLE[lane % len(CYCLE)])
        return _darker(colour, 0.3 * (lane // len(CYCLE) % 3))

    def draw(self, axes: Axes, places: Mapping[Place, int]) -> None:
        """Draw blocks at the corners (x, y) of their squares: faces, fills, hatches, ids."""
        squares, faces, fills, inks, shared, plates, under = [], [], [], [], [], [], []
        for (x, y), block_id in places.items():
            squares.append(_box(x + GAP, y + GAP, SIZE, SIZE))
            colour = self.colours.get(block_id)
            faces.append(_face(colour, block_id in self.cached_only))
            if colour is None:
                continue
            fill = SIZE * self.fills[block_id]
            fills.append(_box(x + GAP, y + GAP + SIZE - fill, SIZE, fill))
            inks.append(colour)
            if block_id in self.shared:
                shared.append(squares[-1])
                plates.append(_box(x + 0.2, y + 0.28, 0.6, 0.44))  # a background for the id
                under.append(colour if self.fills[block_id] > HALF else faces[-1])
        hatched = {"facecolor": "none", "edgecolor": "white", "hatch": "///", "linewidth": 0}
        for boxes, look in (
            (squares, {"facecolor": faces, "edgecolor": FAINT}),
            (fills, {"facecolor": inks}),
            (shared, hatched),
            (plates, {"facecolor": under}),
        ):
            axes.add_collection(PolyCollection(boxes, **look), autolim=False)
        if len(places) <= MOST_LABELS:
            draw_labels(
                axes,
                (
                    (x + 0.5, y + 0.5, str(block_id), self._ink(block_id))
                    for (x, y), block_id in places.items()
                ),
            )

    def _ink(self, block_id: int) -> str:
        """Return a text colour that is readable on the block's middle."""
        colour = self.colours.get(block_id)
        if colour is None:
            return QUIET
        return "white" if self.fills[block_id] > HALF and sum(colour) < DARK else INK


def _draw_pool(axes: Axes, look: _Look, num_blocks: int, columns: int, num_rows: int) -> None:
    places: dict[Place, int] = {
        ((block_id - 1) % columns, (block_id - 1) // columns): block_id
        for block_id in range(1, num_blocks + 1)
    }
    look.draw(axes, places)
    corner = {block_id: place for place, block_id in places.items()}
    copied = [event for event in look.state.events if MARKS[event.kind] == "block copied"]
    for number, event in enumerate(copied):
        bend = 0.3 if number % 2 == 0 else -0.3  # two copies of a block must not hide each other
        (x, y), (to_x, to_y) = (corner[event.counts[end]] for end in ("source", "block"))
        axes.annotate(
            "",
            xy=(to_x + 0.5, to_y + 0.5),
            xytext=(x + 0.5, y + 0.5),
            arrowprops={
                **{"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}"},
                **{"color": INK, "lw": 1.6, "shrinkA": 6, "shrinkB": 6},
            },
        )
    axes.set(xlim=(0, columns + 0.5), ylim=(num_rows, 0))


def _draw_tables(axes: Axes, look: _Look, num_lanes: int, longest: int, name: Name) -> None:
    places: dict[Place, int] = {}
    width = max(longest, 12)
    for sequence_id, table in look.state.tables.items():
        lane = look.state.lanes[sequence_id]
        held = look.state.held[sequence_id]
        axes.text(
            *(-0.2, lane + 0.5, f"{name(sequence_id)}: {held} tokens"),
            fontsize=9,
            color=INK,
            ha="right",
            va="center",
        )
        places |= {(index, lane): block_id for index, block_id in enumerate(table)}
    look.draw(axes, places)
    axes.set(xlim=(-0.45 * width, width), ylim=(num_lanes, 0))


def _legend(made: Figure, look: _Look, height: float) -> None:
    handles = [
        Patch(facecolor=_paler(to_rgb(QUIET), 0.75), edgecolor=FAINT, label="waste"),
        Patch(facecolor=QUIET, edgecolor="white", hatch="////", label="several owners"),
        Patch(facecolor="white", edgecolor=FAINT, label="free"),
    ]
    if look.state.kept:
        handles.append(Patch(facecolor=CACHED, edgecolor=FAINT, label="cached, no owner"))
    made.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(0.995, -0.02 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def _face(colour: Colour | None, cached_only: bool) -> Colour:
    if colour is not None:
        return _paler(colour, 0.75)
    return to_rgb(CACHED if cached_only else "white")


def _paler(colour: Colour, share: float) -> Colour:
    red, green, blue = (part + (1 - part) * share for part in colour)
    return red, green, blue


def _darker(colour: Colour, share: float) -> Colour:
    red, green, blue = (part * (1 - share) for part in colour)
    return red, green, blue


def _box(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
