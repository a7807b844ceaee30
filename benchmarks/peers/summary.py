"""From rounds to figures: medians and ranges, samples set aside, and ratios within rounds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.loads import (
    DECODE,
    LESS_IS_BETTER,
    MEMORY_ALONE,
    MIXED,
    PREFILL_512,
    PREFILL_1024,
    START,
    TOGETHER,
    UNITS,
)
from benchmarks.peers.running import Turn

MOST_FOREIGN = 0.05  # the share of the machine that others may use during a sample
ENOUGH_AGREEING = 0.5  # rounding to 4 bits changes some answers; another model gives almost none
OWN = "minigen"  # the prefix of the names of minigen's formats
BEST = "best peer"
HEADLINES = (
    (DECODE, "minigen bfloat16", "llama.cpp bf16"),
    (DECODE, "minigen int8", "llama.cpp Q8_0"),
    (DECODE, "minigen auto", BEST),
    (PREFILL_512, "minigen bfloat16", "vLLM bf16"),
    (PREFILL_512, "minigen bfloat16", "vLLM float32"),
    (PREFILL_512, "minigen auto", BEST),
    (PREFILL_1024, "minigen bfloat16", "vLLM bf16"),
    (PREFILL_1024, "minigen bfloat16", "vLLM float32"),
    (PREFILL_1024, "minigen auto", BEST),
    (TOGETHER, "minigen auto", BEST),
    (MIXED, "minigen auto", "vLLM bf16"),
    (MIXED, "minigen auto", "vLLM float32"),
    (MIXED, "minigen auto", "vLLM W8A8"),
    (MIXED, "minigen auto", BEST),
    (START, "minigen auto", BEST),
    (MEMORY_ALONE, "minigen auto", BEST),
)

Turns = Mapping[str, Turn]  # turns of one round, by engine
Values = dict[str, list[float]]  # values of undisturbed samples, by load


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all figures of rounds with "started", "engines", "code", "speed" and "turns"."""
    turns = [each["turns"] for each in rounds]
    names = list(dict.fromkeys(name for each in rounds for name in each["engines"]))
    engines = {
        name: figures([taken[name] for taken in turns if name in taken])
        for name in names
        if any(name in taken for taken in turns)
    }
    speed = [each for one in rounds for each in one["speed"]]
    kinds = speed[0] if speed else {}
    return {
        "rounds": len(rounds),
        "cut_off": sum(set(each["engines"]) != set(each["turns"]) for each in rounds),
        "dates": _distinct(each["started"].split()[0] for each in rounds),
        "code": _distinct(each["code"] for each in rounds if each["code"]),
        "speed": {kind: spread([each[kind] for each in speed]) for kind in kinds},
        "engines": engines,
        "best_peers": {load: best for load in UNITS if (best := best_peer(engines, load))},
        "headlines": headlines(turns, engines),
        "ratios_of_minigen_to": ratios(turns),
    }


def values(turns: Iterable[Turn]) -> tuple[Values, dict[str, int]]:
    """Return the values of undisturbed samples, by load, and how many samples were set aside.

    A start is in seconds, memory in MB, the rest in tokens per second.
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


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return an engine's figures over its successful turns, or why it has none."""
    failures = _distinct(turn.failure for turn in turns if turn.failure)
    sound = [turn for turn in turns if not turn.failure]
    if not sound:
        return {"left_out": failures[0]}
    kept, set_aside = values(sound)
    agreeing = min(turn.agreeing or 0.0 for turn in sound)
    return {
        "packages": _gathered(turn.packages for turn in sound),
        "versions": _gathered(turn.versions for turn in sound),
        "turns": len(sound),
        "failures": failures,
        "sure_answers_given": agreeing,
        "computes_the_model": agreeing >= ENOUGH_AGREEING,
        "loads": {
            load: {"unit": UNITS[load], **spread(kept[load]), "set_aside": set_aside[load]}
            for load in UNITS
        },
    }


def best_peer(engines: Mapping[str, Mapping[str, Any]], load: str) -> str | None:
    """Return the peer with the best median at a load that computes the model, or None."""
    medians = {
        name: found["loads"][load]["median"]
        for name, found in engines.items()
        if not name.startswith(OWN)
        and found.get("computes_the_model")
        and found["loads"][load]["samples"]
    }
    if not medians:
        return None
    return (min if load in LESS_IS_BETTER else max)(medians, key=lambda name: medians[name])


def headlines(
    turns: Sequence[Turns], engines: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the ratios of `HEADLINES` for which both sides were measured."""
    found = []
    for load, form, asked in HEADLINES:
        peer = best_peer(engines, load) if asked == BEST else asked
        measured = None if peer is None else ratio(turns, form, peer, load)
        if measured is not None:
            best = {"best_of_all_peers": asked == BEST}
            found.append({"load": load, "form": form, "peer": peer, **best, **measured})
    return found


def ratios(turns: Sequence[Turns]) -> dict[str, Any]:
    """Return the ratio of minigen's value to the peer's, for each format, peer and load."""
    names = list(dict.fromkeys(name for taken in turns for name in taken))
    forms = [name for name in names if name.startswith(OWN)]
    found = {
        form: {
            name: {load: each for load in UNITS if (each := ratio(turns, form, name, load))}
            for name in names
            if name not in forms
        }
        for form in forms
    }
    measured = {
        form: {name: loads for name, loads in peers.items() if loads}
        for form, peers in found.items()
    }
    return {form: peers for form, peers in measured.items() if peers}


def ratio(turns: Sequence[Turns], form: str, name: str, load: str) -> dict[str, Any] | None:
    """Return the ratios of the rounds in which both have a value; None if there is no such round.

    The ratio is taken between the two medians of each round, so that slow minutes of the machine
    have little weight. The result is the median, the least and the greatest ratio.
    """
    found = []
    for taken in turns:
        own, theirs = (_value(taken.get(each), load) for each in (form, name))
        if own is not None and theirs is not None:
            found.append(own / theirs)
    return spread(found, "rounds") if found else None


def _value(turn: Turn | None, load: str) -> float | None:
    """Return the median of a turn's undisturbed samples."""
    if turn is None or turn.failure:
        return None
    kept = values([turn])[0][load]
    return statistics.median(kept) if kept else None


def spread(found: Sequence[float], counted: str = "samples") -> dict[str, Any]:
    """Return median, least, most and the count; only the count if there are no values."""
    if not found:
        return {counted: 0}
    median = statistics.median(found)
    numbers = {"median": median, "least": min(found), "most": max(found)}
    return {**{name: rounded(number) for name, number in numbers.items()}, counted: len(found)}


def rounded(number: float) -> float:
    """Round to four significant digits, more than the precision of these measurements."""
    return float(f"{number:.4g}")


def _distinct(texts: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(texts))


def _gathered(facts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge facts of several turns; a fact that changed is listed with all its values."""
    found: dict[str, list[str]] = {}
    for each in facts:
        for name, text in each.items():
            found[name] = _distinct([*found.get(name, []), text])
    return {name: ", ".join(texts) for name, texts in found.items()}
