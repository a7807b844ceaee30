"""The comparison as Markdown, computed from the JSON. Standard library only."""

from collections.abc import Collection, Mapping, Sequence
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

COLUMNS = {
    DECODE: "decode",
    PREFILL_512: "prefill 512",
    PREFILL_1024: "prefill 1,024",
    TOGETHER: "32 requests",
    MIXED: "128 mixed",
    START: "start",
    MEMORY_ALONE: "memory",
}

PRETENDED = (
    "An older processor is **pretended**: environment variables restrict minigen's kernels, and "
    "llama.cpp is compiled for it. Other engines cannot pretend."
)
LEVELS = {  # the end of a short name of a processor -> what it means
    "amx": "AMX",
    "avx512bf16": "AVX-512 and BF16",
    "avx512": "AVX-512",
    "sse4": "SSE4.2",
    "avx2": "AVX2",
    "avx2-vnni": "AVX2 with VNNI",
    "i8mm": "NEON with i8mm",
    "dotprod": "NEON with dotprod",
    "neon": "NEON",
}


EMULATED = ("vLLM bf16", "transformers bf16")  # where no instruction multiplies bfloat16


def peers_page(measured: Mapping[str, dict[str, Any]]) -> str:
    """Return the table of each processor, by the names of the files of results."""
    return "\n\n".join(
        f"### {title(name, each)}\n\n{peers_table(name, each)}" for name, each in measured.items()
    )


def peers_in_short(measured: Mapping[str, dict[str, Any]]) -> str:
    """Return a line per processor that was not pretended: minigen's ratios to the best peer."""
    real = {name: each for name, each in measured.items() if not each["settings"].get("pretended")}
    return "\n".join(_in_short(name, each) for name, each in real.items())


def _in_short(name: str, measured: dict[str, Any]) -> str:
    best = {
        each["load"]: f"{COLUMNS[each['load']]} {each['median']:.2f}"
        for each in measured["summary"]["headlines"]
        if each["best_of_all_peers"]
    }
    more = ", ".join(text for load, text in best.items() if load not in LESS_IS_BETTER)
    less = ", ".join(text for load, text in best.items() if load in LESS_IS_BETTER)
    return f"- {title(name, measured)}: {'; '.join(part for part in (more, less) if part)}"


def title(name: str, measured: dict[str, Any]) -> str:
    """Return the title of a file of results: the processor, its level, and whether it is pretended.

    >>> title("peers-intel-core-avx2", {"environment": {"cpu": "Intel Core"}, "settings": {}})
    'Intel Core with AVX2'
    """
    pretended = measured["settings"].get("pretended")
    cpu, level = measured["environment"]["cpu"], LEVELS.get(name.split("-")[-1])
    if pretended is not None:
        return f"{cpu}, pretended: {LEVELS[pretended]} and no more"
    return cpu if level is None else f"{cpu} with {level}"


def peers_table(name: str, measured: dict[str, Any]) -> str:
    """Return a row per engine, the headline ratios, and which engines were left out and why.

    `name` is that of the file of results, without its ending.
    """
    engines = measured["summary"]["engines"]
    rows = {engine: found for engine, found in engines.items() if "left_out" not in found}
    best = measured["summary"]["best_peers"]
    return "\n".join(
        [
            *_heading(name, measured),
            "",
            f"| engine | {' | '.join(_title(load) for load in COLUMNS)} | sure answers |",
            f"|---|{'--:|' * (len(COLUMNS) + 1)}",
            *(f"| {row} | {' | '.join(_cells(row, rows[row], best))} |" for row in rows),
            "",
            *_ratios(measured["summary"]["headlines"]),
            *_notes(engines, measured["summary"]["code"]),
            *_emulated(rows, measured["environment"].get("instructions", [])),
        ]
    )


def _heading(name: str, measured: dict[str, Any]) -> list[str]:
    summary, machine, settings = measured["summary"], measured["environment"], measured["settings"]
    count = f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}{_fewer_rounds(summary)}"
    cut_off = f" ({summary['cut_off']} of them cut off)" if summary["cut_off"] else ""
    dates = " and ".join(sorted({summary["dates"][0], summary["dates"][-1]}))
    has = (
        f" The processor has {', '.join(found)}." if (found := machine.get("instructions")) else ""
    )
    tried = f"**All loads were shortened to {settings['scale']:g} of their sizes.**"
    return [
        f"{settings['threads']} threads of {machine['cpu']} with {machine['cores']} cores, "
        f"{count}{cut_off}, {dates}",
        f"([{name}.json](../benchmarks/results/{name}.json) has all samples).{has}",
        *([PRETENDED] if settings.get("pretended") else []),
        *([tried] if settings["scale"] != 1 else []),
    ]


def _fewer_rounds(summary: dict[str, Any]) -> str:
    """Name the engines that took part in fewer rounds than the others."""
    names: dict[int, list[str]] = {}
    for name, engine in summary["engines"].items():
        if 0 < engine.get("turns", 0) < summary["rounds"]:  # 0: it failed, and is named below
            names.setdefault(engine["turns"], []).append(name)
    parts = [f"{turns} for {', '.join(names[turns])}" for turns in sorted(names)]
    return f" ({'; '.join(parts)})" if parts else ""


def _title(load: str) -> str:
    return f"{COLUMNS[load]}, {UNITS[load]}" if load in LESS_IS_BETTER else COLUMNS[load]


def _cells(name: str, found: dict[str, Any], best: dict[str, str]) -> list[str]:
    cells = [_cell(found["loads"][load], best.get(load) == name) for load in COLUMNS]
    mark = "" if found["computes_the_model"] else " (another model?)"
    return [*cells, f"{found['sure_answers_given']:.0%}{mark}"]


def _cell(load: dict[str, Any], is_best: bool) -> str:
    if "median" not in load:
        return "-"
    median, least, most = (_short(load[each]) for each in ("median", "least", "most"))
    shown = f"**{median}**" if is_best else median
    return shown if load["samples"] == 1 else f"{shown} ({least}–{most})"


def _ratios(headlines: list[dict[str, Any]]) -> list[str]:
    if not headlines:
        return []
    return [
        "Ratios of minigen to its peers:",
        "",
        *(_ratio(each) for each in headlines),
        "",
    ]


def _ratio(found: dict[str, Any]) -> str:
    peer = f"{found['peer']} (best peer)" if found["best_of_all_peers"] else found["peer"]
    median, least, most = (f"{found[each]:.2f}" for each in ("median", "least", "most"))
    count = f"{found['rounds']} round{'s' * (found['rounds'] != 1)}"
    shown = f"**{median}** ({least}–{most}, {count})"
    return f"- {COLUMNS[found['load']]}, {found['form']} / {peer}: {shown}"


def _notes(engines: dict[str, Any], code: list[str]) -> list[str]:
    sound = [each for each in engines.values() if "left_out" not in each]
    loads = [load for each in sound for load in each["loads"].values()]
    set_aside = sum(load["set_aside"] for load in loads)
    of_all = set_aside + sum(load["samples"] for load in loads)
    packages = dict.fromkeys(" ".join(next(iter(p.items()))) for e in sound if (p := e["packages"]))
    reasons = {name: each["left_out"] for name, each in engines.items() if "left_out" in each}
    failures = {name: each["failures"] for name, each in engines.items() if each.get("failures")}
    builds = {
        build: name.split()[0]
        for name, each in engines.items()
        if (build := each.get("versions", {}).get("build"))
    }
    commits = f" (commit {', '.join(code)})" if code else ""
    return [
        f"{set_aside} of {of_all} figures were set aside, because other processes used more than "
        f"5% of the machine. Versions: {', '.join(packages)}{commits}.",
        *([""] if reasons or failures or builds else []),
        *(f"- {name} is {build}." for build, name in builds.items()),
        *(f"- {name} is left out: {reason}" for name, reason in reasons.items()),
        *(f"- {name} failed in some rounds: {' '.join(each)}" for name, each in failures.items()),
    ]


def _emulated(rows: Collection[str], instructions: Sequence[str]) -> list[str]:
    """Name the engines that were measured in a type that is not their best on this processor."""
    slow = [name for name in EMULATED if name in rows]
    if not slow or not instructions or any("bf16" in each.lower() for each in instructions):
        return []
    return [
        f"- {' and '.join(slow)}: no instruction of this processor multiplies bfloat16, so torch "
        "emulates it. In float32, in which a new run measures them here, they are faster."
    ]


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:,.0f}"
