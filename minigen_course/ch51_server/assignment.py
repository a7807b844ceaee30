"""What may be assigned of chapter 51: cases by seed for its exercises, and questions."""

import asyncio
import codecs
import json
from itertools import pairwise
from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch51_server.exercises import DONE, Stage, Token, as_bytes, choices_of, read
from minigen_course.ch51_server.exercises import run as in_time
from minigen_course.ch51_server.queue_checks import Door, settle
from minigen_course.figures import style
from minigen_course.grading.exercise import Wrong
from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied

WORDS = ("tea", " owl", "rain ", "a:b", "café", "🦉 here", "日本", "moon")
OTHER = (": ping", ":", "event: note", "id: 7", "retry: 9", "database: no")


def _cut(random: Random, raw: bytes, count: int) -> list[bytes]:
    """Cut a body into `count` pieces, anywhere."""
    places = [0, *sorted(random.sample(range(1, len(raw)), count - 1)), len(raw)]
    return [raw[begin:end] for begin, end in pairwise(places)]


def _event_data(random: Random) -> dict[str, Any]:
    end = random.choice(("\n", "\r\n"))
    lines = []
    for count in random.sample((1, 1, 2), 3):
        own = [
            f"data:{random.choice((' ', ' ', ''))}{each}" for each in random.sample(WORDS, count)
        ]
        own.insert(random.randrange(len(own) + 1), random.choice(OTHER))
        lines += [*own, ""]
    alone = [random.choice(OTHER), ""]
    lines = random.choice(([*alone, *lines], [*lines, *alone]))
    lines += random.choice(([], ["data: late"]))
    raw = "".join(line + end for line in lines).encode()
    return {"pieces": _cut(random, raw, random.choice((3, 4, 5)))}


def _data_and_pieces(part: Any, pieces: list[bytes]) -> list[tuple[str, int]]:
    """Read the pieces one by one.

    The result has, for each event, its data and how many pieces had been read by then.
    """
    num_read, found = 0, []

    def one_by_one() -> Any:
        nonlocal num_read
        for each in pieces:
            num_read += 1
            yield each

    for data in part(one_by_one()):
        found.append((data, num_read))
    return found


def _characters(random: Random, characters: str, count: int) -> list[list[bytes]]:
    """Return `count` of the characters, each cut into tokens."""
    chosen = [each.encode() for each in random.sample(characters, count)]
    return [_cut(random, raw, random.randint(2, len(raw))) for raw in chosen]


def _tokens(random: Random) -> list[Token]:
    """Return the tokens of an answer; two characters of several bytes are cut."""
    words = random.sample(("Tea", " and rain", ' "so"', "\n\n", " moon"), 3)
    parts = [[word.encode()] for word in words] + _characters(random, "é東🦉", 2)
    random.shuffle(parts)
    pieces = [piece for part in parts for piece in part]
    pieces += random.choice(([b"!"], [b""], [b" ", b"\xc3"]))
    reasons = [None] * (len(pieces) - 1) + [random.choice(("stop", "length"))]
    return list(zip(pieces, reasons, strict=True))


def _texts(tokens: list[Token]) -> list[str]:
    """Return the texts of an answer, each as soon as its characters are complete."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [utf8.decode(piece, final=reason is not None) for piece, reason in tokens]
    return [each for each in texts if each]


def _chat_events(random: Random) -> dict[str, Any]:
    tokens = _tokens(random)
    return {
        "tokens": tokens,
        "closed_after": random.randint(1, len(_texts(tokens[:-1]))),
        "failed_after": random.randrange(len(tokens)),
    }


def _streams(
    part: Any, tokens: list[Token], closed_after: int, failed_after: int
) -> dict[str, Any]:
    """Stream the answer four times, and note what a client gets and how often `give_up` is called.

    First, the client reads all of it. Second, it closes the stream after `closed_after` events.
    Third, the engine fails after `failed_after` tokens. Fourth, it brings as many and then no more,
    until the client's task is cancelled.
    """
    found: dict[str, Any] = {}

    async def whole() -> None:
        stage = _stage(tokens)
        stream = await stage.begin(part)
        raw = b"".join([as_bytes(event) async for event in stream])
        found["events"] = [_said(event) for event in read(raw)]
        found["give_up"] = [stage.num_given_up]

    async def closed() -> None:
        stage = _stage(tokens)
        stream: Any = await stage.begin(part)
        for _ in range(closed_after):
            await anext(stream)
        await stream.aclose()
        found["give_up"].append(stage.num_given_up)

    async def failed() -> None:
        stage = _stage(tokens[:failed_after])
        stage.inbox.put_nowait(RuntimeError("the model failed"))
        try:
            async for _ in await stage.begin(part):
                pass
        except RuntimeError:
            found["give_up"].append(stage.num_given_up)
        else:
            raise Wrong("the engine's error was lost; it should be raised again.")

    async def cancelled() -> None:
        stage = _stage(tokens[:failed_after])
        stream = await stage.begin(part)

        async def reads() -> None:
            async for _ in stream:
                pass

        task = asyncio.ensure_future(reads())
        await settle()
        task.cancel()
        await asyncio.wait([task])
        found["give_up"].append(stage.num_given_up)

    for play in (whole, closed, failed, cancelled):
        in_time(play())
    return found


def _stage(tokens: list[Token]) -> Stage:
    stage = Stage()
    for each in tokens:
        stage.inbox.put_nowait(each)
    return stage


def _said(event: Any) -> Any:
    """Return what an event says: its role or text, and its finish reason."""
    if event == DONE:
        return "[DONE]"
    (choice,) = choices_of([event])
    said = {**choice["delta"], "finish_reason": choice["finish_reason"]}
    return {name: value for name, value in said.items() if value}


def _queue(random: Random) -> dict[str, Any]:
    max_running, max_waiting = random.choice((1, 2)), random.choice((1, 2, 2))
    names = iter("abcdefghijklmnop")
    running: list[str] = []
    waiting: list[str] = []
    steps = []

    def arrive() -> None:
        name = next(names)
        steps.append(f"{name} comes")
        if len(running) < max_running:
            running.append(name)
        elif len(waiting) < max_waiting:
            waiting.append(name)

    def leave(how: str, line: list[str]) -> None:
        name = line.pop(random.randrange(len(line)))
        steps.append(f"{name} {how}")
        if line is running and waiting:
            running.append(waiting.pop(0))

    for _ in range(max_running + max_waiting + 1):
        arrive()
    steps.append("GET")
    leave("leaves", waiting)
    arrive()
    arrive()
    hows = ["ends", "fails", "leaves"]
    for how in random.sample(hows, 3):
        leave(how, running)
        if random.random() < 0.6 or not running:
            arrive()
    return {
        "max_running": max_running,
        "max_waiting": max_waiting,
        "seconds": random.choice((1.5, 2.5, 3.0, 5.0, 7.0)),
        "steps": steps,
    }


def _door(part: Any, max_running: int, max_waiting: int, seconds: float, steps: list[str]) -> Any:
    """Let requests come and go before an app, and note after each step which ones reach the app.

    `leaves` means that the request's task is cancelled, `fails` that the app raises an error for
    it; GET is a health check. A refusal is noted with its `Retry-After`.
    """
    noted: list[str] = []

    async def play() -> None:
        door = Door(part, max_running, max_waiting, seconds)
        tasks: dict[str, asyncio.Task[Any]] = {}
        for step in steps:
            num_started = len(door.started)
            name, _, what = step.partition(" ")
            if what == "ends":
                await door.end(name)
            elif what == "fails":
                await door.end(name, RuntimeError("the model failed"))
                raised = tasks[name].done() and isinstance(tasks[name].exception(), RuntimeError)
                if not raised:
                    raise Wrong(f"the app failed for request {name!r}; its error should be raised.")
            elif what == "leaves":
                tasks[name].cancel()
                await settle()
            else:
                tasks[name] = await door.ask(name, method="POST" if what else "GET")
            now = [f"{each} starts" for each in door.started[num_started:]]
            if what == "comes" and tasks[name].done():
                now.append(f"429, {door.expect_refused(name).get('retry-after')} s")
            noted.append(", ".join(now) or "-")

    in_time(play())
    return noted


VARIED = {
    "event_data": Varied(
        "words, line ends, other fields, where the body is cut", _event_data, _data_and_pieces
    ),
    "chat_events": Varied(
        "tokens, finish reason, when the client leaves or the engine fails", _chat_events, _streams
    ),
    "BoundedQueue": Varied(
        "places, seconds, who comes, ends, fails and leaves, in which order", _queue, _door
    ),
}


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
    parts += _characters(random, "éö東京🦉🌙", random.randint(2, 3))
    random.shuffle(parts)
    pieces = [piece for part in parts for piece in part]
    return {"pieces": [*pieces, b"."]}


def _num_events(pieces: list[bytes]) -> float:
    tokens: list[Token] = [(each, None) for each in pieces[:-1]]
    return len(_texts([*tokens, (pieces[-1], "length")])) + 3


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
        "each of them one token. The event loop needs {event_ms} ms of its thread for one event of "
        "one client, and an event carries all tokens that have arrived for that client. How many "
        "tokens does an event carry on average? (Leave out that the threads share cores and the "
        "GIL.)",
        "streams, time of the loop per event, time of a step",
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
