"""Exercise make_plan of chapter 52 (stretch, 15 points, about 45 minutes).

The capstone: serve a trace of chats, documents and a nightly job within their objectives, at
the least cost. Chats and documents must keep TTFT below 500 ms and ITL below 100 ms, the job's
answers must be complete within 30 s. At least 97 % of the requests must keep their objectives,
on this trace and on a second one of the same kind. The score counts good answers for the bytes
that the GPU read and the FLOPs that it computed; it must reach 95 % of the course's. A plan
that does not fit into the card's memory is refused.

Check it:     minigen check exercises/52_slo/make_plan.py
With a hint:  minigen check exercises/52_slo/make_plan.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch52_slo.capstone import score_of

    score_of(mine()).show()

Harder: climb(make_plan()) of minigen_course.ch52_slo.capstone prints the ladder from Plan() to
your plan, one field at a time; climb(make_plan(), "job_priority") takes that field first. Does
a rung's gain depend on the rungs before it? Which two fields are worth nothing alone, and much
together?
"""

# exercise: minigen_course.ch52_slo.capstone.make_plan
from minigen_course.ch52_slo.capstone import Plan


def make_plan() -> Plan:
    """Return a plan that serves the trace within its objectives at the least cost.

    At least 97 % of the requests must keep their objectives, also on a second trace of the same
    kind. The score is good answers per second of the GPU, where the cost adds the seconds for all
    bytes read, at full bandwidth, to those for all FLOPs, at full arithmetic.
    """
    raise NotImplementedError  # your turn
