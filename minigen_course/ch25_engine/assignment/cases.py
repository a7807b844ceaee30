"""Cases of chapter 25's exercises, drawn by a seed."""

from functools import partial
from random import Random
from typing import Any

from minigen_course.grading.exercise import expect
from minigen_course.grading.varied import Varied, outcome
from minigen_course.lab.toy_engine import LoopBench

MOST_STEPS = 60

UNKNOWN = 9  # an id that no request has

Request = tuple[int, int, int, int, int]  # step, id, tokens of prompt and answer, answers


def _step_loop(random: Random) -> dict[str, Any]:
    budget = random.choice((6, 7, 8))
    answers = random.choice((2, 3))
    requests = [
        (0, 1, random.randint(2, 5), random.randint(1, 3), 1),
        (random.choice((0, 1)), 2, random.randint(budget + 1, 2 * budget), 4, 1),
        (1, 3, random.randint(2, 5), random.randint(2, 4), answers),
    ]
    again = (random.randint(1, 6), random.choice((1, 2, 2, 2 + answers)), 2, 2, 1)
    aborted = random.sample((1, 2, UNKNOWN), 2)
    return {
        "max_num_batched_tokens": budget,
        "requests": sorted([*requests, again]),
        "aborts": sorted((random.randint(2, 4), each) for each in aborted),
    }


def _looped(
    part: Any,
    max_num_batched_tokens: int,
    requests: list[Request],
    aborts: list[tuple[int, int]],
) -> Any:
    """Serve these requests by a loop, and abort some of them.

    A request is (step of its arrival, id, tokens of its prompt and of an answer, number of
    answers); its further answers have the next ids. An abort is (step, id). Both come before the
    step. The result has what each call of `add` and `abort` did, the ids in `live` and the tokens
    computed after each step, and what was delivered for each id, with the last `finish_reason`.
    """
    bench = LoopBench(part, max_num_batched_tokens)
    calls, live, computed = [], [], []
    for now in range(MOST_STEPS):
        for step, number, prompt, answer, n in requests:
            if step == now:
                done = outcome(partial(bench.arrive, prompt, answer, n, number))
                calls.append(done if isinstance(done, str) else f"added {number}")
        for step, number in aborts:
            if step == now:
                calls.append(_abort(bench, number))
        if now >= max(step for step, *_ in requests) and _all_finished(bench):
            break
        computed.append(bench.step())
        live.append(sorted(bench.loop.live))
    expect(_all_finished(bench), f"after {MOST_STEPS} steps all requests should have finished.")
    delivered: dict[int, list[Any]] = {}
    reasons: dict[int, str | None] = {}
    for number, token, reason in bench.delivered:
        delivered.setdefault(number, []).append(token)
        reasons[number] = reason
    received = {each: [*tokens, reasons[each]] for each, tokens in sorted(delivered.items())}
    return {"calls": calls, "computed": computed, "live": live, "delivered": received}


def _abort(bench: LoopBench, number: int) -> str:
    for each in bench.sequences:
        if each.sequence_id == number and each.finish_reason is None:
            each.finish_reason = "abort"
    done = outcome(partial(bench.loop.abort, number))
    return done if isinstance(done, str) else f"aborted {number}"


def _all_finished(bench: LoopBench) -> bool:
    return all(each.finish_reason for each in bench.sequences)


VARIED = {
    "StepLoop": Varied(
        "token budget, requests, an id that comes twice, aborts",
        _step_loop,
        _looped,
        num_cases=6,
    ),
}
