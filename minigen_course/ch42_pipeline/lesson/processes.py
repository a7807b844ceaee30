"""What an engine's stages did in each step, and what they sent, read from its trace.

Rank 0's trace has an event for each micro-batch of each stage, with its start on the machine's own
clock, and an event for each message of rank 0.
"""

from collections.abc import Iterable
from dataclasses import replace

from minigen.trace.events import Event
from minigen_course.ch42_pipeline.lesson.timeline import COMPUTE, Span, Timeline

NS = 1e-9


def all_steps(events: Iterable[Event], first: int = 0) -> Timeline:
    """Return one timeline of all steps from number `first` on, whose spans know their step.

    A step begins with the event of stage 0's first micro-batch.
    """
    spans, origin, step = [], None, -1
    for event in events:
        if event.kind.value != "micro_batch":
            continue
        stage, batch = event.counts["stage"], event.counts["micro_batch"]
        step += (stage, batch) == (0, 0)
        if step < first:
            continue
        start = NS * event.counts["started_ns"]
        origin = start if origin is None else min(origin, start)
        spans.append((stage, start, NS * event.counts["duration_ns"], batch, step))
    origin = origin or 0.0
    found = [
        Span(stage, start - origin, start - origin + seconds, COMPUTE, batch, 0, step)
        for stage, start, seconds, batch, step in spans
    ]
    num_stages = 1 + max((each.rank for each in found), default=0)
    return Timeline(num_stages, tuple(sorted(found, key=lambda each: (each.end, each.rank))))


def step_timelines(run: Timeline) -> list[Timeline]:
    """Return each step of a run as a timeline of its own, which begins at 0."""
    steps: dict[int, list[Span]] = {}
    for each in run.spans:
        steps.setdefault(each.step, []).append(each)
    found = []
    for number in sorted(steps):
        origin = min(each.start for each in steps[number])
        moved = [
            replace(each, start=each.start - origin, end=each.end - origin)
            for each in steps[number]
        ]
        found.append(Timeline(run.num_ranks, tuple(moved)))
    return found


def messages(events: Iterable[Event]) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of rank 0's messages, by their kind."""
    found: dict[str, tuple[int, int]] = {}
    for event in events:
        if "bytes" in event.counts:
            name = event.kind.value
            number, num_bytes = found.get(name, (0, 0))
            found[name] = number + 1, num_bytes + event.counts["bytes"]
    return found
