"""Measure an engine with the same code in every engine's process. Standard library only.

A worker is started as `python -m benchmarks.peers.workers.NAME JOB.json`, and prints one JSON
object per line: `versions`, then `sample`s, `memory` and `answers`; or `refused`, with a sentence.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.peers.loads import MEMORY_ALL, MEMORY_ALONE, START, Load, Request
from benchmarks.peers.processes import Moment, peak_memory


class Engine(Protocol):
    """What a worker implements for its engine: greedy answers of an exact length."""

    def versions(self) -> dict[str, str]:
        """Return the packages that matter, and their settings."""

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield the tokens of the answer to one prompt, each as soon as it is known."""

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Return the answers to all requests at once."""


class Refused(Exception):
    """An engine cannot do what a job asks; the message is a sentence that says why."""


def serve(open_engine: Callable[[dict[str, Any]], Engine]) -> None:
    """Open the engine of the job that the command line names, and measure it."""
    output = _private_stdout()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def report(**result: Any) -> None:
        print(json.dumps(result), file=output, flush=True)

    try:
        engine = open_engine(job)
    except Refused as refused:
        report(refused=str(refused))
        return
    first_prompt = job["answers"][0]["prompt"]
    next(iter(engine.stream(first_prompt, 1)))
    started = Moment(**json.loads(os.environ["PEERS_STARTED"]))
    seconds = time.monotonic() - started.clock
    report(sample=START, seconds=seconds, foreign=started.foreign_since())
    report(versions=engine.versions())
    for index, load in enumerate(job["loads"]):
        for sample in samples(engine, load):
            report(sample=load["name"], **sample)
        if index == 0:
            report(memory=MEMORY_ALONE, bytes=peak_memory())
    report(memory=MEMORY_ALL, bytes=peak_memory())
    report(answers=answers(engine, job["answers"]))


def samples(engine: Engine, load: Load) -> Iterator[dict[str, float]]:
    """Warm up if the load says so, then measure its samples one after the other."""
    measure = WAYS[load["way"]]
    if load["warm_up"]:
        measure(engine, load["warm_up"])
    for requests in load["samples"]:
        before = Moment.now()
        seconds, tokens = measure(engine, requests)
        yield {"seconds": seconds, "tokens": tokens, "foreign": before.foreign_since()}


def decode(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Return seconds from the first token to the last, and the number of tokens after the first."""
    seconds, tokens = 0.0, 0
    for request in requests:
        times = [time.monotonic() for _ in engine.stream(**request)]
        _check(len(times), request)
        seconds += times[-1] - times[0]
        tokens += len(times) - 1
    return seconds, tokens


def prefill(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Return seconds to the first token of each request in turn, and the sum of prompt tokens."""
    started = time.monotonic()
    for request in requests:
        _check(len(list(engine.stream(**request))), request)
    return time.monotonic() - started, sum(len(request["prompt"]) for request in requests)


def together(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Seconds until all answers are there, and their tokens."""
    started = time.monotonic()
    found = engine.together(requests)
    seconds = time.monotonic() - started
    for answer, request in zip(found, requests, strict=True):
        _check(len(answer), request)
    return seconds, sum(map(len, found))


WAYS = {"decode": decode, "prefill": prefill, "together": together}


def answers(engine: Engine, asked: list[dict[str, Any]]) -> list[list[int]]:
    """Return the engine's answers to the sure prompts: one by one, then together."""
    requests = [{"prompt": each["prompt"], "num_tokens": len(each["tokens"])} for each in asked]
    return [list(engine.stream(**each)) for each in requests] + engine.together(requests)


def _check(num_tokens: int, request: Request) -> None:
    if num_tokens != request["num_tokens"]:
        raise SystemExit(f"it answered with {num_tokens} tokens instead of {request['num_tokens']}")


def _private_stdout() -> TextIO:
    """Keep the process's stdout for results alone; all other output goes to stderr."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private
