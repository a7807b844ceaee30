"""Compare minigen with other engines: `python -m benchmarks.peers`, or `make bench-peers`.

Each engine gets its own environment, and the default model in the formats that it reads, in a cache
folder (8 GB; half an hour, the first time). Then in each round every engine starts alone, in an
order that is random per round, runs all loads (benchmarks/peers/loads.py) and ends. Samples during
which other programs took more than 5% of the machine are set aside. The JSON file grows with every
turn, so a run may be interrupted at any time, and a later run adds rounds to it:

  python -m benchmarks.peers --replace --rounds 2   two rounds, a quarter of an hour each
  python -m benchmarks.peers --resume --rounds 3    three more
  python -m benchmarks.peers --resume --rounds 0    only the summary again, and the table
  python -m benchmarks.peers --engines minigen,vLLM --rounds 1 --json FILE    some engines only
  python -m benchmarks.peers --pretend avx2         minigen and llama.cpp with AVX2 and no more
  python -m benchmarks.peers --pretend sse4         the same without AVX
  python -m tools.results                           the tables into docs/results.md and README.md

The results are those of one processor: benchmarks/results/peers-PROCESSOR.json, for instance
peers-intel-xeon-amx.json, or peers-intel-xeon-amx-avx2.json if AVX2 is pretended. Linux only.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.answers import sure_answers
from benchmarks.peers.comparing import Comparison
from benchmarks.peers.engines import ENGINES, chosen
from benchmarks.peers.environments import Environments, recipes
from benchmarks.peers.models import Models
from benchmarks.peers.preparing import prepared, started_once
from benchmarks.peers.processor import PRETENDED, Processor
from benchmarks.peers.record import Record, RecordError
from benchmarks.peers.table import peers_table
from minigen import hub

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    """Set everything up, measure in rounds, save each to the JSON file, and print the table."""
    options = read_options()
    processor = Processor.present(options.pretend)
    if sys.platform != "linux":
        sys.exit("This benchmark reads /proc to find other busy processes, so it needs Linux.")
    if not processor.can_pretend:
        sys.exit(f"{processor.name} has no {options.pretend}, so it cannot be pretended.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # ends the engine too
    if options.setup_only:
        set_up(options, processor)
        return
    record = opened(options, processor)
    if options.rounds:
        comparison = Comparison(record, *set_up(options, processor))
        for _ in range(options.rounds):
            comparison.run_round()
    if not record.rounds:
        sys.exit(f"{record.path.name} has no rounds, and --rounds 0 adds none.")
    record.save()
    print(peers_table(record.path.stem, json.loads(record.path.read_text(encoding="utf-8"))))


def set_up(
    options: argparse.Namespace, processor: Processor
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Return the jobs of engines that start here, the sure answers, and why other engines fail."""
    environments = Environments(options.folder / "environments", recipes(processor))
    models = Models(hub.resolve(hub.DEFAULT_MODEL), options.folder / "models", environments)
    engines = chosen(options.engines, processor)
    jobs, reasons = prepared(engines, environments, models, options.threads, processor.variables)
    sure = sure_answers(options.folder / "models" / "answers.json", models.source)
    started = options.folder / "started" / processor.short_name
    reasons |= started_once(jobs, sure, started)
    return {name: job for name, job in jobs.items() if name not in reasons}, sure, reasons


def opened(options: argparse.Namespace, processor: Processor) -> Record:
    """Return the record that the options ask for, or exit with the reason."""
    path = options.json or RESULTS / f"peers-{processor.short_name}.json"
    settings = {
        "model": hub.DEFAULT_MODEL,
        "threads": options.threads,
        "seed": options.seed,
        "scale": options.scale,
        "pretended": processor.pretended,
    }
    try:
        return Record.opened(path, settings, options.resume, options.replace)
    except RecordError as error:
        sys.exit(str(error))


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"engines: {', '.join(engine.name for engine in ENGINES)}",
    )
    add = parser.add_argument
    add("--engines", metavar="NAMES", help="prefixes of names, comma-separated (default: all)")
    add("--rounds", type=int, default=3, help="number of rounds to measure now (default 3)")
    add("--json", type=Path, metavar="FILE", help="file of the results (default: see above)")
    add("--pretend", choices=sorted(PRETENDED), help="pretend a processor without more than this")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="add rounds to those of FILE")
    existing.add_argument("--replace", action="store_true", help="replace the contents of FILE")
    add(
        "--setup-only",
        action="store_true",
        help="only install, write models, start each engine once",
    )
    cache = hub.cache_folder() / "peers"
    add("--folder", type=Path, default=cache, help="folder of the environments and models")
    add("--threads", type=int, default=2, help="threads per engine (default 2)")
    add(
        "--seed",
        type=int,
        default=1,
        help="seed of the prompts and of the order of turns (default 1)",
    )
    add("--scale", type=float, default=1.0, help="below 1: shorter loads, to try things out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
