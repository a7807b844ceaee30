"""Questions on chapter 00 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.lab.cost_model import GB

SHAPES = ((8, 32, 8), (14, 40, 8), (7, 32, 32), (32, 64, 8), (70, 80, 8))


def _chats(
    billions: int, layers: int, kv_heads: int, bits: float, memory: int, tokens: int
) -> float:
    """Return how many chats fit, with the fraction."""
    free = memory * GB - GB - billions * 1e9 * bits / 8
    return free / (2 * layers * kv_heads * 128 * 2 * tokens)


def _budget(random: Random) -> dict[str, Any]:
    while True:
        billions, layers, kv_heads = random.choice(SHAPES)
        given: dict[str, Any] = {
            "billions": billions,
            "layers": layers,
            "kv_heads": kv_heads,
            "bits": random.choice((4.5, 5, 8, 16)),
            "memory": random.choice((16, 24, 48, 80, 141)),
            "tokens": random.choice((2000, 4000, 5000, 8000)),
        }
        chats = _chats(**given)
        far_from_whole = 0.2 < chats % 1 < 0.8
        larger = {**given, "memory": given["memory"] + 1}  # working memory forgotten
        if 6 < chats < 60 and far_from_whole and int(_chats(**larger)) != int(chats):
            return given


def _whole_chats(**given: Any) -> int:
    return int(_chats(**given))


def _num_steps(lengths: list[int], slots: int) -> int:
    ends = [0] * slots
    for length in lengths:
        ends[ends.index(min(ends))] += length
    return max(ends)


def _queue(random: Random) -> dict[str, Any]:
    while True:
        slots = random.choice((2, 3))
        lengths = [random.randint(2, 14) for _ in range(7)]
        groups = [lengths[first : first + slots] for first in range(0, len(lengths), slots)]
        others = (-(-sum(lengths) // slots), sum(map(max, groups)), max(lengths), sum(lengths))
        if _num_steps(lengths, slots) not in others:
            return {"lengths": lengths, "slots": slots}


def _answers(lengths: list[int], slots: int) -> Figure:
    """Draw the tokens of each answer, in the order of arrival."""
    made, axes = style.figure(8, 3)
    names = [f"request {number}" for number in range(1, len(lengths) + 1)]
    axes.bar_label(axes.barh(names, lengths, color=style.BLUE), padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("tokens of the answer")
    style.title(axes, "Seven requests, in the order in which they wait")
    return made


def _state(random: Random) -> dict[str, Any]:
    slots, lacks = random.choice((8, 16, 32)), random.choice(("slots", "kv cache", "both"))
    cache, needed = 1000 * random.randint(60, 200), 1000 * random.randint(4, 12)
    free = needed - 1000 * random.randint(1, 3)
    if lacks == "slots":
        free = needed + 1000 * random.randint(2, 20)
    running = slots if lacks != "kv cache" else slots - random.randint(1, slots // 2)
    return {
        "slots": slots,
        "running": running,
        "cache": cache,
        "taken": cache - free,
        "needed": needed,
        "waiting": random.randint(2, 9),
    }


def _lacks(
    slots: int, running: int, cache: int, taken: int, needed: int, waiting: int
) -> float | str:
    if running < slots:
        return "kv cache"
    return "slots" if cache - taken >= needed else "both"


def _printed_state(
    slots: int, running: int, cache: int, taken: int, needed: int, waiting: int
) -> str:
    return (
        f"slots      {slots}, of which {running} are taken\n"
        f"KV cache   room for {cache:,} tokens, of which {taken:,} are taken\n"
        f"queue      {waiting} requests wait; the first one needs {needed:,} tokens"
    )


QUESTIONS = {
    "chats_that_fit": Question(
        "estimate",
        "A model has {billions} billion weights of {bits} bits each, everything counted, {layers} "
        "layers, and {kv_heads} KV heads of 128 numbers each. A number of the KV cache has 16 "
        "bits. The machine has {memory} GB, and 1 GB of them is working memory (a GB is 10^9 "
        "bytes). How many whole chats of {tokens} tokens fit at once?",
        "weights, bits, layers, KV heads, memory, tokens of a chat",
        _budget,
        _whole_chats,
        "The weights take {billions} x {bits} / 8 GB, and a token takes 2 x {layers} x {kv_heads} "
        "x 128 x 2 bytes of what they and the working memory leave.",
        within=1.0,
    ),
    "steps_on_slots": Question(
        "reading",
        "The figure shows how many tokens each of seven requests gets. They come at the same time "
        "and wait in this order for {slots} slots. In each step, every request in a slot gets one "
        "token. A request leaves its slot after the step of its last token, and the next one in "
        "the queue is in that slot from the following step on. How many steps does the engine "
        "make?",
        "the lengths of seven answers, and the number of slots",
        _queue,
        _num_steps,
        "Note for each of the {slots} slots the step in which it becomes free; the next request "
        "goes to the slot that is free first, and the last slot to become free ends the run.",
        within=1.0,
        figure=_answers,
    ),
    "what_they_wait_for": Question(
        "diagnosis",
        "A request starts when a slot is free and the KV cache has room for all of its tokens. No "
        "request overtakes another one. Below is the state of an engine. Of what does it have too "
        "little, so that the first request of the queue cannot start now?",
        "slots, size of the KV cache, how much of each is taken, tokens of the first in the queue",
        _state,
        _lacks,
        "Compare {running} running requests with {slots} slots, and the free part of the cache, "
        "{cache} - {taken} tokens, with the {needed} tokens that are needed.",
        choices=("slots", "kv cache", "both"),
        figure=_printed_state,
        points=3,
        minutes=3,
    ),
}

WRITTEN = {
    "why_share_steps": Written(
        "Eight users ask a large dense model at the same time. Say why an engine that runs their "
        "requests side by side gives more tokens per second than one that runs them one after "
        "another, what a single user loses by it, and what limits the number of requests that run "
        "at once.",
        "A decode step must read all weights from memory, whether it works for one request or for "
        "eight. Side by side, one reading gives eight tokens, so the cost of reading is shared. A "
        "step for eight takes somewhat longer than a step for one, so once a user's own request "
        "runs, its tokens come more slowly than they would alone. The number of requests is "
        "limited by memory: each one keeps keys and values of all its tokens in the KV cache, and "
        "weights, KV cache and working memory must fit together.",
        {
            "each step reads all weights, however many requests take part": 3,
            "one reading is shared by all requests of the step": 2,
            "the price: a fuller step takes longer, so one user's tokens come more slowly": 2,
            "the limit is memory: the KV cache grows with the requests, the weights do not": 3,
        },
    ),
}
