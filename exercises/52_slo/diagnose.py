"""Exercise diagnose of chapter 52 (core, 10 points, about 25 minutes).

Six mystery servers, seeds 1 to 6, each have one fault. Name for each the saturated resource,
the layer that owns the knob, and the knob: one flag of `minigen serve`, with its value if it
takes one. The six resources are batch slots, token budget, blocks, arithmetic, bandwidth and
nothing. The layers are client, gateway, batching, engine, runtime and silicon. Resource and
layer must be right, and goodput in a re-run with your knob must reach four fifths of what the
course's own knob gives.

Check it:     minigen check exercises/52_slo/diagnose.py
With a hint:  minigen check exercises/52_slo/diagnose.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch52_slo.mystery import try_knob

    try_knob(3, mine(3).knob)

Harder: In each mystery server something else is full after your cure, or nothing is. Ask
whether the bottleneck has moved: which second knob (mystery prints them all) would you turn
next? If you need none, which gauge shows that?
"""

# exercise: minigen_course.ch52_slo.mystery.diagnose
from minigen_course.ch52_slo.mystery import Diagnosis


def diagnose(seed: int) -> Diagnosis:
    """Return the diagnosis of the mystery server of this seed, 1 to 6.

    Its resource is the one that is saturated, its layer owns the knob, and the knob is one flag of
    `minigen serve`, with its value if it takes one, as in
    `Diagnosis("blocks", "engine", "--num-blocks 2000")`.
    """
    raise NotImplementedError  # your turn
