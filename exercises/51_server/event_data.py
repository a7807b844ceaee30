"""Exercise event_data of chapter 51 (warm-up, 5 points, about 10 minutes).

Read a stream of server-sent events by hand. `pieces` are the parts of a body in order, cut
anywhere, even within a character. Yield the data of each event as text, as soon as the empty
line that ends it has arrived.

A line ends with a line feed, and a carriage return before it does not count. A line is a name,
a colon and a value; one space after the colon does not belong to the value. The values of an
event's `data` lines are joined by a line feed. Leave out lines that begin with a colon
(comments), fields with other names, events without a `data` line, and an event without an empty
line at the end.

Check it:     minigen check exercises/51_server/event_data.py
With a hint:  minigen check exercises/51_server/event_data.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    import httpx

    from minigen.engine.engine_thread import EngineThread
    from minigen_course import load_model
    from minigen.server.local import LocalServer
    from minigen_course.ch51_server.lesson import small_app

    llm = load_model(weights="int4")
    owls = [{"role": "user", "content": "Tell me about owls."}]
    asked = {"model": "m", "messages": owls, "max_tokens": 24, "stream": True}
    with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread)) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as response:
            for data in mine(response.iter_raw()):
                print(data)

Harder: The standard also lets a line end with a carriage return alone, and a browser's reader
keeps the last `id` and the `retry` time, so that it can connect again. How would you tell a
carriage return that ends a line from the first half of a pair, if the piece ends there?
"""

# exercise: minigen_course.ch51_server.lesson.event_data
from collections.abc import Iterable, Iterator


def event_data(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event, as soon as its empty line has arrived.

    `pieces` are the parts of a body, cut at any byte. A line ends with a line feed, perhaps after a
    carriage return. The values of several `data` lines are joined by a line feed. Comments, other
    fields, events without a data line and an event that does not end are left out. Source: HTML
    standard, "Server-sent events".
    """
    raise NotImplementedError  # your turn
