"""Questions on chapter 51 that need no code."""

import json
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch51_server.assignment.cases import cut_characters, texts_of
from minigen_course.ch51_server.exercises import Token
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _streaming(random: Random) -> dict[str, Any]:
    while True:
        drawn: dict[str, Any] = {
            "streams": random.choice((24, 32, 40, 48, 64, 96)),
            "event_ms": random.choice((0.4, 0.5, 0.6, 0.8)),
            "step_ms": random.choice((8, 9, 10, 12, 15)),
        }
        if 1.3 <= _tokens_per_event(**drawn) <= 6:
            return drawn


def _tokens_per_event(streams: int, event_ms: float, step_ms: int) -> float:
    return max(1.0, streams * event_ms / step_ms)


def _patience(random: Random) -> dict[str, Any]:
    while True:
        drawn = {
            "running": random.choice((4, 6, 8, 12, 16)),
            "seconds": random.choice((9, 11, 13, 14, 17)),
            "patience": random.choice((20, 25, 30, 40)),
        }
        if 0.1 < drawn["patience"] * drawn["running"] / drawn["seconds"] % 1 < 0.9:
            return drawn


def _most_waiting(running: int, seconds: int, patience: int) -> float:
    return patience * running // seconds


def _cut_answer(random: Random) -> dict[str, Any]:
    words = ("The", " owl", " eats", " tea", " in", " rain", " now")
    parts = [[each.encode()] for each in random.sample(words, random.randint(2, 6))]
    parts += cut_characters(random, "éö東京🦉🌙", random.randint(2, 3))
    random.shuffle(parts)
    pieces = [piece for part in parts for piece in part]
    return {"pieces": [*pieces, b"."]}


def _num_events(pieces: list[bytes]) -> float:
    tokens: list[Token] = [(each, None) for each in pieces[:-1]]
    return len(texts_of([*tokens, (pieces[-1], "length")])) + 3


def _token_lines(pieces: list[bytes]) -> str:
    """Return a line for each token, with its bytes."""
    return "\n".join(f"token {number:>2}  {each!r}" for number, each in enumerate(pieces, 1))


ENDS = ("the model finished", "max_tokens was reached", "the connection broke", "characters split")


def _end_of_stream(random: Random) -> dict[str, Any]:
    texts = random.sample(("Tea", " and", " owls", " like", " the", " rain", " at", " night"), 5)
    return {
        "texts": texts,
        "place": random.randint(1, 3),
        "length": random.randint(40, 62),
        "happened": random.choice(ENDS),
    }


def _end(texts: list[str], place: int, length: int, happened: str) -> str:
    return happened


def _wire(texts: list[str], place: int, length: int, happened: str) -> str:
    """Return a stream as its client received it."""

    def event(delta: dict[str, str], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return "data: " + json.dumps({"choices": [choice]})

    if happened == "characters split":
        texts = [*texts[:place], " \ufffd\ufffd", "\ufffd", *texts[place:]]
    else:
        texts = [*texts[:place], " \N{OWL}", *texts[place:]]
    events = [event({"role": "assistant", "content": ""}), *(event({"content": t}) for t in texts)]
    if happened == "the connection broke":
        return "\n\n".join([*events[:-1], events[-1][:length]])
    reason = "length" if happened == "max_tokens was reached" else "stop"
    return "\n\n".join([*events, event({}, reason), "data: [DONE]"])


SERVERS = (
    *("a computation in the event loop", "threads with a lock", "one engine thread"),
    "an admission limit",
)


def _four_clients(random: Random) -> dict[str, Any]:
    """Return when four answers begin and end, those refused, and the looks at /health."""
    server, alone = random.choice(SERVERS), random.uniform(1.5, 3.0)
    batch = alone * random.uniform(1.15, 1.35)
    if server in SERVERS[:2]:
        ends = [alone * number for number in range(1, 5)]
    else:
        ends = [batch * random.uniform(0.97, 1.0) for _ in range(4)]
    order = random.sample(range(4), 4)
    refused = order[2:] if server == SERVERS[3] else []
    answers = [0.02 if client in refused else ends[place] for place, client in enumerate(order)]
    if server == SERVERS[0]:
        looks = [(0.05, ends[-1] + 0.01)]
    else:
        looks, now = [], 0.05
        while now < max(answers):
            took = random.uniform(0.01, 0.04)
            looks.append((now, now + took))
            now += took + max(ends) / 20
    return {
        "server": server,
        "order": order,
        "answers": answers,
        "refused": refused,
        "looks": looks,
    }


def _server(
    server: str,
    order: list[int],
    answers: list[float],
    refused: list[int],
    looks: list[tuple[float, float]],
) -> str:
    return server


def _seen_by_clients(
    server: str,
    order: list[int],
    answers: list[float],
    refused: list[int],
    looks: list[tuple[float, float]],
) -> Figure:
    """Draw when four clients had their answers, and the looks at /health meanwhile."""
    made, axes = style.figure(9, 3)
    for end, client in zip(answers, order, strict=True):
        colour = style.ORANGE if client in refused else style.BLUE
        axes.barh(client, end, color=colour, height=0.5)
        what = "status 429" if client in refused else f"answer after {end:.1f} s"
        axes.annotate(what, (end, client), (5, 0), textcoords="offset points", va="center")
    for before, after in looks:
        axes.barh(4, after - before, left=before, color=style.AMBER, height=0.5)
    axes.set_yticks(range(5), [*(f"client {number}" for number in range(1, 5)), "looks at /health"])
    axes.set(xlabel="seconds after all four had asked", xlim=(0, 1.25 * max(answers)))
    axes.invert_yaxis()
    style.title(axes, "Four clients ask for equally long answers; a bar ends with the response")
    return made


QUESTIONS = {
    "tokens_per_event": Question(
        "estimate",
        "A server streams to {streams} clients. A step of the engine takes {step_ms} ms and brings "
        "each of them one token. The event loop needs {event_ms} ms of its thread to send once to "
        "one client, and it sends all tokens that have arrived for that client. How many tokens "
        "does it send at a time, on average? (Leave out that the threads share cores and the GIL.)",
        "streams, time of the loop to send once, time of a step",
        _streaming,
        _tokens_per_event,
        "One round of the loop takes {streams} x {event_ms} ms, and meanwhile a step ends every "
        "{step_ms} ms, each with a token for every client.",
        within=1.02,
        points=3,
        minutes=3,
    ),
    "longest_queue": Question(
        "estimate",
        "A server runs {running} requests at once, each for {seconds} s on average, so a place "
        "becomes free every {seconds}/{running} s. More requests come than that, and clients give "
        "up after waiting {patience} s for their turn. How many requests may wait at most (the "
        "value of `--max-queue`), if also the last one of them is to start before its client gives "
        "up? Use the chapter's formula for the time until a request behind the queue would start.",
        "requests at once, their seconds, the patience of clients",
        _patience,
        _most_waiting,
        "The last of q waiting requests has q - 1 before it, so it starts after q x {seconds} / "
        "{running} s; the largest whole q for which that is at most {patience} s is the limit.",
        within=1.0,
    ),
    "num_events": Question(
        "reading",
        "The text shows the bytes of an answer's tokens, as Python prints them; the last one "
        "has the finish reason `length`. A server streams the answer as in this "
        "chapter: the role, the text of each token as soon as its characters are complete, the "
        "finish reason, `[DONE]`. Its loop is never late. How many events does it send, the first "
        "and the last included? (In UTF-8, a character's first byte says how many bytes it has: "
        "`\\xc3` two, `\\xe4` to `\\xe6` three, `\\xf0` four. The bytes after it are `\\x80` to "
        "`\\xbf`.)",
        "words, characters of several bytes, where they are cut",
        _cut_answer,
        _num_events,
        "A token has an event if no character is incomplete at its end; to these come the role, "
        "the finish reason and [DONE].",
        within=1.0,
        figure=_token_lines,
    ),
    "what_happened": Question(
        "diagnosis",
        "The text is all that a client received of a streamed answer. (The chunks' other fields "
        "are left out.) What happened? The choices: the model finished, and all is well; "
        "`max_tokens` was reached; the connection broke; the model finished, but characters were "
        "split, because the server decoded each token by itself.",
        "the texts, and how the stream ends",
        _end_of_stream,
        _end,
        "A whole answer ends with [DONE], its finish reason is `stop` if the model finished and "
        "`length` at max_tokens, and \\ufffd stands for bytes that are no whole character.",
        choices=ENDS,
        figure=_wire,
        points=3,
        minutes=3,
    ),
    "who_computes": Question(
        "diagnosis",
        "Four clients send questions at the same moment. None of the answers is streamed. Each row "
        "is a client and ends with its response; in the last row, each bar is one look at "
        "`/health`, and the next look comes a moment after its answer. How does this server work? "
        "The choices: an endpoint with `async def` that calls the engine (a computation in the "
        "event loop); an endpoint with a plain `def` and a lock around the engine (threads with a "
        "lock); one engine thread that takes all requests; one engine thread behind an admission "
        "limit.",
        "the kind of the server, the times of answers and of looks at /health",
        _four_clients,
        _server,
        "In the loop and behind a lock the answers end one after the other, but only a computation "
        "in the loop makes /health wait; one engine thread computes them together, and an "
        "admission limit refuses some.",
        choices=SERVERS,
        figure=_seen_by_clients,
    ),
}

WRITTEN = {
    "lock_around_the_engine": Written(
        "A colleague's server calls the engine in a pool of threads, with a lock around the call. "
        "`/health` is always answered at once, but sixteen clients wait much longer than the "
        "engine needs for sixteen answers in one batch. Say why, what this chapter's design does "
        "instead, and what a thread that waits for the lock cannot do.",
        "The loop is free, because the computation runs in other threads. But behind the lock each "
        "call is a batch of one, and the calls run one after the other, so the steps add up. "
        "In the chapter's design one thread owns the engine. The event loop puts commands (add, "
        "abort) into a queue, and the engine takes them between two steps, so all requests share "
        "its steps. Tokens come back through a second queue, and the loop is woken for them. A "
        "thread that waits for the lock cannot be cancelled when its client goes; a queued request "
        "can be aborted.",
        {
            "the lock makes every request a batch of its own, one after the other": 3,
            "one thread owns the engine, and all requests share its steps": 3,
            "loop and engine exchange commands and tokens through queues": 2,
            "a waiting thread cannot be cancelled when its client goes": 2,
        },
    ),
    "refuse_early": Written(
        "More requests arrive than a server can answer. Compare a server that accepts all of them "
        "with one that has an admission limit: what happens to the clients, and to the work of the "
        "engine? What does a good refusal contain, and why is it sent before the engine has seen "
        "the request?",
        "Without a limit the queue grows as long as the load lasts. Clients wait longer and longer "
        "and give up, and what was computed for them is lost. If the server does not notice "
        "that they have gone, it even goes on for them. With a limit, the requests that are "
        "admitted start in time, and the others know at once. A good refusal has the status 429, "
        "an error with a message, and `Retry-After`, an estimate of when a request could start. "
        "Sent by the gateway, it costs almost nothing: no tokenizing, no blocks, no batch slot.",
        {
            "without a limit the queue and the waiting grow, until clients give up": 3,
            "work for clients that have gone is lost": 2,
            "status 429 with Retry-After tells the client when to come back": 3,
            "a refusal at the gateway costs almost nothing of the engine": 2,
        },
    ),
}
