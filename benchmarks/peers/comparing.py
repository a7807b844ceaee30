"""Rounds of turns: each engine runs alone, in an order that changes per round."""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import MIXED, loads
from benchmarks.peers.record import Record, Round
from benchmarks.peers.running import Turn, calibrate, take_turn


class Comparison:
    """Adds rounds to a record; an engine that fails is dropped, and the others go on.

    `jobs` are the engines that can be started, `left_out` says why others cannot; `sure` are the
    questions of `answers.py`. The record's settings have the "seed" and the "scale" of the loads.
    """

    def __init__(
        self,
        record: Record,
        jobs: Mapping[str, dict[str, Any]],
        sure: Sequence[dict[str, Any]],
        left_out: Mapping[str, str],
    ):
        self.record, self.jobs, self.sure = record, dict(jobs), list(sure)
        self.left_out = dict(left_out)

    def run_round(self) -> Round:
        """Give every remaining engine its turn, and save the record after each."""
        settings, number = self.record.settings, len(self.record.rounds)
        seed = settings["seed"] * 1000 + number  # so that a later run uses other tokens
        current = Round.new(list(self.jobs))
        current.turns |= {name: Turn(failure=why) for name, why in self.left_out.items()}
        current.engines += list(self.left_out)
        self.left_out = {}
        self.record.rounds.append(current)
        names, asked = list(self.jobs), loads(seed, settings["scale"])
        random.Random(seed).shuffle(names)
        for name in names:
            current.speed.append(calibrate())
            started = time.monotonic()
            turn = self._turn(name, asked)
            if turn.failure:
                del self.jobs[name]
            current.turns[name] = turn
            self.record.save()
            shown = turn.failure or f"{time.monotonic() - started:.0f} s"
            print(f"round {number + 1}, {name}: {shown}", flush=True)
        return current

    def _turn(self, name: str, asked: Sequence[dict[str, Any]]) -> Turn:
        job = self.jobs[name]
        mine = [load for load in asked if load["name"] != MIXED or job["mixed"]]
        with tempfile.TemporaryDirectory() as folder:
            given = {**job, "loads": mine, "answers": self.sure}
            return take_turn(job["command"], given, Path(folder))
