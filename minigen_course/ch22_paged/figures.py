"""A figure of one block table: the tokens of a sequence, and the blocks that hold them."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.figures.style import CYCLE, FAINT, INK, QUIET, figure, title

TOKENS, TABLE, POOL = 2.7, 1.6, 0.0  # y of the three rows
SIDE = 0.84  # of a box, whose place is one wide


def table_map(table: Sequence[int], num_tokens: int, num_blocks: int, block_size: int) -> Figure:
    """Draw a sequence's tokens by blocks, its block table, and blocks 0 to `num_blocks`.

    Raises `ValueError` if the table has too few blocks for the tokens, or unknown ones.
    """
    if len(table) * block_size < num_tokens or not set(table) <= set(range(num_blocks + 1)):
        raise ValueError(
            f"{num_tokens} tokens need {-(-num_tokens // block_size)} blocks of a pool of blocks 0 "
            f"to {num_blocks}, not {list(table)}."
        )
    made, axes = figure(10, 3.3)
    offset = (num_blocks + 1 - len(table)) / 2  # tokens and table stand in the middle
    for block_id in range(num_blocks + 1):
        _box(axes, block_id, POOL, "white", FAINT)
        _write(axes, block_id, POOL - 0.28, f"block {block_id}", QUIET)
    for index, block_id in enumerate(table):
        first = index * block_size
        held = min(block_size, num_tokens - first)
        colour = CYCLE[index % len(CYCLE)]
        x, ink = offset + index, "white" if 2 * held > block_size else INK
        for place, y in ((x, TOKENS), (block_id, POOL)):
            _box(axes, place, y, _pale(colour), FAINT)
            _box(axes, place, y, colour, FAINT, held / block_size)
        _write(axes, x, TOKENS + SIDE / 2, f"{first}-{first + held - 1}", ink)
        _box(axes, x, TABLE, "white", colour)
        _write(axes, x, TABLE + SIDE / 2, str(block_id), INK)
        _write(axes, x, TABLE + SIDE + 0.1, f"entry {index}", QUIET)
        _write(axes, block_id, POOL + SIDE / 2, f"{first}-{first + held - 1}", ink)
        axes.annotate(
            "",
            xy=(block_id + SIDE / 2, POOL + SIDE),
            xytext=(x + SIDE / 2, TABLE),
            arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6},
        )
    for y, name in ((TOKENS, "tokens"), (TABLE, "block table"), (POOL, "pool")):
        axes.text(-0.2, y + SIDE / 2, name, ha="right", va="center", fontsize=10, color=INK)
    axes.set(xlim=(-1.6, num_blocks + 1), ylim=(POOL - 0.5, TOKENS + SIDE + 0.1))
    axes.set_axis_off()
    title(axes, f"{num_tokens} tokens in blocks of {block_size}, which lie anywhere in the pool")
    return made


def _box(axes: Axes, x: float, y: float, face: object, edge: str, share: float = 1.0) -> None:
    axes.add_patch(Rectangle((x, y), SIDE * share, SIDE, facecolor=face, edgecolor=edge))


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x + SIDE / 2, y, text, ha="center", va="center", fontsize=9, color=colour)


def _pale(colour: str) -> tuple[float, float, float]:
    red, green, blue = (part + (1 - part) * 0.75 for part in to_rgb(colour))
    return red, green, blue
