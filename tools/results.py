"""What README says of measurements, written from benchmarks/results/: `python -m tools.results`."""

import json
from typing import Any

from tools.chapters import ROOT

BEGIN, END = "<!-- results -->", "<!-- /results -->"
FOLDER = ROOT / "benchmarks" / "results"


def lines() -> str:
    """One line for each measured gain, each figure from the file that it links to."""
    engine, paged = _read("25_engine"), _read("22_paged")
    together = engine["together_against_one_at_a_time"]
    batching = engine["continuous_against_static"]
    prefix, scheduler = _read("23_prefix"), _read("24_scheduler")
    return "\n".join(
        [
            f"- {together['requests']} requests together give {together['ratio']:.1f} times the "
            "tokens a second of",
            f"  one at a time, and continuous batching {batching['ratio']:.1f} times those of "
            f"static batching, {batching['ratio_to_padded']:.1f} times where",
            "  a static batch goes on computing finished rows, as static engines did "
            f"({_link('25_engine')}).",
            f"- A shared beginning of {prefix['settings']['system']} tokens brings the first token "
            f"{prefix['ratio']:.1f} times as soon",
            f"  ({_link('23_prefix')}).",
            f"- Of the KV memory that sequences own {paged['paged']['waste']:.1%} lies idle in "
            f"blocks, {paged['reserved']['waste']:.0%} where the",
            f"  longest answer is reserved ({_link('22_paged')}).",
            f"- Choosing among {scheduler['running']} running and 10,000 waiting requests takes "
            f"{scheduler['milliseconds']['10,000 waiting']:.2f} ms",
            f"  ({_link('24_scheduler')}).",
        ]
    )


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _link(name: str) -> str:
    return f"[{name}](benchmarks/results/{name}.json)"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{lines()}\n{END}{tail}", encoding="utf-8")
