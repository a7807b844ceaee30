"""Questions on chapter 24 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.lab.cost_model import StepTime

SLOTS = 4


def _static_batches(random: Random) -> dict[str, Any]:
    answers = [random.randint(5, 15) for _ in range(3 * SLOTS)]
    for first in range(0, len(answers), SLOTS):
        answers[first + random.randrange(SLOTS)] = random.randint(60, 100)
    return {"slots": SLOTS, "answers": answers}


def _empty_slots(slots: int, answers: list[int]) -> float:
    steps = sum(max(answers[first : first + slots]) for first in range(0, len(answers), slots))
    return 100 * (1 - sum(answers) / (slots * steps))


READ, TOKEN, OVERHEAD = 4, 0.5, 1  # milliseconds


def _long_prompt(random: Random) -> dict[str, Any]:
    return {
        "prompt": random.randint(40, 90) * 10 + 5,
        "decodes": random.choice((8, 12, 16)),
        "budget": random.choice((32, 48, 64)),
        "read": READ,
        "token": TOKEN,
        "overhead": OVERHEAD,
    }


def _first_token(
    prompt: int, decodes: int, budget: int, read: float, token: float, overhead: float
) -> float:
    step_time, total = StepTime(read, token, overhead), 0.0
    while prompt > 0:
        chunk = min(prompt, budget - decodes)
        total += step_time(decodes + chunk)
        prompt -= chunk
    return total


SIZES = (4, 8, 16, 24, 32)


def _steps(random: Random) -> dict[str, Any]:
    return {
        "fixed": random.choice((6.0, 9.0, 12.0, 15.0, 18.0)),
        "add": random.choice((0.25, 0.5, 1.0, 1.5)),
    }


def _knee(fixed: float, add: float) -> float:
    return fixed / add


def _steps_figure(fixed: float, add: float) -> Figure:
    """Draw the milliseconds of a step for several batch sizes, and write them beside the points."""
    made, axes = style.figure(8, 3)
    times = [fixed + add * each for each in SIZES]
    axes.plot(SIZES, times, "o", color=style.BLUE)
    for x, y in zip(SIZES, times, strict=True):
        axes.annotate(f"{y:g} ms", (x, y), (6, -12), textcoords="offset points", fontsize=9)
    axes.set(xlim=(0, 36), ylim=(0, 1.15 * times[-1]))
    axes.set(xlabel="sequences in the step, one token each", ylabel="milliseconds")
    style.title(axes, "Time of a decode step")
    return made


NUM_ROWS = 5

BLOCKS_A_SLOT = 25

ALL_SLOTS, ALL_BLOCKS, ALL_TOKENS = "the batch slots", "the blocks", "the token budget"

NO_LIMIT = "nothing: none waits"

Row = tuple[int, int, int, int]  # running and waiting requests, tokens, blocks


def _log(random: Random) -> dict[str, Any]:
    slots, budget = random.choice((8, 16, 32)), random.choice((128, 256))
    limit = random.choice((ALL_SLOTS, ALL_BLOCKS, ALL_TOKENS, NO_LIMIT))
    return {
        "slots": slots,
        "budget": budget,
        "blocks": BLOCKS_A_SLOT * slots,
        "rows": [_row(random, limit, slots, budget) for _ in range(NUM_ROWS)],
    }


def _row(random: Random, limit: str, slots: int, budget: int) -> Row:
    """Return a step in which only one limit keeps the first waiting request from its start."""
    running = slots if limit == ALL_SLOTS else random.randint(slots // 2, slots - 2)
    waiting = 0 if limit == NO_LIMIT else random.randint(3, 12)
    tokens = running + random.choice((0, 0, random.randint(10, 60)))
    held = running * 14 + random.randint(0, 4 * running)
    if limit == ALL_TOKENS:
        tokens = budget
    if limit == ALL_BLOCKS:
        tokens, held = running, BLOCKS_A_SLOT * slots - random.randint(0, 9)
    return running, waiting, tokens, held


def _limit(slots: int, budget: int, blocks: int, rows: list[Row]) -> str:
    running, waiting, tokens, _ = rows[0]
    if waiting == 0:
        return NO_LIMIT
    if running == slots:
        return ALL_SLOTS
    return ALL_TOKENS if tokens == budget else ALL_BLOCKS


def _log_text(slots: int, budget: int, blocks: int, rows: list[Row]) -> str:
    """Return a table of steps, with the limits in its last line."""
    lines = ["  step   running   waiting   tokens   blocks held"]
    for step, (running, waiting, tokens, held) in enumerate(rows, 200):
        lines.append(f"{step:>6}{running:>10}{waiting:>10}{tokens:>9}{held:>14}")
    lines.append(f" limit{slots:>10}{'none':>10}{budget:>9}{blocks:>14}")
    return "\n".join(lines)


QUESTIONS = {
    "empty_slots": Question(
        "estimate",
        "Twelve requests are there at the start, with answers of these many tokens: {answers}. "
        "They run in static batches of {slots}, in this order. Each step gives a token to each "
        "unfinished answer of the batch, the first step included. What percentage of all slots "
        "(steps x {slots}) is empty?",
        "the lengths of the answers",
        _static_batches,
        _empty_slots,
        "A batch takes as many steps as its longest answer has tokens, and an answer fills one "
        "slot for each of its tokens.",
        within=1.02,
    ),
    "first_token_in_chunks": Question(
        "estimate",
        "{decodes} sequences decode when a prompt of {prompt} tokens arrives, and they go on all "
        "the time. A step has at most {budget} tokens: first one for each decode, then a chunk of "
        "the prompt. A step of n tokens takes max({read} ms, n x {token} ms) + {overhead} ms. How "
        "many milliseconds after the beginning of its first chunk does the prompt get its first "
        "token?",
        "tokens of the prompt, decodes, token budget",
        _long_prompt,
        _first_token,
        "Each step computes {budget} - {decodes} tokens of the prompt, the last one the rest; the "
        "decodes' tokens take their time in every one of these steps.",
        within=1.02,
        points=8,
        minutes=8,
    ),
    "where_is_the_knee": Question(
        "reading",
        "The figure shows the time of a decode step for five batch sizes. At how many sequences is "
        "the knee by the formula with the sum, at which the part that grows takes as long as the "
        "part that is fixed?",
        "the fixed time of a step, and what a sequence adds",
        _steps,
        _knee,
        "The slope of the line through the points is what a sequence adds, and the line at 0 "
        "sequences is what is fixed; the knee is the second over the first.",
        within=1.05,
        figure=_steps_figure,
    ),
    "what_is_full": Question(
        "diagnosis",
        "The table shows five steps of a scheduler with chunked prefill and without a prefix "
        "cache, with its limits in the last line. It starts a request only if there are blocks for "
        "the whole prompt. Every waiting prompt has 200 tokens, and a block has 16. What keeps the "
        "waiting requests from their start?",
        "the limits, and what is full",
        _log,
        _limit,
        "Compare running requests, tokens and held blocks with their limits; a waiting prompt "
        "needs 13 free blocks, and a slot and a token besides.",
        choices=(ALL_SLOTS, ALL_BLOCKS, ALL_TOKENS, NO_LIMIT),
        figure=_log_text,
    ),
}

WRITTEN = {
    "a_smaller_budget": Written(
        "Users complain that their answers stop for a moment whenever another user sends a long "
        "prompt. You lower the token budget of a step. Why does that help, and who pays for it? "
        "Why is there no point in a budget far below the machine's knee?",
        "A step that computes a whole long prompt takes long, and the other users get no token "
        "before it ends. With a smaller budget, the prompt is computed in chunks over several "
        "steps, and every decode gets its token in each of them, so the longest gap between tokens "
        "falls. The long prompt pays: it needs more steps, each with the decodes' tokens and the "
        "overhead of a step, so its first token comes later. Left of the knee, a step of fewer "
        "tokens takes about as long, because it still reads all weights. So the gaps hardly fall "
        "any more, and the prompt only needs more steps.",
        {
            "the gap is the time of the largest step, which the budget limits": 3,
            "the prompt is computed in chunks, beside the decodes": 2,
            "the long prompt's time to first token grows": 3,
            "below the knee a step of fewer tokens takes about as long": 2,
        },
    ),
    "who_gives_way": Written(
        "Compare two ways to start a request: with blocks for its longest answer, and with blocks "
        "for its tokens so far. What does each of them cost? When blocks run out, why is the last "
        "request to arrive preempted, and what does it lose?",
        "With blocks for the longest answer, no running request ever lacks a block, but many "
        "blocks stay idle if answers end early, so fewer requests run at once. With blocks for "
        "now, more run at once, but a running request can find no free block. Then the last one "
        "to arrive gives its blocks back and waits at the head of the queue, so that the first "
        "always makes progress and every request finishes. It loses no token of its answer, only "
        "work: its keys and values are computed again, except for what a prefix cache still holds.",
        {
            "reservations leave blocks idle, so fewer requests run": 3,
            "without reservations, blocks can run out and work is done twice": 3,
            "the last is preempted so that the first ones always make progress": 2,
            "the victim's tokens are kept; its keys and values are computed again": 2,
        },
    ),
}
