"""Figures of speculation: steps by rows, drafted runs, drift, gain, rollback, trees."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float64
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen_course.ch36_speculative.lesson import (
    Round,
    Stored,
    best_drafts,
    cost_of,
    gain,
)
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PINK,
    QUIET,
    draw_labels,
    figure,
    printable,
    title,
)

RIGHT, WRONG, OWN = "#a6dcc8", "#f5c6a5", PALE  # grounds of text: accepted, rejected, the model's
GAP = 0.25  # between two boxes, in characters


def step_costs(by_name: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw the relative time of a step by its rows, and the line on which rows gain nothing."""
    made, axes = figure(7.6, 3.2)
    longest = max(max(costs) for costs in by_name.values())
    rows = np.array([1, longest])
    axes.plot(rows, rows, color=QUIET, linewidth=1, linestyle="--", label="a step for each row")
    for (name, costs), colour, marker in zip(by_name.items(), CYCLE, "osD^v", strict=False):
        known = sorted(costs)
        axes.plot(known, [costs[each] for each in known], marker=marker, color=colour, label=name)
    axes.set(xlabel="rows of the step", ylabel="time, of a step with one row")
    axes.set(xlim=(0.8, longest + 0.2), ylim=(0, longest))
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "Further rows of a step cost less than further steps")
    return made


def rounds(found: Sequence[Round], spell: Callable[[int], str], upto: int | None = None) -> Figure:
    """Draw an answer step by step: drafts that were right, those that were not, the model's own.

    Below, the tokens of the answer after each step. Only the first `upto` steps are drawn.
    """
    num_shown = len(found) if upto is None else upto
    made, (axes, below) = figure(
        11, 1.9 + 0.24 * len(found), nrows=2, height_ratios=(0.24 * len(found), 1.3)
    )
    made.set_layout_engine("none")  # a layout engine takes half of the time
    high = 1.9 + 0.24 * len(found)
    axes.set_position((0.05, 1.55 / high, 0.94, 1 - 1.9 / high))
    below.set_position((0.07, 0.45 / high, 0.9, 0.85 / high))
    boxes, faces, labels = [], [], []
    for step, each in enumerate(found[:num_shown]):
        x = 0.0
        for text, face in _boxes(each, spell):
            width = len(text) + 1.0
            boxes.append([(x, step), (x + width, step), (x + width, step + 0.86), (x, step + 0.86)])
            faces.append(face)
            labels.append((x + width / 2, step + 0.45, text, INK))
            x += width + GAP
    axes.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="white"), autolim=False)
    draw_labels(axes, labels)
    axes.set(xlim=(0, _span(found, spell)), ylim=(len(found), 0), xticks=[])
    marks = range(0, len(found), 5)
    axes.set_yticks([each + 0.45 for each in marks], [str(each + 1) for each in marks])
    axes.tick_params(length=0)
    axes.set_ylabel("step")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    names = {RIGHT: "draft, accepted", OWN: "the model's own token", WRONG: "draft, rejected"}
    handles = [Patch(facecolor=colour, label=name) for colour, name in names.items()]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    given = [len(each.tokens) for each in found[:num_shown]]
    num_tokens = sum(given)
    title(axes, f"{num_tokens} tokens in {len(given)} steps", y=1.0)
    total = sum(len(each.tokens) for each in found)
    below.plot([0, total], [0, total], color=QUIET, linestyle="--", linewidth=1)
    reached = np.cumsum([0, *given])
    below.step(range(len(reached)), reached, where="post", color=BLUE)
    below.text(total * 0.62, total * 0.45, "one token per step", color=QUIET, fontsize=9)
    below.set(xlim=(0, total), ylim=(0, total * 1.05), xlabel="steps", ylabel="tokens")
    return made


def _span(found: Sequence[Round], spell: Callable[[int], str]) -> float:
    """Return the width of the longest row, in characters, and some room for the legend."""
    rows = (_boxes(each, spell) for each in found)
    return 1.3 * max(sum(len(text) + 1 + GAP for text, _ in row) for row in rows)


def _boxes(found: Round, spell: Callable[[int], str]) -> list[tuple[str, str]]:
    """Return the boxes of one step: each text with its ground."""
    right = found.drafts[: found.right]
    shown = [(token_id, RIGHT) for token_id in right]
    shown += [(token_id, OWN) for token_id in found.tokens[found.right :]]
    shown += [(token_id, WRONG) for token_id in found.drafts[found.right :]]
    return [(printable([spell(token_id)])[0], face) for token_id, face in shown]


def by_hand(text: Sequence[str], drafts: Sequence[str], sampled: Sequence[str]) -> Figure:
    """Draw one step: the text, its drafts below, and the model's own token at each place.

    A draft is green while it equals the model's own; then comes the model's own token.
    """
    made, axes = figure(9.4, 2.2)
    start = len(text)
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    for place, each in enumerate(text):
        _cell(axes, place, 2, each, FAINT)
    for place, each in enumerate(drafts):
        _cell(axes, start + place, 2, each, RIGHT if place < right else WRONG)
    for place, each in enumerate(sampled):
        face = RIGHT if place < right else OWN if place == right else "white"
        ink = INK if place <= right else QUIET
        _cell(axes, start + place, 0.6, each, face, ink)
        axes.annotate(
            "",
            (start + place + 0.5, 1.42),
            (start + place - 0.5, 1.98),
            arrowprops={"arrowstyle": "-|>", "color": QUIET, "linewidth": 0.9},
        )
    axes.text(-0.15, 2.4, "text and drafts", ha="right", va="center", color=QUIET, fontsize=9)
    axes.text(-0.15, 1.0, "the model's tokens", ha="right", va="center", color=QUIET, fontsize=9)
    axes.text(
        start + right + 1.15,
        0.3,
        "after a wrong draft: no use",
        va="center",
        color=QUIET,
        fontsize=9,
    )
    axes.set(xlim=(-2.6, start + len(sampled) + 0.1), ylim=(0.05, 3.1))
    axes.axis("off")
    title(axes, f"{len(drafts) + 1} rows, {right} drafts right: {right + 1} tokens from one step")
    return made


def _cell(axes: Axes, x: float, y: float, text: str, face: str, ink: str = INK) -> None:
    axes.add_patch(Rectangle((x + 0.04, y), 0.92, 0.8, facecolor=face, edgecolor=FAINT))
    axes.text(
        x + 0.5, y + 0.4, printable([text])[0], ha="center", va="center", color=ink, fontsize=9
    )


def drift(shares: Mapping[str, Float64[np.ndarray, " vocab"]], labels: Sequence[str]) -> Figure:
    """Draw several distributions of the next token side by side, token by token."""
    made, axes = figure(9.0, 3.2)
    places, width = np.arange(len(labels)), 0.8 / len(shares)
    for index, (name, each) in enumerate(shares.items()):
        colour = (FAINT, BLUE, GREEN, ORANGE, PINK)[index]
        edge = QUIET if index == 0 else "white"
        axes.bar(places + index * width, each, width, label=name, color=colour, edgecolor=edge)
    axes.set_xticks(places + 0.4 - width / 2, printable(labels))
    axes.set(ylabel="probability")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "Which token comes out, by the rule that accepts")
    return made


def gain_curves(
    costs: Mapping[str, Mapping[int, float]], acceptances: Sequence[float], most: int
) -> Figure:
    """Draw the predicted gain over the number of drafts for some acceptances; a dot is the best."""
    made, panels = figure(10.0, 3.3, ncols=len(costs), sharey=True, squeeze=False)
    for axes, (name, known) in zip(panels[0], costs.items(), strict=True):
        for acceptance, colour in zip(acceptances, CYCLE, strict=False):
            gains = [gain(acceptance, count, known) for count in range(most + 1)]
            best = best_drafts(acceptance, known, most)
            axes.plot(range(most + 1), gains, color=colour, label=f"a = {acceptance:g}")
            axes.plot(best, gains[best], "o", color=colour, markersize=7)
        axes.axhline(1, color=QUIET, linewidth=1, linestyle="--")
        axes.set(xlabel="drafts per step, k")
        title(axes, name)
    panels[0][0].set_ylabel("tokens per second,\nof those without drafts")
    panels[0][-1].legend(frameon=False, labelcolor=INK, fontsize=9)
    return made


def explored_gain(
    costs: Mapping[int, float], acceptance: float, count: int, batch: int, most: int = 15
) -> Figure:
    """Draw the predicted gain by the number of drafts, and by the batch; the choice is marked."""
    made, (left, right) = figure(10.0, 3.2, ncols=2, sharey=True)
    gains = [gain(acceptance, each, costs, batch) for each in range(most + 1)]
    best = best_drafts(acceptance, costs, most, batch)
    left.plot(range(most + 1), gains, "-", color=BLUE)
    left.plot(best, gains[best], "o", color=GREEN, label=f"best: {best} drafts")
    chosen = gain(acceptance, count, costs, batch)
    left.plot(count, chosen, "D", color=ORANGE, label=f"chosen: {count} drafts")
    left.set(xlabel=f"drafts per step, in a batch of {batch}", ylabel="predicted gain")
    batches = np.arange(1, 33)
    by_batch = [gain(acceptance, count, costs, int(each)) for each in batches]
    right.plot(batches, by_batch, color=BLUE)
    right.plot(batch, chosen, "D", color=ORANGE)
    right.set(xlabel=f"batch, with {count} drafts each")
    for axes in (left, right):
        axes.axhline(1, color=QUIET, linewidth=1, linestyle="--")
    left.set_ylim(0, max(3.0, 1.1 * max(*gains, *by_batch)))
    left.legend(frameon=False, labelcolor=INK)
    rows = batch * (count + 1)
    relative = cost_of(costs, rows) / cost_of(costs, batch)
    title(left, f"{chosen:.2f} times the speed: {rows} rows, {relative:.2f} times the step")
    return made


def shallow(agreement: Mapping[int, float], count: int) -> Figure:
    """Draw how often the first layers agree with all layers, and how often they would have to.

    The second line is the acceptance at which `count` drafts pay for themselves, if a draft costs
    its share of the layers and further rows cost nothing.
    """
    made, axes = figure(7.6, 3.0)
    depths, shares = np.array(list(agreement)), list(agreement.values())
    axes.plot(depths, shares, "o-", color=BLUE, markersize=4, label="likeliest token agrees")
    needed = [_break_even(count, 1 + count * each) for each in depths / depths[-1]]
    axes.plot(depths, needed, "--", color=ORANGE, label=f"needed, for {count} drafts per step")
    axes.set(xlabel="layers that draft", ylabel="share", ylim=(-0.02, 1.04))
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(axes, "The first layers of a model seldom know its token")
    return made


def _break_even(count: int, cost: float) -> float:
    """Return the acceptance at which a step with `count` drafts gives as many tokens as it costs.

    1 if even right drafts cost too much.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        given = sum(middle**place for place in range(count + 1))
        low, high = (middle, high) if given < cost else (low, middle)
    return high


def rollback(
    block_size: int, num_known: int, num_drafts: int, num_right: int, num_published: int
) -> Figure:
    """Draw a sequence's slots before, during and after a step that verifies drafts.

    `num_published` blocks may be stored in the prefix cache after it.
    """
    made, axes = figure(10.0, 2.9)
    num_slots = -(-(num_known + num_drafts) // block_size) * block_size
    before, after = num_known - 1, num_known + num_right
    rows = {
        "before": [PALE] * before,
        "the step writes": [PALE] * before
        + [OWN_NEW]
        + [RIGHT] * num_right
        + [WRONG] * (num_drafts - num_right),
        "after": [PALE] * after + ["white"] * (num_known + num_drafts - after),
    }
    for line, (name, faces) in enumerate(rows.items()):
        y = 2 - line
        for slot in range(num_slots):
            face = faces[slot] if slot < len(faces) else "white"
            stale = line == 2 and after <= slot < num_known + num_drafts
            axes.add_patch(
                Rectangle(
                    (slot + 0.05, y),
                    0.9,
                    0.7,
                    facecolor=face,
                    edgecolor=FAINT,
                    hatch="////" if stale else None,
                )
            )
        axes.text(-0.3, y + 0.35, name, ha="right", va="center", color=INK, fontsize=9)
        for block in range(num_slots // block_size):
            published = line == 2 and block < num_published
            axes.add_patch(
                Rectangle(
                    (block * block_size, y - 0.06),
                    block_size,
                    0.82,
                    fill=False,
                    edgecolor=GREEN if published else QUIET,
                    linewidth=2.4 if published else 1.2,
                )
            )
    handles = [
        Patch(facecolor=PALE, label="computed"),
        Patch(facecolor=OWN_NEW, label="last token"),
        Patch(facecolor=RIGHT, label="draft, right"),
        Patch(facecolor=WRONG, label="draft, wrong"),
        Patch(facecolor="white", edgecolor=FAINT, hatch="////", label="no longer valid"),
        Patch(fill=False, edgecolor=GREEN, linewidth=2, label="may be shared"),
    ]
    axes.legend(
        handles=handles,
        ncols=6,
        loc="upper center",
        bbox_to_anchor=(0.45, -0.02),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    axes.set(xlim=(-3.4, num_slots + 0.2), ylim=(-0.15, 3.0))
    axes.axis("off")
    title(axes, f"{num_drafts} drafts, {num_right} right: only what is right counts as computed")
    return made


OWN_NEW = AMBER


def token_tree(
    parents: Sequence[int], labels: Sequence[str], mask: Bool[np.ndarray, "nodes nodes"]
) -> Figure:
    """Draw a tree of drafts, and beside it which of its tokens each token attends to."""
    made, (tree, square) = figure(9.6, 3.6, ncols=2, width_ratios=(1.25, 1))
    places = _places(parents)
    root = (0.0, float(np.mean([places[node][1] for node in range(len(parents))])))
    tree.plot(*root, "s", color=QUIET, markersize=9)
    tree.text(root[0], root[1] + 0.42, "text", ha="center", color=QUIET, fontsize=9)
    for node, parent in enumerate(parents):
        start = root if parent < 0 else places[parent]
        tree.plot(*zip(start, places[node], strict=True), color=FAINT, zorder=1)
    for node, (x, y) in enumerate(places):
        tree.text(
            x,
            y,
            f"{node} {printable([labels[node]])[0]}",
            ha="center",
            va="center",
            fontsize=9,
            bbox={"facecolor": PALE, "edgecolor": BLUE, "boxstyle": "round,pad=0.35"},
        )
    depth = max(x for x, _ in places)
    tree.set(xlim=(-0.4, depth + 0.5), ylim=(-0.6, max(y for _, y in places) + 0.8))
    tree.invert_yaxis()
    tree.axis("off")
    title(tree, "one step verifies several continuations")
    square.imshow(np.where(mask, 0.75, 0.0), cmap="Blues", vmin=0, vmax=1)
    square.set_xticks(range(len(parents)), printable(labels), rotation=60, fontsize=8)
    names = [f"{node} {each}" for node, each in enumerate(printable(labels))]
    square.set_yticks(range(len(parents)), names, fontsize=8)
    square.set(xlabel="sees")
    title(square, "each token sees its ancestors")
    return made


def _places(parents: Sequence[int]) -> list[tuple[float, float]]:
    """Return x (depth) and y of each node: leaves one below the other, parents between them."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    found: dict[int, tuple[float, float]] = {}
    leaves = 0

    def place(node: int, depth: float) -> float:
        nonlocal leaves
        below = [place(child, depth + 1) for child in children.get(node, ())]
        if not below:
            below = [float(leaves)]
            leaves += 1
        if node >= 0:
            found[node] = (depth, float(np.mean(below)))
        return float(np.mean(below))

    place(-1, 0.0)
    return [found[node] for node in range(len(parents))]


FORMS = {"auto": "4 bits"}  # what `weights="auto"` is for this model


def stored_gains(stored: Stored) -> Figure:
    """Draw the stored ratios over the batch: a panel per form and load, a line per way.

    A band reaches from the lowest to the highest turn.
    """
    forms = sorted({form for form, _ in stored.ratios})
    loads = list(dict.fromkeys(load for _, load in stored.ratios))
    made, panels = figure(
        3.4 * len(loads),
        2.5 * len(forms),
        nrows=len(forms),
        ncols=len(loads),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for row, form in zip(panels, forms, strict=True):
        for axes, load in zip(row, loads, strict=True):
            for (way, ratios), colour in zip(
                stored.ratios.get((form, load), {}).items(), CYCLE, strict=False
            ):
                batches = sorted(ratios)
                axes.plot(batches, [ratios[b] for b in batches], "o-", color=colour, label=way)
                lows, highs = zip(*(stored.spans[form, load][way][b] for b in batches), strict=True)
                axes.fill_between(batches, lows, highs, color=colour, alpha=0.15, linewidth=0)
            axes.axhline(1, color=QUIET, linewidth=1, linestyle="--")
            axes.set_xscale("log", base=2)
            batches = sorted(
                {b for each in stored.ratios.values() for w in each.values() for b in w}
            )
            axes.set_xticks(batches, [str(each) for each in batches])
            title(axes, f"{load}, {FORMS.get(form, form)}")
        row[0].set_ylabel("speed, of that without")
    for axes in panels[-1]:
        axes.set_xlabel("batch")
    lines = {line.get_label(): line for each in panels.flat for line in each.lines}
    named = {str(name): line for name, line in lines.items() if not str(name).startswith("_")}
    panels[0][0].legend(named.values(), named.keys(), frameon=False, labelcolor=INK, fontsize=8)
    return made
