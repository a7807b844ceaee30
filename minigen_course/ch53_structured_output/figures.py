"""Figures of structured outputs: an automaton, a trie, masks over logits, retries, forced text."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from torch import Tensor

from minigen_course.ch53_structured_output.automaton import Automaton, Trie, trie_of
from minigen_course.ch53_structured_output.lesson import Piece, Tries
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    QUIET,
    figure,
    printable,
    title,
)

RADIUS = 0.27


def spelled(bytes_of_one: Sequence[int]) -> str:
    """Return a set of bytes as a label: single characters, and ranges of neighbours."""
    runs: list[list[int]] = []
    for byte in sorted(bytes_of_one):
        if runs and byte == runs[-1][1] + 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    named = [
        _name(first) if first == last else f"{_name(first)}-{_name(last)}" for first, last in runs
    ]
    return " ".join(printable(named)) if len(named) <= 3 else f"{len(bytes_of_one)} bytes"


def _name(byte: int) -> str:
    return chr(byte) if 32 <= byte < 127 else f"{byte:02x}"


def state_diagram(automaton: Automaton, now: int | None = None) -> Figure:
    """Draw the states of an automaton by their distance from the first; an end has two circles.

    The state `now` is filled. Arrows that lead nowhere are not drawn: those bytes are forbidden.
    """
    columns = _columns(automaton)
    width, height = len(columns), max(map(len, columns))
    made, axes = figure(max(5.0, 1.35 * width), 0.9 + 1.1 * height)
    places = {
        state: (1.35 * x, -1.15 * (y - (len(column) - 1) / 2))
        for x, column in enumerate(columns)
        for y, state in enumerate(column)
    }
    for state, moves in enumerate(automaton.moves):
        for target in sorted(set(moves.values())):
            label = spelled([byte for byte, after in moves.items() if after == target])
            _move(axes, places[state], places[target], label)
    for state, place in places.items():
        fill = AMBER if state == now else PALE
        axes.add_patch(Circle(place, RADIUS, facecolor=fill, edgecolor=INK, zorder=3))
        if state in automaton.ends:
            axes.add_patch(Circle(place, RADIUS - 0.06, fill=False, edgecolor=INK, zorder=4))
        axes.text(*place, str(state), ha="center", va="center", fontsize=9, color=INK, zorder=5)
    low = min(y for _, y in places.values())
    axes.set(xlim=(-0.5, 1.35 * (width - 1) + 0.6), ylim=(low - 0.5, -low + 0.95))
    axes.set_aspect("equal")
    axes.axis("off")
    return made


def _columns(automaton: Automaton) -> list[list[int]]:
    """Return the states in columns, so that arrows to states found later lead to the right."""
    column = [0] * len(automaton.moves)
    for state, moves in enumerate(automaton.moves):
        for after in moves.values():
            if after > state:
                column[after] = max(column[after], column[state] + 1)
    return [
        [state for state, at in enumerate(column) if at == place]
        for place in range(max(column) + 1)
    ]


def _move(axes: object, start: tuple[float, float], end: tuple[float, float], label: str) -> None:
    loop = start == end
    (x0, y0), (x1, y1) = start, end
    if loop:
        start, end, bend = (x0 - 0.14, y0 + 0.22), (x0 + 0.14, y0 + 0.22), -1.6
        middle = (x0, y0 + 0.48)
    else:
        adjacent = 0 < x1 - x0 < 1.5
        bend = 0.0 if adjacent else 0.4 if y1 < y0 else -0.4
        # The middle of the curve: half of the way from the chord to its control point.
        middle = (
            (x0 + x1) / 2 + bend / 2 * (y1 - y0),
            (y0 + y1) / 2 - bend / 2 * (x1 - x0) + (0.06 if adjacent or bend < 0 else -0.3),
        )
    arrow = FancyArrowPatch(
        start,
        end,
        connectionstyle=f"arc3,rad={bend}",
        arrowstyle="-|>",
        mutation_scale=11,
        shrinkA=0 if loop else 20,
        shrinkB=0 if loop else 20,
        color=QUIET,
    )
    axes.add_patch(arrow)  # type: ignore[attr-defined]
    axes.text(*middle, label, ha="center", va="bottom", fontsize=9, color=BLUE)  # type: ignore[attr-defined]


def token_trie(spellings: Mapping[int, bytes], automaton: Automaton, state: int) -> Figure:
    """Draw a small vocabulary's trie, with the branches that the automaton leaves alive in blue.

    A box is a node in which a token ends: its token is allowed if the box is blue.
    """
    nodes: list[tuple[float, float, float, bytes, bool, bool]] = []
    edges: list[tuple[float, float, float, float, str, bool]] = []
    rows = 0

    def place(node: Trie, seen: bytes, alive: int | None) -> float:
        nonlocal rows
        below = []
        for byte, child in sorted(node.children.items()):
            after = None if alive is None else automaton.moves[alive].get(byte)
            y = place(child, seen + bytes([byte]), after)
            below.append((y, _name(byte), after is not None))
        if not below:
            rows += 1
        y = sum(each for each, _, _ in below) / len(below) if below else float(-rows)
        x = float(len(seen))
        edges.extend((x, y, x + 1, each, name, live) for each, name, live in below)
        rise = max([0.0, *(each - y for each, _, _ in below)])  # of the highest edge
        nodes.append((x, y, rise, seen, alive is not None, bool(node.token_ids)))
        return y

    place(trie_of(spellings), b"", state)
    made, axes = figure(8.8, 0.7 + 0.3 * rows)
    for x0, y0, x1, y1, name, live in edges:
        colour = BLUE if live else FAINT
        axes.plot([x0, x1], [y0, y1], color=colour, linewidth=2.2 if live else 1.2, zorder=1)
        axes.text(
            (x0 + 2 * x1) / 3,
            (y0 + 2 * y1) / 3,
            printable([name])[0],
            ha="center",
            va="center",
            fontsize=9,
            color=BLUE if live else QUIET,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    for x, y, rise, seen, alive, is_token in nodes:
        colour = BLUE if alive else FAINT
        axes.plot(x, y, "s" if is_token else "o", color=colour, markersize=9 if is_token else 4)
        if is_token:
            axes.text(
                x + 0.12,
                y + 0.08 + rise * (0.12 + 0.09 * len(seen)),  # clear of the edge below its end
                printable([seen.decode(errors="replace")])[0],
                fontsize=9,
                color=INK if alive else QUIET,
                weight="bold" if alive else "normal",
                va="bottom",
            )
    deepest = max(x for x, *_ in nodes)
    axes.set(xlim=(-0.2, deepest + 1.0), ylim=(-rows - 0.7, 0))
    axes.set_xticks(range(int(deepest) + 1))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("bytes of the token so far")
    return made


def mask_strip(
    logits: Float[Tensor, " vocab"],
    mask: Bool[np.ndarray, " vocab"],
    spell: Callable[[int], str],
    written: str,
    shown: int = 10,
) -> Figure:
    """Draw the likeliest tokens before and after a mask, and below them the mask as a strip."""
    before = logits.softmax(-1)
    after = logits.masked_fill(torch.from_numpy(~mask), -torch.inf).softmax(-1)
    top = before.topk(shown).indices.tolist()
    chosen = int(after.argmax())
    ids = top if chosen in top else [*top, chosen]
    made, axes = figure(9.0, 3.4)
    places = range(len(ids))
    axes.bar(places, before[ids].tolist(), width=0.8, color=FAINT, label="the model")
    axes.bar(places, after[ids].tolist(), width=0.45, color=BLUE, label="after the mask")
    for place, token_id in enumerate(ids):
        allowed = bool(mask[token_id])
        colour = GREEN if allowed else ORANGE
        axes.add_patch(Rectangle((place - 0.4, -0.13), 0.8, 0.09, color=colour, clip_on=False))
        sign = "yes" if allowed else "no"
        axes.text(place, -0.087, sign, ha="center", va="center", fontsize=8, color="white")
    axes.set_xticks(list(places), printable(map(spell, ids)), rotation=45, ha="right")
    axes.tick_params(axis="x", pad=26, length=0)
    axes.set(ylim=(0, 1.05), ylabel="probability", xlim=(-0.6, len(ids) - 0.4))
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    count = int(mask.sum())
    allowed_text = f"{count:,} of {len(mask):,} tokens"
    seen = f"after  {printable([written[-60:]])[0]}" if written else "at the start"
    title(axes, f"{seen}: {allowed_text} allowed")
    return made


def retry_curves(found: Tries, shares: Sequence[float] = (0.9, 0.5, 0.2, 0.05)) -> Figure:
    """Draw how many answers are still missing after each try, measured and for given shares."""
    made, axes = figure(8.0, 3.2)
    rounds = range(len(found.missing))
    for share in shares:
        axes.plot(
            rounds, [100 * (1 - share) ** each for each in rounds], color=QUIET, linewidth=1.2
        )
        axes.text(
            len(found.missing) - 0.95,
            100 * (1 - share) ** (len(found.missing) - 1),
            f"{share:.0%} each",
            fontsize=8.5,
            color=QUIET,
            va="center",
        )
    missing = [100 * each / found.missing[0] for each in found.missing]
    axes.plot(rounds, missing, "o-", color=ORANGE, linewidth=2.4, label="measured")
    axes.set_xticks(list(rounds))
    axes.set(ylim=(-3, 104), xlim=(-0.1, len(found.missing) - 0.25))
    axes.set(xlabel="tries for each order", ylabel="answers still missing, %")
    axes.legend(frameon=False, labelcolor=INK, loc="lower left")
    title(axes, "Retrying halves what is missing only if every second answer is good")
    return made


def states_by_depth(states: Sequence[int]) -> Figure:
    """Draw how many states an automaton has for each depth, beside the size of a stack."""
    made, axes = figure(7.2, 3.0)
    depths = range(len(states))
    axes.plot(depths, states, "o-", color=ORANGE, linewidth=2, label="states of the automaton")
    stack = [max(1, each) for each in depths]  # at first one entry, for the value that is due
    axes.plot(depths, stack, "s-", color=BLUE, label="most entries of the stack")
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(depths))
    axes.set_yticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.set(xlabel="brackets that may be open at once", ylabel="number (log scale)")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "An automaton needs a state for every stack there can be")
    return made


def forced_strip(pieces: Sequence[Piece]) -> Figure:
    """Draw an answer as one line of text: forced pieces on amber, the model's choices on blue."""
    made, axes = figure(10.0, 1.5)
    x = 0.0
    for each in pieces:
        shown = printable([each.text.decode(errors="replace")])[0]
        width = len(shown)
        colour = AMBER if each.forced else PALE
        axes.add_patch(
            Rectangle((x, 0), width, 1, facecolor=colour, edgecolor="white", linewidth=2)
        )
        axes.text(
            x + width / 2, 0.5, shown, ha="center", va="center", family="monospace", fontsize=9
        )
        if each.forced:
            axes.text(
                x + width / 2, -0.12, f"{each.num_tokens} tokens", ha="center", va="top", fontsize=8
            )
        x += width
    saved = sum(each.num_tokens for each in pieces if each.forced)
    total = sum(each.num_tokens for each in pieces)
    axes.set(xlim=(-0.2, x + 0.2), ylim=(-0.55, 1.05))
    axes.axis("off")
    title(axes, f"{saved} of {total} tokens are forced: nothing is left to choose there")
    return made


def costs(seconds: Mapping[str, float]) -> Figure:
    """Draw times as bars over a logarithmic axis, with their values."""
    made, axes = figure(8.0, 0.7 + 0.45 * len(seconds))
    names = list(seconds)
    micros = [1e6 * each for each in seconds.values()]
    axes.barh(names, micros, color=BLUE)
    axes.set_xscale("log")
    axes.set(xlabel="microseconds per token (log scale)", xlim=(1, 10 * max(micros)))
    axes.invert_yaxis()
    for row, each in enumerate(micros):
        axes.text(each * 1.15, row, f"{each:,.0f}", va="center", fontsize=9, color=INK)
    title(axes, "What a mask costs, beside the step of the model")
    return made
