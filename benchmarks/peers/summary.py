"""From samples to figures: medians and ranges, what was set aside, and ratios."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.answers import share_agreeing
from benchmarks.peers.loads import UNITS
from benchmarks.peers.running import Turn

MOST_FOREIGN = 0.05  # the share of the machine that others may take during a sample
ENOUGH_AGREEING = 0.5  # rounding to 4 bits changes some; another model gives next to none

Values = dict[str, list[float]]  # a load's kept values


def values(turns: Sequence[Turn]) -> tuple[Values, dict[str, int]]:
    """The values of undisturbed samples, by load, and how many samples were set aside.

    A start is in seconds, memory in MB, the rest in tokens a second.
    """
    kept: Values = {load: [] for load in UNITS}
    set_aside = dict.fromkeys(UNITS, 0)
    for turn in turns:
        for sample in turn.samples:
            load = sample["sample"]
            if sample["foreign"] > MOST_FOREIGN:
                set_aside[load] += 1
            elif "tokens" in sample:
                kept[load].append(sample["tokens"] / sample["seconds"])
            else:
                kept[load].append(sample["seconds"])
        for load, num_bytes in turn.memory.items():
            kept[load].append(num_bytes / 1e6)
    return kept, set_aside


def figures(turns: Sequence[Turn], sure: list[dict[str, Any]]) -> dict[str, Any]:
    """One engine's figures over all rounds, or why there are none."""
    failure = next((turn.failure for turn in turns if turn.failure), None)
    if failure is not None:
        return {"left_out": failure}
    kept, set_aside = values(turns)
    agreeing = min(share_agreeing(turn.answers, sure) for turn in turns)
    return {
        "versions": turns[0].versions,
        "sure_answers_given": agreeing,
        "computes_the_model": agreeing >= ENOUGH_AGREEING,
        "loads": {
            load: {"unit": UNITS[load], **spread(kept[load]), "set_aside": set_aside[load]}
            for load in UNITS
        },
    }


def spread(found: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and how many; nothing but the count if there are none."""
    if not found:
        return {"samples": 0}
    median = statistics.median(found)
    numbers = {"median": median, "least": min(found), "most": max(found)}
    return {**{name: rounded(number) for name, number in numbers.items()}, "samples": len(found)}


def ratios(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """For each form of minigen, each peer and each load: minigen's value to the peer's.

    The two medians of a round are set against each other, so that slow minutes of the machine
    weigh little; given are the median round, the least, and the most.
    """
    rounds = {
        name: [values([turn])[0] for turn in taken]
        for name, taken in turns.items()
        if not any(turn.failure for turn in taken)
    }
    forms = [name for name in rounds if name.startswith("minigen")]
    peers = [name for name in rounds if not name.startswith("minigen")]
    return {
        form: {
            name: {load: found for load in UNITS if (found := ratio(rounds, form, name, load))}
            for name in peers
        }
        for form in forms
    }


def ratio(
    rounds: Mapping[str, Sequence[Values]], form: str, name: str, load: str
) -> dict[str, Any] | None:
    """The ratios of the rounds in which both have a value; None if there is no such round."""
    pairs = zip(rounds[form], rounds[name], strict=True)
    found = [
        statistics.median(own[load]) / statistics.median(theirs[load])
        for own, theirs in pairs
        if own[load] and theirs[load]
    ]
    return spread(found) if found else None


def rounded(number: float) -> float:
    """Four significant digits are more than these measurements have."""
    return float(f"{number:.4g}")
