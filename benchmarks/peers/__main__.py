"""Set minigen beside other engines: `python -m benchmarks.peers`, or `make bench-peers`.

Each peer gets an environment of its own, and the default model in the forms that it reads, in a
cache folder (minutes the first time). Then in each round every engine is started alone, in an order
of its own, does all loads (`loads.py`) and ends. Samples during which others took more than 5% of
the machine are set aside. Linux only.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from benchmarks.peers.answers import sure_answers
from benchmarks.peers.engines import Engine, chosen
from benchmarks.peers.environments import Environments, SetupError
from benchmarks.peers.loads import UNITS, loads
from benchmarks.peers.models import Models
from benchmarks.peers.running import Turn, calibrate, take_turn
from benchmarks.peers.summary import figures, ratios, spread
from minigen import hub

RESULTS = Path(__file__).resolve().parent.parent / "results" / "peers.json"


def main() -> None:
    """Set everything up, measure in rounds, print a table, and write JSON."""
    options = read_options()
    if sys.platform != "linux":
        sys.exit("This benchmark reads /proc to see who else is running, so it needs Linux.")
    environments = Environments(options.folder / "environments")
    models = Models(hub.resolve(hub.DEFAULT_MODEL), options.folder / "models", environments)
    jobs, reasons = prepared(chosen(options.engines), environments, models, options.threads)
    if options.setup_only:
        return
    sure = sure_answers(options.folder / "models" / "answers.json", models.source)
    comparison = Comparison(jobs, sure, options.seed, options.scale)
    for round_id in range(options.rounds):
        comparison.run_round(round_id)
    results = comparison.results()
    results["engines"] |= {name: {"left_out": reason} for name, reason in reasons.items()}
    print_table(results["engines"])
    settings = {"threads": options.threads, "rounds": options.rounds, "seed": options.seed}
    write_results(options.json, {**settings, **results})


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--engines", help="beginnings of names, comma-separated; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--setup-only", action="store_true", help="install and write models only")
    parser.add_argument("--folder", type=Path, default=hub.cache_folder() / "peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all loads, to try it out")
    return parser.parse_args()


def prepared(
    engines: Sequence[Engine], environments: Environments, models: Models, threads: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Command and job of every engine that could be set up, and why the others could not."""
    jobs, reasons = {}, {}
    for engine in engines:
        try:
            python = sys.executable
            if engine.environment is not None:
                environments.set_up(engine.environment)
                python = str(environments.python(engine.environment))
            jobs[engine.name] = {
                "command": [python, "-m", engine.worker],
                "variables": environments.variables(engine.environment),
                "versions": environments.versions(engine.environment),
                "model": str(models.path(engine.model)),
                "weights": engine.weights,
                "at_once": engine.at_once,
                "threads": threads,
            }
        except SetupError as error:
            reasons[engine.name] = str(error)
            print(f"{engine.name} is left out: {error}", flush=True)
    return jobs, reasons


class Comparison:
    """Rounds of turns; an engine that fails is out from then on, and the others go on."""

    def __init__(
        self,
        jobs: dict[str, dict[str, Any]],
        sure: list[dict[str, Any]],
        seed: int,
        scale: float = 1.0,
    ):
        self.jobs, self.sure, self.seed, self.scale = jobs, sure, seed, scale
        self.turns: dict[str, list[Turn]] = {name: [] for name in jobs}
        self.machine: list[dict[str, float]] = []

    def run_round(self, round_id: int) -> None:
        """Give every engine that still runs its turn, in this round's order."""
        seed = self.seed * 1000 + round_id
        names = [name for name in self.jobs if not any(turn.failure for turn in self.turns[name])]
        random.Random(seed).shuffle(names)
        asked = {"loads": loads(seed, self.scale), "answers": self.sure}
        for name in names:
            self.machine.append(calibrate())
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                job = {**self.jobs[name], **asked}
                turn = take_turn(job["command"], job, Path(folder))
            self.turns[name].append(turn)
            told = turn.failure or f"{time.monotonic() - begun:.0f} s"
            print(f"round {round_id + 1}, {name}: {told}", flush=True)

    def results(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        engines = {name: figures(turns, self.sure) for name, turns in self.turns.items()}
        for name, found in engines.items():
            if "versions" in found:
                found["versions"] = {**self.jobs[name]["versions"], **found["versions"]}
                found["at_once"] = self.jobs[name]["at_once"]
        kinds = self.machine[0] if self.machine else {}
        return {
            "machine": {kind: spread([each[kind] for each in self.machine]) for kind in kinds},
            "engines": engines,
            "ratios_of_minigen_to": ratios(self.turns),
        }


def print_table(engines: dict[str, dict[str, Any]]) -> None:
    """Medians of all engines, one a line."""
    width = shutil.get_terminal_size().columns
    print("  ".join(["engine".ljust(24), *(f"{load}, {unit}" for load, unit in UNITS.items())]))
    for name, found in engines.items():
        if "left_out" in found:
            print(f"{name:<24}  {found['left_out']}"[:width])
            continue
        medians = (found["loads"][load].get("median") for load in UNITS)
        shown = ["-" if median is None else f"{median:.4g}" for median in medians]
        columns = zip(shown, UNITS.items(), strict=True)
        cells = [text.rjust(len(f"{load}, {unit}")) for text, (load, unit) in columns]
        mark = "" if found["computes_the_model"] else "  another model?"
        print("  ".join([name.ljust(24), *cells]) + mark)
    disturbed = sum(
        load["set_aside"] for found in engines.values() for load in found.get("loads", {}).values()
    )
    print(f"{disturbed} samples set aside, because others took more than 5% of the machine")


if __name__ == "__main__":
    main()
