"""The cost of messages between ranks: `python benchmarks/41_tensor_parallel.py`.

Two and three processes of this machine sum tensors of growing size over gloo. The time of an
all-reduce is modelled as the turns of a ring: each turn has a latency and its bytes, fitted to the
times. Then the default model in float32 decodes one sequence and eight, whole and split over 3
ranks (it has 9 query heads and 3 KV heads, so 2 ranks cannot share it), with a thread per rank; the
messages of a step are counted, and the time in them is measured.

Ranks on one machine share its cores and its memory, so this cannot show what a split gains on
several devices, but it shows what its messages cost.
"""

import statistics
from typing import Any

from common import json_option, random_prompts, write_results

from minigen import LLM, SamplingParams
from minigen.parallel.comm import MessageCounters
from minigen.trace.events import Event, EventKind
from minigen.trace.timeline import Timeline
from minigen_course.ch41_tensor_parallel.lesson import fit_link
from minigen_course.ch41_tensor_parallel.message_timing import time_all_reduces

SIZES = [2**power for power in range(8, 25, 2)]  # bytes
REPEATS = 40
RANKS_OF_MODEL = 3
STEPS = 40


def of_group(num_ranks: int, seconds: dict[int, float]) -> dict[str, Any]:
    """Return times of messages between `num_ranks` processes, and the line through them."""
    link = fit_link("this machine", seconds, num_ranks)
    return {
        "seconds_by_bytes": seconds,
        "seconds_of_a_turn": link.latency,
        "bytes_per_second": link.bandwidth,
    }


def of_model(num_ranks: int, at_once: int) -> dict[str, Any]:
    """Time decode steps of `at_once` requests: the median, and the messages of one step."""
    llm = LLM.load(weights="float32", threads=num_ranks, tensor_parallel_size=num_ranks)
    steps: list[float] = []

    def look(event: Event) -> None:
        if event.kind is EventKind.STEP and event.counts["tokens"] == at_once:
            steps.append(event.counts["duration_ns"] / 1e9)

    prompts = random_prompts(at_once, 32, seed=41)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    counters = MessageCounters()
    timeline = Timeline(on_message=counters)
    with llm.trace.subscribed(look), llm.trace.subscribed(timeline):
        llm.generate(prompts, params, progress=False)
    llm.close()
    return {
        "step_seconds": statistics.median(steps),
        "messages_per_step": {k: n / STEPS for k, n in counters.num_messages.items()},
        "bytes_in_all": counters.num_bytes,
        "share_of_time_in_messages": sum(counters.seconds.values()) / sum(steps),
    }


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    times = time_all_reduces((2, 3), SIZES, REPEATS)
    groups = {str(num_ranks): of_group(num_ranks, found) for num_ranks, found in times.items()}
    for num_ranks, found in groups.items():
        print(
            f"{num_ranks} ranks: {1e6 * found['seconds_of_a_turn']:.0f} µs a turn, "
            f"{found['bytes_per_second'] / 1e9:.2f} GB/s"
        )
    steps = {
        f"{num_ranks} ranks, {at_once} at once": of_model(num_ranks, at_once)
        for num_ranks in (1, RANKS_OF_MODEL)
        for at_once in (1, 8)
    }
    for name, found in steps.items():
        print(
            f"{name}: {1e3 * found['step_seconds']:.1f} ms a step, "
            f"{found['share_of_time_in_messages']:.0%} of it in messages"
        )
    path = json_option()
    if path is not None:
        write_results(path, {"all_reduce": groups, "steps": steps, "settings": {"steps": STEPS}})


if __name__ == "__main__":
    main()
