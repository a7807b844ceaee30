"""Write docs/results.md and a part of README.md from benchmarks/results/.

`python -m tools.results` does so.
"""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.peers.table import peers_in_short, peers_page
from tools.chapters import ROOT, replaced

BEGIN, END = "<!-- results -->", "<!-- /results -->"
PEERS_BEGIN, PEERS_END = "<!-- peers -->", "<!-- /peers -->"
FOLDER = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"


def lines() -> str:
    """Return one line per measured gain, with each figure from the file that the line links to."""
    engine, paged = _read("25_engine"), _read("22_paged")
    together = engine["together_against_one_at_a_time"]
    batching = engine["continuous_against_static"]
    prefix, scheduler = _read("23_prefix"), _read("24_scheduler")
    return "\n".join(
        [
            f"- {together['requests']} requests together give {together['ratio']:.1f} times the "
            "tokens per second of",
            f"  one at a time. Continuous batching gives {batching['ratio']:.1f} times those of "
            f"static batching, and {batching['ratio_to_padded']:.1f} times",
            "  those of a static batch that still computes its finished rows "
            f"({_link('25_engine')}).",
            f"- With a shared prefix of {prefix['settings']['system']} tokens the first token "
            f"comes {prefix['ratio']:.1f} times as fast",
            f"  ({_link('23_prefix')}).",
            f"- Of the KV memory that sequences own, {paged['paged']['waste']:.1%} is idle with "
            f"paging, and {paged['reserved']['waste']:.0%} if",
            f"  each sequence reserves its longest answer ({_link('22_paged')}).",
            f"- Scheduling {scheduler['running']} running and 10,000 waiting requests takes "
            f"{scheduler['milliseconds']['10,000 waiting']:.2f} ms",
            f"  ({_link('24_scheduler')}).",
            *_if_measured("25_trace", trace_lines),
            *_if_measured("34_cpu_kernels", forms_lines),
            *_if_measured("34_step_cost", cost_lines),
            *_if_measured("34_sampling", sampling_lines),
            *_if_measured("35_quantization", quantization_lines),
            *_if_measured("36_speculative", speculative_lines),
            *_if_measured("51_server", server_lines),
            *_if_measured("53_structured_output", form_lines),
        ]
    )


def _if_measured(name: str, report: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    return report(_read(name)) if (FOLDER / f"{name}.json").exists() else []


def forms_lines(measured: dict[str, Any]) -> list[str]:
    """Return the share of the sure float32 tokens that the other weight formats also give."""
    quality = measured["quality"]
    kept = {name: quality[name]["sure tokens"] for name in ("bfloat16", "int8", "int4")}
    shares = ", ".join(f"{name} {each['share']:.1%}" for name, each in kept.items())
    return [
        f"- Of the first five answer tokens to {quality['sure questions']} questions that float32 "
        f"is sure of, {shares}",
        f"  are the same, counted up to the first difference ({_link('34_cpu_kernels')}).",
    ]


def trace_lines(measured: dict[str, Any]) -> list[str]:
    """Return what events cost without subscribers, and with a live picture."""
    idle = measured["without_subscribers"]["share_of_a_step"]
    return [
        f"- Without subscribers, the engine's events cost {idle:.4%} of a step; with a live "
        "picture of the",
        f"  blocks, {measured['live']['throughput_kept']:.0%} of the tokens per second remain "
        f"({_link('25_trace')}).",
    ]


def sampling_lines(measured: dict[str, Any]) -> list[str]:
    """Return how many times faster the kernel samples tokens than torch does."""
    ratios = {name: each["ratio"] for name, each in measured["settings"].items()}
    shares = ", ".join(f"{ratio:.1f} times as fast ({name})" for name, ratio in ratios.items())
    return [
        f"- The sampling kernel samples {measured['rows']} tokens {shares},",
        f"  compared with torch's operations ({_link('34_sampling')}).",
    ]


def server_lines(measured: dict[str, Any]) -> list[str]:
    """Return the share of the engine's tokens per second that is left behind HTTP."""
    least, most = min(measured["shares"]), max(measured["shares"])
    return [
        f"- {measured['streams']} streams over HTTP, on the same cores as the engine, give "
        f"{measured['share']:.0%} of the engine's tokens",
        f"  per second ({least:.0%} to {most:.0%} by turns; {_link('51_server')}).",
    ]


def form_lines(measured: dict[str, Any]) -> list[str]:
    """Return what structured outputs keep and cost."""
    accepted, given = measured["grammar"]["acceptance"], measured["grammar"]["answers"]["model"]
    free = measured["grammar"]["answers"]["without a grammar"]
    share = measured["grammar"]["mask as a share of a step"]
    unchanged = measured["without a grammar"]["milliseconds"]["8 sequences"]["ratio"]
    return [
        f"- Of {accepted['schemas']:,} JSON schemas {accepted['share']:.1%} are accepted. Of "
        f"{given['ended by themselves']:,} answers that end by",
        f"  themselves, {given['valid share of those that ended']:.1%} are valid; without a "
        f"grammar {free['valid share of all']:.1%} of all. A mask takes",
        f"  {share['median']:.1%} of a step of one sequence (99th percentile "
        f"{share['p99']:.1%}), and steps without a grammar {unchanged:.2f} times",
        f"  what they took before ({_link('53_structured_output')}).",
    ]


def quantization_lines(measured: dict[str, Any]) -> list[str]:
    """Return what rounding the default model again costs, by method and bits."""
    methods = measured.get("methods")
    if methods is None:
        return []
    text = "held-out topics"

    def at(bits: int) -> str:
        found = {name: methods.get(f"{name}, {bits} bits") for name in ("RTN", "AWQ", "GPTQ")}
        each = [f"{n} {f[text]['kl divergence']:.2f}" for n, f in found.items() if f is not None]
        return f"at {bits} bits {', '.join(each)}"

    return [
        f"- The default model rounded again in groups of {measured['group size']}, KL divergence "
        "from its own file in nats per token,",
        "  on text that the calibration did not see: "
        f"{'; '.join(at(bits) for bits in (4, 3, 2) if f'RTN, {bits} bits' in methods)}",
        f"  ({_link('35_quantization')}).",
    ]


def speculative_lines(measured: dict[str, Any]) -> list[str]:
    """Return what speculation gains beside its prediction, and what failing drafts cost."""
    edit = {form: measured[form]["gains"]["editing"]["ngram"] for form in ("bfloat16", "auto")}
    wrong = measured["auto"]["bound"]["control, 512 tokens"]["always wrong"]["ratio"]
    gained = [
        f"{each['ratio']:.1f} times as fast in {form} ({each['predicted']['ratio']:.1f} predicted)"
        for form, each in edit.items()
    ]
    return [
        f"- An answer that edits its prompt, with prompt lookup: {gained[0]}",
        f"  and {gained[1]},",
        f"  with {edit['auto']['right of tested']:.0%} of the tested drafts right. If no draft is "
        f"right, {wrong:.2f} times as fast",
        f"  ({_link('36_speculative')}).",
    ]


def cost_lines(measured: dict[str, Any]) -> list[str]:
    """Return how close decode steps come to the prediction from their bytes and operations."""
    points = [point for form in measured["forms"].values() for point in form["points"]]
    within = sum(point["ratio"] <= measured["limit"] for point in points)
    sequences = max(point["sequences"] for point in points)
    context = max(point["context"] for point in points)
    return [
        f"- {within} of {len(points)} decode steps, of 1 to {sequences} sequences and contexts up "
        f"to {context:,}, take at most",
        f"  {measured['limit']:g} times the time that their bytes and operations predict, and the "
        f"worst {max(point['ratio'] for point in points):.1f} times ({_link('34_step_cost')}).",
    ]


def peers() -> dict[str, dict[str, Any]]:
    """Return the comparisons with other engines, one per processor; the pretended ones come last.

    The keys are the names of the files, without their ending.
    """
    found = {path.stem: _read(path.stem) for path in sorted(FOLDER.glob("peers-*.json"))}
    pretended = {name: bool(each["settings"].get("pretended")) for name, each in found.items()}
    return {name: found[name] for name in sorted(found, key=pretended.__getitem__)}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _link(name: str) -> str:
    return f"[{name}](../benchmarks/results/{name}.json)"


def write() -> None:
    """Replace the parts of both documents that show results."""
    text = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, lines())
    page = replaced(text, PEERS_BEGIN, PEERS_END, peers_page(peers()))
    PAGE.write_text(page, encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    short = replaced(readme, PEERS_BEGIN, PEERS_END, peers_in_short(peers()))
    README.write_text(short, encoding="utf-8")


if __name__ == "__main__":
    write()
