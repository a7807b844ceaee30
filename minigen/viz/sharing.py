"""What shared beginnings save: found and computed tokens of visits, and times to first tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from minigen.teach.sharing import Visits
from minigen.viz.style import AMBER, BLUE, GREEN, INK, ORANGE, QUIET, figure, title


def visits_figure(visits: Visits) -> Figure:
    """A column for each request: tokens found and tokens computed; below, blocks evicted for it."""
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


def by_share(ratios: Mapping[float, float]) -> Figure:
    """Time to first token by the share that was found, as a part of the time with nothing found."""
    made, axes = figure(7, 3.6)
    shares = sorted(ratios)
    axes.plot([0, 1], [1, 0], "--", color=QUIET, linewidth=1, label="in proportion to what is left")
    axes.plot(shares, [ratios[each] for each in shares], "o-", color=BLUE, label="measured here")
    axes.set(xlabel="share of the prompt that was found", ylabel="time to first token", xlim=(0, 1))
    axes.set_ylim(0, max(1.1, 1.05 * max(ratios.values())))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, labelcolor=INK)
    title(axes, "What is found is not waited for")
    return made


def by_turn(lines: Mapping[str, Sequence[int]]) -> Figure:
    """Tokens that each turn of a chat computed before its first token, a group of bars a turn."""
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
