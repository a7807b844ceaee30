"""Exercise chat_events of chapter 51 (core, 10 points, about 25 minutes).

Write the async generator that turns an answer's tokens into server-sent events: a chunk with
the role, a chunk for each text as soon as its characters are complete, a chunk with the finish
reason and an empty delta, and [DONE]. If the stream ends before the answer does, call
`give_up()`, which aborts the request in the engine.

Check it:     minigen check exercises/51_server/chat_events.py
With a hint:  minigen check exercises/51_server/chat_events.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from openai import OpenAI

    from minigen.engine.engine_thread import EngineThread
    from minigen_course import load_model
    from minigen.server.local import LocalServer
    from minigen_course.ch51_server.lesson import small_app

    llm = load_model(weights="int4")
    owls = [{"role": "user", "content": "Tell me about owls."}]
    with EngineThread(llm.engine) as thread, LocalServer(small_app(llm, thread, mine)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        asked = {"model": "m", "messages": owls, "max_tokens": 24}
        for chunk in client.chat.completions.create(**asked, stream=True):
            print(chunk.choices[0].delta.content or "", end="")

Harder: A client may ask for `stream_options: {include_usage: true}`. Then a last chunk before
[DONE] has no choices, and `usage`. And what if the engine fails after the first event, when
status 200 has already been sent? Send an event that has an `error`.
"""

# exercise: minigen_course.ch51_server.lesson.chat_events
from collections.abc import AsyncIterator, Callable
from typing import Any


async def chat_events(
    tokens: AsyncIterator[tuple[bytes, str | None]],
    head: dict[str, Any],
    give_up: Callable[[], None],
) -> AsyncIterator[bytes]:
    """Stream an answer as server-sent events: its role, its text, its finish reason, [DONE].

    `tokens` yields the bytes of each token with None, and those of the last one with the finish
    reason. A chunk is `head` plus "choices", a list of one: "index" 0, "delta", "finish_reason".
    Text is sent as soon as its characters are complete. `give_up()` is called once if the stream
    ends before the answer does, for any reason. Sources: OpenAI's API reference; HTML standard,
    "Server-sent events".
    """
    raise NotImplementedError  # your turn
