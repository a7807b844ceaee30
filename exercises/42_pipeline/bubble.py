"""Exercise bubble of chapter 42 (warm-up, 5 points, about 10 minutes).

Measure a bubble. `spans` says when the stages of a pipeline compute: (stage, start, end), in
seconds. The spans of one stage do not overlap, and all of them come in any order. Return the
fraction of the stages' time in which they are idle, from 0 to 1. The time counts from the first
start to the last end of all spans, and it counts once for each of the `num_stages` stages, also
for a stage that never computes. Without spans, return 0.

Check it:     minigen check exercises/42_pipeline/bubble.py
With a hint:  minigen check exercises/42_pipeline/bubble.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch42_pipeline.lesson import decode_tokens, least_bubble, pass_once

    for batches in (1, 4, 16):
        spans = pass_once([0.010] * 4, batches).computing()
        print(f"{batches:>2} micro-batches, 4 stages: idle {mine(spans, 4):.1%}, ", end="")
        print(f"by the formula {least_bubble(4, batches):.1%}")

Harder: Say where the idle time lies: before a stage's first span, after its last one, or
between two. Which of the three can more micro-batches remove, and which can only other stages
remove?
"""

# exercise: minigen_course.ch42_pipeline.reference.bubble
from collections.abc import Sequence


def bubble(spans: Sequence[tuple[int, float, float]], num_stages: int) -> float:
    """Return the fraction of the stages' time in which they are idle, from 0 to 1.

    A span (stage, start, end) says when a stage computes, in seconds; spans of one stage do not
    overlap, and come in any order. The time counts from the first start to the last end of all
    spans, for each of the stages, also for one without a span. Without spans the fraction is 0.
    """
    raise NotImplementedError  # your turn
