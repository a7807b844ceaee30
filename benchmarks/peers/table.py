"""The comparison as Markdown, computed from the JSON. Standard library only."""

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


def peers_table(measured: dict[str, Any]) -> str:
    """Return a row per engine, the headline ratios, and which engines were left out and why."""
    engines = measured["summary"]["engines"]
    rows = {name: found for name, found in engines.items() if "left_out" not in found}
    best = measured["summary"]["best_peers"]
    return "\n".join(
        [
            *_heading(measured),
            "",
            f"| engine | {' | '.join(_title(load) for load in COLUMNS)} | sure answers |",
            f"|---|{'--:|' * (len(COLUMNS) + 1)}",
            *(f"| {name} | {' | '.join(_cells(name, rows[name], best))} |" for name in rows),
            "",
            *_ratios(measured["summary"]["headlines"]),
            *_notes(engines, measured["summary"]["code"]),
        ]
    )


def _heading(measured: dict[str, Any]) -> list[str]:
    summary, machine = measured["summary"], measured["environment"]
    count = f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"
    cut_off = f" ({summary['cut_off']} of them cut off)" if summary["cut_off"] else ""
    scale = measured["settings"]["scale"]
    tried = f" **All loads were shortened to {scale:g} of the sizes below.**" if scale != 1 else ""
    dates = " and ".join(sorted({summary["dates"][0], summary["dates"][-1]}))
    return [
        "minigen and other engines: the same model and the same tokens for all, "
        f"{measured['settings']['threads']} threads of {machine['cpu']}",
        f"with {machine['cores']} cores, {count}{cut_off}, {dates}. Medians, with the least "
        "and the most in brackets; the best peer is in",
        "**bold**. Decode: tokens per second of one stream after its first token. Prefill: prompt "
        "tokens per second up to the",
        "first token of the answer. 32 requests at once (64 + 64 tokens) and 128 mixed ones "
        "(16 to 512 + 16 to 128): tokens of",
        "answers per second; the 128 only for engines with continuous batching, and one form of "
        "llama.cpp. Start: from starting the process",
        "to the first token, with compiled code already cached on disk. Memory: peak with one "
        "stream; vLLM and OpenVINO reserve",
        "1 GB for many. Sure answers: of the answers that float32 is sure of, the share that the "
        "engine also gives. [peers.json](../benchmarks/results/peers.json)",
        f"has all samples, [loads.py](../benchmarks/peers/loads.py) has the loads.{tried}",
    ]


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
        "Ratios of minigen's figure to a peer's, each within one round: the median of the rounds, "
        "with the least and the most. More than 1",
        "means faster; for start and memory, less than 1 means less.",
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
    commits = f" (commit {', '.join(code)})" if code else ""
    return [
        f"{set_aside} of {of_all} figures were set aside, because other processes used more than "
        f"5% of the machine. Versions: {', '.join(packages)}{commits}.",
        *([""] if reasons or failures else []),
        *(f"- {name} is left out: {reason}" for name, reason in reasons.items()),
        *(f"- {name} failed in some rounds: {' '.join(each)}" for name, each in failures.items()),
    ]


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:,.0f}"
