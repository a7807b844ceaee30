"""The bubble of a pipeline, its messages and its memory: `python benchmarks/42_pipeline.py`.

The default model in float32 runs on 2, 3 and 4 processes of this machine, one thread each. A step
of 8 prompts, and a step of 8 decodes, is cut into 1 to 8 micro-batches. The trace has the start and
end of each micro-batch on each stage: a stage's share of the step in which it computed nothing is
the bubble, which is (p - 1) / (m + p - 1) for m micro-batches on p stages of equal speed. In a
prompt's step the stages are about equal. In a decode the last one also multiplies by the output
head, which is as large as eight layers, so that the others wait for it, too.

More processes than cores share the cores, so only the bubble of as many stages as cores can be
compared with the formula; messages, bytes and memory do not depend on that. Ranks of one machine
also share its memory, so a decode, which reads all weights for each micro-batch, gains nothing.
"""

import statistics
from collections.abc import Iterable
from contextlib import closing
from math import prod
from typing import Any

import psutil
from common import json_option, random_prompts, write_results

from minigen import LLM, SamplingParams, hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.config import DEFAULT_MODEL
from minigen.parallel.comm import MessageCounters
from minigen.parallel.pipeline import stage_tensors
from minigen.trace.events import Event, EventKind
from minigen.trace.timeline import Timeline

AT_ONCE, PROMPT, DECODES, REPEATS = 8, 64, 12, 5
STAGES, MICRO_BATCHES = (2, 3, 4), (1, 2, 4, 8)


def formula(num_stages: int, num_parts: int) -> float:
    """Return the bubble of stages of equal speed."""
    return (num_stages - 1) / (num_parts + num_stages - 1)


def bubble(parts: list[Event], num_stages: int) -> float:
    """Return the share of the time of all stages in which they computed nothing."""
    starts = [each.counts["started_ns"] for each in parts]
    spent = [each.counts["duration_ns"] for each in parts]
    ends = [start + each for start, each in zip(starts, spent, strict=True)]
    return 1 - sum(spent) / (num_stages * (max(ends) - min(starts)))


def steps_of(events: Iterable[Event]) -> list[tuple[Event, list[Event]]]:
    """Return each step with its micro-batches on all stages."""
    found, parts = [], list[Event]()
    for event in events:
        if event.kind is EventKind.MICRO_BATCH:
            parts.append(event)
        elif event.kind is EventKind.STEP:
            found.append((event, parts))
            parts = []
    return found


def of_steps(steps: list[tuple[Event, list[Event]]], num_stages: int, most: int) -> dict[str, Any]:
    """Return the median step, its bubble beside the formula, and the time of each stage."""
    by_stage = [
        statistics.median(
            sum(each.counts["duration_ns"] for each in parts if each.counts["stage"] == stage) / 1e9
            for _, parts in steps
        )
        for stage in range(num_stages)
    ]
    return {
        "step_seconds": statistics.median(step.counts["duration_ns"] / 1e9 for step, _ in steps),
        "bubble": statistics.median(bubble(parts, num_stages) for _, parts in steps),
        "formula": formula(num_stages, most),
        "seconds_of_stages": by_stage,
    }


def of_pipeline(num_stages: int, most: int) -> dict[str, Any]:
    """Measure steps of 8 prompts and of 8 decodes, and count the messages of rank 0."""
    llm = LLM.load(
        weights="float32",
        threads=num_stages,
        pipeline_parallel_size=num_stages,
        num_micro_batches=most,
    )
    params = SamplingParams(temperature=0, max_tokens=DECODES, ignore_eos=True)
    counters = MessageCounters()
    with closing(llm):
        llm.generate(random_prompts(AT_ONCE, PROMPT, seed=0), params, progress=False)
        with llm.record() as recorder, llm.trace.subscribed(Timeline(on_message=counters)):
            for seed in range(1, REPEATS + 1):
                llm.generate(random_prompts(AT_ONCE, PROMPT, seed), params, progress=False)
        memory = own_bytes_of_children()
    steps = steps_of(recorder.events)
    sizes = {"prompts": AT_ONCE * PROMPT, "decodes": AT_ONCE}
    measured = {
        name: of_steps([each for each in steps if each[0].counts["tokens"] == n], num_stages, most)
        for name, n in sizes.items()
    }
    return {**measured, "messages": messages(llm, counters, steps, most), "memory_bytes": memory}


def messages(
    llm: LLM, counters: MessageCounters, steps: list[tuple[Event, list[Event]]], most: int
) -> dict[str, Any]:
    """Return the messages of rank 0 and their bytes, counted and by formula."""
    tokens = sum(step.counts["tokens"] for step, _ in steps)
    rows = AT_ONCE * len(steps)  # every sequence of a step gets a token here
    expected = {
        "sent": [min(most, AT_ONCE) * len(steps), tokens * llm.config.hidden * 4],
        "received": [len(steps), rows * llm.config.vocab_size * 4],
    }
    counted = {kind: [counters.num_messages[kind], counters.num_bytes[kind]] for kind in expected}
    return {"counted": counted, "formula": expected, "equal": counted == expected}


def own_bytes_of_children() -> dict[str, int]:
    """Return each worker's memory without files that it has mapped, by rank."""
    found = {}
    for child in psutil.Process().children():
        command = child.cmdline()
        if "minigen.parallel.worker" in command:
            rank = command[command.index("minigen.parallel.worker") + 1]
            memory = child.memory_info()
            found[rank] = memory.rss - getattr(memory, "shared", 0)
    return dict(sorted(found.items()))


def predicted_bytes(num_stages: int) -> dict[str, int]:
    """Return the bytes of each worker's weights in float32, by rank."""
    checkpoint = open_checkpoint(hub.resolve(DEFAULT_MODEL))
    return {
        str(stage): sum(
            4 * prod(each.shape)
            for each in stage_tensors(
                checkpoint.tensors, checkpoint.config, stage, num_stages
            ).values()
        )
        for stage in range(1, num_stages)
    }


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    path = json_option()
    found: dict[str, Any] = {}
    for num_stages in STAGES:
        weights = predicted_bytes(num_stages)
        for most in MICRO_BATCHES:
            name = f"{num_stages} stages, {most} micro-batches"
            found[name] = of_pipeline(num_stages, most) | {"weights_bytes": weights}
            for kind in ("prompts", "decodes"):
                each = found[name][kind]
                print(
                    f"{name}, {kind}: {1e3 * each['step_seconds']:.0f} ms a step, bubble "
                    f"{each['bubble']:.0%}, by formula {each['formula']:.0%}"
                )
            print(f"  messages equal to the formula: {found[name]['messages']['equal']}")
        rest = {
            rank: (found[name]["memory_bytes"].get(rank, 0) - size) / 1e6
            for rank, size in weights.items()
        }
        print("  memory beside the weights: " + str({k: f"{v:.0f} MB" for k, v in rest.items()}))
    if path is not None:
        settings = {"at_once": AT_ONCE, "prompt_tokens": PROMPT, "repeats": REPEATS}
        write_results(path, {"pipelines": found, "settings": settings})


if __name__ == "__main__":
    main()
