"""Figures of the prefix cache as a tree, step by step, and of what shared prefixes save.

The tree is rebuilt from the engine's events. An event names a block and a request, but no tokens
and no tree. So the block table of every request is tracked, and a cached block is a child of the
block before it in the table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minigen.trace import timeline
from minigen.trace.events import Event
from minigen_course.ch23_prefix.lesson import Visits
from minigen_course.figures.style import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    SKY,
    figure,
    printable,
    title,
)


@dataclass(frozen=True)
class CachedBlock:
    """A node of the tree: its block, its tokens, its parent (None below the root), its users."""

    block: int
    tokens: tuple[int, ...]
    above: int | None
    users: frozenset[int]


@dataclass(frozen=True)
class Request:
    """A prompt, and how many of its tokens were found when it started (None while it waits)."""

    prompt: tuple[int, ...]
    num_found: int | None = None


@dataclass(frozen=True)
class TreeState:
    """The tree after a step; `grown` and `evicted` are the nodes added and removed in that step.

    Nodes are numbered in the order in which they were added, because the block of an evicted node
    is soon used for another node.
    """

    cached: dict[int, CachedBlock]
    grown: frozenset[int]
    evicted: dict[int, CachedBlock]
    requests: dict[int, Request]


class _Tree:
    """Follows a timeline, and keeps the current tree, the requests and their tokens."""

    def __init__(self, prompts: Iterable[Sequence[int]], block_size: int):
        self.prompts, self.block_size, self.states = iter(prompts), block_size, list[TreeState]()
        self.cached: dict[int, CachedBlock] = {}
        self.requests: dict[int, Request] = {}
        self.timeline = timeline.Timeline(
            on_request=self._arrive,
            on_chunk=self._start,
            on_token=self._write,
            on_cached=self._cache,
            on_evicted=self._evict,
            on_step=self._end_step,
        )
        self._texts: dict[int, list[int]] = {}
        self._node_of: dict[int, int] = {}  # by block
        self._numbers = count()
        self._grown, self._evicted = set[int](), dict[int, CachedBlock]()

    def _arrive(self, request: timeline.Request) -> None:
        if request.queued_ns is not None:
            self._texts[request.sequence_id] = list(next(self.prompts))
            self.requests[request.sequence_id] = Request(tuple(self._texts[request.sequence_id]))

    def _start(self, request: timeline.Request, event: Event) -> None:
        known = self.requests.get(request.sequence_id)
        if known is not None and known.num_found is None:
            found = request.prefix_hit_tokens
            self.requests[request.sequence_id] = replace(known, num_found=found)

    def _write(self, request: timeline.Request, event: Event) -> None:
        if request.sequence_id in self._texts:
            self._texts[request.sequence_id].append(event.counts["token"])

    def _cache(self, request: timeline.Request, event: Event) -> None:
        if request.sequence_id not in self._texts:
            return
        block, size = event.counts["block"], self.block_size
        index = request.table.index(block)
        tokens = tuple(self._texts[request.sequence_id][index * size : (index + 1) * size])
        above = self._node_of.get(request.table[index - 1]) if index else None
        node = self._node_of[block] = next(self._numbers)
        self.cached[node] = CachedBlock(block, tokens, above, frozenset())
        self._grown.add(node)

    def _evict(self, event: Event) -> None:
        node = self._node_of.pop(event.counts["block"], None)
        if node is not None:
            self._evicted[node] = self.cached.pop(node)

    def _end_step(self, _: Event) -> None:
        users: dict[int, set[int]] = {block: set() for block in self._node_of}
        for request in self.timeline.rows:
            for block in users.keys() & request.table:
                users[block].add(request.sequence_id)
        cached = {
            node: replace(each, users=frozenset(users[each.block]))
            for node, each in self.cached.items()
        }
        grown, evicted = frozenset(self._grown), self._evicted
        self.states.append(TreeState(cached, grown, evicted, dict(self.requests)))
        self._grown, self._evicted = set(), {}


def tree_states(
    events: Iterable[Event], prompts: Sequence[Sequence[int]], block_size: int
) -> list[TreeState]:
    """Return the tree after each step in the events.

    `events` must start when the cache is empty; `prompts` are token ids in the order in which the
    requests were queued. Raises `ValueError` if the events have more requests than there are
    prompts, or no step.
    """
    tree = _Tree(prompts, block_size)
    try:
        tree.timeline.replay(events)
    except StopIteration:
        raise ValueError(
            f"The events have more requests than the {len(prompts)} prompts; pass all prompts."
        ) from None
    if not tree.states:
        raise ValueError(
            "There is no step in these events; record at least one step of the engine."
        )
    return tree.states


COLUMN, ROW, LETTER = 1.75, 0.3, 0.083  # inches
MOST, MOST_COLUMNS = 24, 7  # upper limits of the rows and columns of blocks that are drawn
Spell = Callable[[Sequence[int]], str]


def radix_tree(states: Sequence[TreeState], step: int, block_size: int, spell: Spell) -> Figure:
    """Draw the tree after a step, above the prompts so far, with one column per block of tokens.

    Blue blocks are used by a request, grey blocks are cached but unused. A new block has a thick
    edge, an evicted block a dashed edge. In a prompt, green tokens were found in the tree and amber
    tokens were computed. `spell` turns token ids into text. Rows after `MOST` and columns after
    `MOST_COLUMNS` are cut off. Raises `ValueError` for a step that does not exist.
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
    for axes, num in ((tree, num_rows), (prompts, num_prompts)):
        axes.set(xlim=(-0.02, num_columns), ylim=(num, 0), xticks=[], yticks=[])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    _draw_tree(tree, state, spell)
    _draw_prompts(prompts, state, block_size, spell)
    unused = sum(not each.users for each in state.cached.values())
    title(
        tree, f"After step {step} the tree has {len(state.cached)} blocks, {unused} of them unused"
    )
    found, asked = _found_and_asked(state)
    title(prompts, f"Prompts so far: {found} of {asked} tokens were found in the tree")
    _add_legend(made)
    return made


def _found_and_asked(state: TreeState) -> tuple[int, int]:
    started = [each for each in state.requests.values() if each.num_found is not None]
    return sum(each.num_found or 0 for each in started), sum(len(each.prompt) for each in started)


def _shown(state: TreeState) -> dict[int, CachedBlock]:
    """Return the nodes to draw: all cached ones and those evicted in this step, oldest first."""
    return dict(sorted({**state.cached, **state.evicted}.items()))


def _rows(nodes: dict[int, CachedBlock]) -> dict[int, int]:
    """Return a row per node: its parent's row for a first child, a new row for other children."""
    below: dict[int | None, list[int]] = {}
    for node, each in nodes.items():
        below.setdefault(each.above if each.above in nodes else None, []).append(node)
    rows: dict[int, int] = {}
    waiting = list(reversed(below.get(None, [])))
    while waiting:
        node = waiting.pop()
        above = nodes[node].above
        first = above in nodes and below[above][0] == node
        rows[node] = rows[above] if first and above is not None else len(set(rows.values()))
        waiting += reversed(below.get(node, []))
    return rows


def _depth(nodes: dict[int, CachedBlock], node: int) -> int:
    above, depth = nodes[node].above, 0
    while above is not None and above in nodes:
        above, depth = nodes[above].above, depth + 1
    return depth


def _num_columns(states: Sequence[TreeState], block_size: int) -> int:
    widest = max(-(-len(each.prompt) // block_size) for each in states[-1].requests.values())
    trees = [_shown(state) for state in states]
    return max(widest, *(1 + _depth(nodes, node) for nodes in trees for node in nodes), 1)


def _draw_tree(axes: Axes, state: TreeState, spell: Spell) -> None:
    nodes = _shown(state)
    rows = _rows(nodes)
    for node, row in rows.items():
        each, column = nodes[node], _depth(nodes, node)
        gone, new = node not in state.cached, node in state.grown
        fill = "white" if gone else SKY if each.users else FAINT
        patch = _box(axes, column, row, 1, fill, spell(each.tokens))
        patch.set(
            edgecolor=ORANGE if new else QUIET,
            linewidth=2.4 if new else 1,
            linestyle="--" if gone else "-",
        )
        if each.above is not None and each.above in nodes:
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
    most = max(int(COLUMN * width / LETTER), 1)
    (seen,) = printable([text])
    axes.text(
        column + 0.03,
        row + 0.5,
        seen if len(seen) <= most else seen[: most - 1] + "…",
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
        "cached, unused": {"facecolor": FAINT, "edgecolor": QUIET},
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


def visits_figure(visits: Visits) -> Figure:
    """Draw a column per request: tokens found and tokens computed; below, blocks evicted for it."""
    made, (above, below) = figure(10, 4.4, nrows=2, height_ratios=(2.2, 1), sharex=True)
    places = np.arange(len(visits.asked))
    found, asked = np.array(visits.found), np.array(visits.asked)
    above.bar(places, found, width=1, color=GREEN, label="found")
    above.bar(places, asked - found, bottom=found, width=1, color=AMBER, label="computed")
    above.set_ylabel("tokens of the prompt")
    above.set_ylim(0, 1.25 * asked.max())
    above.legend(frameon=False, ncols=2, loc="upper right", labelcolor=INK, fontsize=9)
    below.bar(places, visits.evicted, width=1, color=ORANGE)
    below.set(xlabel="request", ylabel="blocks evicted", xlim=(-0.5, len(places) - 0.5))
    below.set_ylim(0, max(1, 1.1 * max(visits.evicted)))
    title(
        above,
        f"{visits.hit_rate:.0%} of the prompts' tokens were found, "
        f"{sum(visits.evicted)} blocks evicted",
    )
    return made


def by_share(lines: Mapping[str, Mapping[float, float]]) -> Figure:
    """Draw TTFT against the share of the prompt found, a line for each kind of prompt.

    TTFT is relative to that of the same prompt with nothing found.
    """
    made, axes = figure(7, 3.6)
    axes.plot([0, 1], [1, 0], "--", color=QUIET, linewidth=1, label="the share that is left")
    for (name, ratios), colour in zip(lines.items(), (BLUE, ORANGE, GREEN), strict=False):
        shares = sorted(ratios)
        axes.plot(shares, [ratios[each] for each in shares], "o-", color=colour, label=name)
    most = max(max(ratios.values()) for ratios in lines.values())
    axes.set(
        xlabel="share of the prompt that was found", xlim=(0, 1), ylim=(0, max(1.1, 1.05 * most))
    )
    axes.set_ylabel("time to first token, nothing found = 1")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "Time to first token, by the share that was found")
    return made


def by_turn(lines: Mapping[str, Sequence[int]]) -> Figure:
    """Draw the tokens that each turn of a chat computes before its first token, as grouped bars."""
    made, axes = figure(8, 3.2)
    width = 0.8 / len(lines)
    for number, ((name, values), colour) in enumerate(
        zip(lines.items(), (AMBER, GREEN, BLUE), strict=False)
    ):
        places = np.arange(len(values)) + 1 + (number - (len(lines) - 1) / 2) * width
        bars = axes.bar(places, values, width=0.95 * width, color=colour, label=name)
        axes.bar_label(bars, fontsize=8, color=INK, padding=2)
    axes.set(xlabel="turn of the chat", ylabel="tokens computed", xticks=range(1, len(values) + 1))
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    title(axes, "What each turn computes before its first token")
    return made
