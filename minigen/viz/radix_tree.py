"""The prefix cache as a tree that grows and is evicted, and what each prompt found in it."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.viz.style import AMBER, FAINT, GREEN, INK, ORANGE, QUIET, SKY, figure, printable, title
from minigen.viz.tree_states import Kept, TreeState

COLUMN, ROW, LETTER = 1.75, 0.3, 0.083  # inches
MOST, MOST_COLUMNS = 24, 7  # rows and columns of blocks that are drawn
Spell = Callable[[Sequence[int]], str]


def radix_tree(states: Sequence[TreeState], step: int, block_size: int, spell: Spell) -> Figure:
    """The tree after a step above the prompts so far, one column for each block of tokens.

    Blue is used by a request, grey is kept for whoever comes next; a new block has a thick edge, an
    evicted one a dashed edge. Of a prompt, green was found in the tree and amber computed. `spell`
    turns token ids into text. What lies beyond `MOST` rows or `MOST_COLUMNS` is cut off. Raises
    `ValueError` for a step that there is not.
    """
    if not 0 <= step < len(states):
        raise ValueError(f"These are the steps 0 to {len(states) - 1}: there is no step {step}.")
    state, last = states[step], states[-1]
    num_rows = min(max(max(_rows(_shown(each)).values(), default=0) for each in states) + 1, MOST)
    num_columns = min(_num_columns(states, block_size), MOST_COLUMNS)
    num_prompts = len(last.requests)
    made, (tree, prompts) = figure(
        max(COLUMN * num_columns + 1.2, 8),
        ROW * (num_rows + num_prompts) + 1.7,
        nrows=2,
        height_ratios=(num_rows, num_prompts),
    )
    for axes, count in ((tree, num_rows), (prompts, num_prompts)):
        axes.set(xlim=(-0.02, num_columns), ylim=(count, 0), xticks=[], yticks=[])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    _draw_tree(tree, state, spell)
    _draw_prompts(prompts, state, block_size, spell)
    unused = sum(not each.users for each in state.kept.values())
    title(tree, f"After step {step} the tree keeps {len(state.kept)} blocks; nobody uses {unused}")
    found, asked = _found_and_asked(state)
    title(prompts, f"Prompts so far: {found} of {asked} tokens were found in the tree")
    _add_legend(made)
    return made


def _found_and_asked(state: TreeState) -> tuple[int, int]:
    begun = [each for each in state.requests.values() if each.num_found is not None]
    return sum(each.num_found or 0 for each in begun), sum(len(each.prompt) for each in begun)


def _shown(state: TreeState) -> dict[int, Kept]:
    """What is drawn: all that is kept, and what went in this step, in the order of growth."""
    return dict(sorted({**state.kept, **state.evicted}.items()))


def _rows(kept: dict[int, Kept]) -> dict[int, int]:
    """A row for each node: a first child stands in its parent's, every other one in a new row."""
    below: dict[int | None, list[int]] = {}
    for node, each in kept.items():
        below.setdefault(each.above if each.above in kept else None, []).append(node)
    rows: dict[int, int] = {}
    waiting = list(reversed(below.get(None, [])))
    while waiting:
        node = waiting.pop()
        above = kept[node].above
        first = above in kept and below[above][0] == node
        rows[node] = rows[above] if first and above is not None else len(set(rows.values()))
        waiting += reversed(below.get(node, []))
    return rows


def _depth(kept: dict[int, Kept], node: int) -> int:
    above, depth = kept[node].above, 0
    while above is not None and above in kept:
        above, depth = kept[above].above, depth + 1
    return depth


def _num_columns(states: Sequence[TreeState], block_size: int) -> int:
    widest = max(-(-len(each.prompt) // block_size) for each in states[-1].requests.values())
    trees = [_shown(state) for state in states]
    return max(widest, *(1 + _depth(kept, node) for kept in trees for node in kept), 1)


def _draw_tree(axes: Axes, state: TreeState, spell: Spell) -> None:
    kept = _shown(state)
    rows = _rows(kept)
    for node, row in rows.items():
        each, column = kept[node], _depth(kept, node)
        gone, new = node not in state.kept, node in state.grown
        fill = "white" if gone else SKY if each.users else FAINT
        patch = _box(axes, column, row, 1, fill, spell(each.tokens))
        patch.set(
            edgecolor=ORANGE if new else QUIET,
            linewidth=2.4 if new else 1,
            linestyle="--" if gone else "-",
        )
        if each.above is not None and each.above in kept:
            up, here = rows[each.above] + 0.5, row + 0.5
            line = [column - 0.08, column - 0.04, column - 0.04, column]
            axes.plot(line, [up, up, here, here], color=QUIET, linewidth=1, zorder=0)


def _draw_prompts(axes: Axes, state: TreeState, block_size: int, spell: Spell) -> None:
    for row, request in enumerate(state.requests.values()):
        for column, start in enumerate(range(0, len(request.prompt), block_size)):
            tokens = request.prompt[start : start + block_size]
            fill = "white"
            if request.num_found is not None:
                fill = GREEN if start < request.num_found else AMBER
            share = len(tokens) / block_size
            _box(axes, column, row, share, fill, spell(tokens))


def _box(axes: Axes, column: int, row: int, share: float, fill: str, text: str) -> Rectangle:
    width = 0.92 * share
    patch = Rectangle((column, row + 0.1), width, 0.8, facecolor=fill, edgecolor=QUIET)
    axes.add_patch(patch)
    room = max(int(COLUMN * width / LETTER), 1)
    (seen,) = printable([text])
    axes.text(
        column + 0.03,
        row + 0.5,
        seen if len(seen) <= room else seen[: room - 1] + "…",
        fontsize=8,
        family="DejaVu Sans Mono",
        va="center",
        color="white" if fill == GREEN else INK,
        clip_on=True,
    )
    return patch


def _add_legend(made: Figure) -> None:
    looks: dict[str, dict[str, Any]] = {
        "used by a request": {"facecolor": SKY, "edgecolor": QUIET},
        "kept for whoever comes next": {"facecolor": FAINT, "edgecolor": QUIET},
        "new": {"facecolor": "white", "edgecolor": ORANGE, "linewidth": 2.4},
        "evicted": {"facecolor": "white", "edgecolor": QUIET, "linestyle": "--"},
        "prompt: found": {"facecolor": GREEN, "edgecolor": QUIET},
        "prompt: computed": {"facecolor": AMBER, "edgecolor": QUIET},
    }
    patches = [Patch(label=name, **look) for name, look in looks.items()]
    made.legend(
        handles=patches,
        frameon=False,
        ncols=len(patches),
        loc="outside lower left",
        labelcolor=INK,
        fontsize=8,
    )
