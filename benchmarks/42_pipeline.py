"""The bubble of a pipeline, its messages and its memory: `python benchmarks/42_pipeline.py`.

The default model in float32 runs on 2, 3 and 4 processes of this machine, one thread each. A step
of 8 prompts, and a step of 8 decodes, is cut into 1 to 8 micro-batches. The trace has the start and
end of each micro-batch on each stage: a stage's share of the step in which it computed nothing is
the bubble, which is (p - 1) / (m + p - 1) for m micro-batches on p stages of equal speed. With
equal numbers of layers the stages are about equal in a prompt's step. In a decode the last one also
multiplies by the output head, which is as large as eight layers, so that the others wait for it,
too. With the numbers of `balanced_layers` it is the other way round. Beside each bubble are the
formula's and that of a simulator that knows each stage's work, in layers.

More processes than cores share the cores, so only the bubble of as many stages as cores can be
compared with the formula; messages, bytes and memory do not depend on that. Ranks of one machine
also share its memory, so a decode, which reads all weights for each micro-batch, gains nothing.
"""

import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from math import prod
from typing import Any

import psutil
from common import json_option, random_prompts, write_results

from minigen import LLM, SamplingParams, hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.config import DEFAULT_MODEL
from minigen.parallel.comm import MessageCounters
from minigen.parallel.pipeline import balanced_layers, stage_layers, stage_tensors
from minigen.trace.events import Event, EventKind
from minigen.trace.timeline import Timeline
from minigen_course.ch42_pipeline.lesson import layer_work, least_bubble, pass_once
from minigen_course.ch42_pipeline.reference import bubble
from minigen_course.lab.cost_model import ModelShape

AT_ONCE, PROMPT, DECODES, REPEATS = 8, 64, 12, 5
STAGES, MICRO_BATCHES = (2, 3, 4), (1, 2, 4, 8)


def spans_of(parts: list[Event]) -> list[tuple[int, float, float]]:
    """Return each micro-batch on each stage as (stage, start, end), in seconds."""
    counts = [each.counts for each in parts]
    return [
        (each["stage"], each["started_ns"] / 1e9, (each["started_ns"] + each["duration_ns"]) / 1e9)
        for each in counts
    ]


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


def of_steps(
    steps: list[tuple[Event, list[Event]]], work: Sequence[float], most: int
) -> dict[str, Any]:
    """Return the median step, the time of each stage, and the bubble beside what it should be."""
    num_stages = len(work)
    by_stage = [
        statistics.median(
            sum(each.counts["duration_ns"] for each in parts if each.counts["stage"] == stage) / 1e9
            for _, parts in steps
        )
        for stage in range(num_stages)
    ]
    return {
        "step_seconds": statistics.median(step.counts["duration_ns"] / 1e9 for step, _ in steps),
        "bubble": statistics.median(bubble(spans_of(parts), num_stages) for _, parts in steps),
        "formula": least_bubble(num_stages, most),
        "simulated": bubble(pass_once(work, most).computing(), num_stages),
        "seconds_of_stages": by_stage,
    }


def of_pipeline(dealt: Sequence[int], most: int) -> dict[str, Any]:
    """Measure steps of 8 prompts and of 8 decodes, and count the messages of rank 0."""
    llm = LLM.load(
        weights="float32",
        threads=len(dealt),
        pipeline_parallel_size=len(dealt),
        pipeline_layers=tuple(dealt),
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
    head = layer_work(ModelShape.of(llm.config))[-1]
    sizes = {
        "prompts": (AT_ONCE * PROMPT, 0.0),  # of a prompt the last row alone has logits
        "decodes": (AT_ONCE, head),
    }
    measured = {
        name: of_steps(
            [each for each in steps if each[0].counts["tokens"] == tokens],
            [*dealt[:-1], dealt[-1] + work_of_head],
            most,
        )
        for name, (tokens, work_of_head) in sizes.items()
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


def predicted_bytes(checkpoint: Checkpoint, spans: Sequence[range]) -> dict[str, int]:
    """Return the bytes of each worker's weights in float32, by rank."""
    own = [stage_tensors(checkpoint.tensors, checkpoint.config, layers) for layers in spans]
    return {
        str(stage): sum(4 * prod(each.shape) for each in tensors.values())
        for stage, tensors in enumerate(own)
        if stage > 0
    }


def deals(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """Return the layers of each stage for each number of stages: equal numbers, and balanced."""
    config, found = checkpoint.config, list[tuple[int, ...]]()
    for num_stages in STAGES:
        found.append(tuple(map(len, stage_layers(config.num_layers, num_stages))))
        found.append(balanced_layers(checkpoint.tensors, config, num_stages))
    return found


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    path = json_option()
    found: dict[str, Any] = {}
    checkpoint = open_checkpoint(hub.resolve(DEFAULT_MODEL))
    for dealt in deals(checkpoint):
        spans = stage_layers(checkpoint.config.num_layers, len(dealt), dealt)
        weights = predicted_bytes(checkpoint, spans)
        for most in MICRO_BATCHES:
            name = f"stages of {', '.join(map(str, dealt))} layers, {most} micro-batches"
            found[name] = of_pipeline(dealt, most) | {"weights_bytes": weights}
            for kind in ("prompts", "decodes"):
                each = found[name][kind]
                print(
                    f"{name}, {kind}: {1e3 * each['step_seconds']:.0f} ms a step, bubble "
                    f"{each['bubble']:.0%}, by formula {each['formula']:.0%}, simulated "
                    f"{each['simulated']:.0%}"
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
