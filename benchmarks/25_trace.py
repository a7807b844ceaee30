"""The cost of emitting events: `python benchmarks/25_trace.py`.

The default model answers 8 requests (64 tokens in, 64 out) together.

- Without subscribers: how often a step checks `if trace.active:` (counted), times the duration of
  one such branch (timed in a loop), as a share of a step.
- With a live picture of the blocks: its tokens per second against those without, by turns.
"""

import statistics
import time
from contextlib import redirect_stdout
from io import StringIO

from common import json_option, random_prompts, write_results
from matplotlib.figure import Figure

from minigen import LLM, SamplingParams
from minigen.trace.events import Event, EventKind, Trace
from minigen_course.figures.block_map import block_map
from minigen_course.figures.explore import watch
from minigen_course.figures.trace_views import pool_states

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 64
NUM_BLOCKS, BLOCK_SIZE = 128, 16
TURNS, BRANCHES = 7, 200_000
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


class AskedTrace(Trace):
    """A trace without subscribers that counts how often it is checked."""

    times_asked = 0

    @property  # type: ignore[override]
    def active(self) -> bool:
        self.times_asked += 1
        return False

    @active.setter
    def active(self, value: bool) -> None:
        assert not value, "this trace takes no subscribers"


def branch_seconds() -> float:
    """Time one `if trace.active:` without subscribers: the least of five, less the empty loop."""
    trace, times = Trace(), range(BRANCHES)

    def asking() -> float:
        started = time.perf_counter()
        for _ in times:
            if trace.active:
                trace.emit(EventKind.STEP)
        return time.perf_counter() - started

    def looping() -> float:
        started = time.perf_counter()
        for _ in times:
            pass
        return time.perf_counter() - started

    return (min(asking() for _ in range(5)) - min(looping() for _ in range(5))) / BRANCHES


def answer(llm: LLM, turn: int) -> float:
    """Return the seconds for all requests."""
    prompts = random_prompts(REQUESTS, PROMPT_TOKENS, seed=turn)
    started = time.perf_counter()
    llm.generate(prompts, PARAMS, progress=False)
    return time.perf_counter() - started


def without_subscribers(llm: LLM) -> dict[str, float]:
    """Return what the checks of a step cost, as a share of the step."""
    with llm.count_work() as counters:
        seconds = answer(llm, turn=0)
    own, asked = llm.engine.trace, AskedTrace()
    manager = llm.engine.scheduler.manager  # type: ignore[attr-defined]
    llm.engine.trace = manager.trace = asked
    answer(llm, turn=0)
    llm.engine.trace = manager.trace = own
    step, branch = seconds / counters.steps, branch_seconds()
    asked_a_step = asked.times_asked / counters.steps
    return {
        "questions_a_step": asked_a_step,
        "nanoseconds_a_question": 1e9 * branch,
        "milliseconds_a_step": 1e3 * step,
        "share_of_a_step": asked_a_step * branch / step,
    }


def live(llm: LLM) -> dict[str, float]:
    """Return tokens per second with a picture that is drawn live, and without."""
    drawn = 0

    def draw(events: list[Event]) -> Figure:
        nonlocal drawn
        drawn += 1
        states = pool_states(events)
        return block_map(states, len(states) - 1, NUM_BLOCKS, BLOCK_SIZE)

    seconds: dict[str, list[float]] = {"unwatched": [], "watched": []}
    for turn in range(TURNS + 1):
        found = {"unwatched": answer(llm, turn)}
        with redirect_stdout(StringIO()), watch(llm.trace, draw, "blocks"):
            found["watched"] = answer(llm, turn)
        for name, each in found.items():
            if turn:
                seconds[name].append(each)
    num_tokens = REQUESTS * OUTPUT_TOKENS
    ratios = [
        plain / watched
        for plain, watched in zip(seconds["unwatched"], seconds["watched"], strict=True)
    ]
    return {
        **{f"{name}_tokens_a_second": num_tokens / min(each) for name, each in seconds.items()},
        "pictures_a_run": drawn / (TURNS + 1),
        "throughput_kept": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    llm = LLM.load(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    answer(llm, turn=0)
    found = {"without_subscribers": without_subscribers(llm), "live": live(llm)}
    for name, numbers in found.items():
        print(name.replace("_", " "))
        for which, value in numbers.items():
            print(f"  {which.replace('_', ' '):<28} {value}")
    path = json_option()
    if path is not None:
        settings = {"requests": REQUESTS, "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS}
        write_results(path, {"settings": settings, **found})


if __name__ == "__main__":
    main()
