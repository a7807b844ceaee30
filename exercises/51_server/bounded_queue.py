"""Exercise BoundedQueue of chapter 51 (stretch, 15 points, about 40 minutes).

Write a queue with an end, as ASGI middleware. At most `max_running` requests run in `app` at
once, at most `max_waiting` more wait and start in the order in which they came. A request that
finds the queue full does not reach the app: it gets status 429, a JSON body with an `error`
that has a `message`, and the header `Retry-After`.

The header's value is the time after which a request behind the full queue would start:
(`max_waiting` + 1) times `seconds`, divided by `max_running`, rounded up to whole seconds.
Count only requests of type "http" and method "POST"; pass all else to the app at once. A
request gives its place back however it ends: by an answer, by an error of the app (which goes
on to the caller), or because its task is cancelled, running or waiting.

Check it:     minigen check exercises/51_server/bounded_queue.py
With a hint:  minigen check exercises/51_server/bounded_queue.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from concurrent.futures import ThreadPoolExecutor

    import httpx

    from minigen.engine.engine_thread import EngineThread
    from minigen_course import load_model
    from minigen.server.local import LocalServer
    from minigen_course.ch51_server.lesson import small_app

    llm = load_model(weights="int4")
    owls = [{"role": "user", "content": "Tell me about owls."}]
    asked = {"model": "m", "messages": owls, "max_tokens": 100, "stream": True}
    with EngineThread(llm.engine) as thread:
        app = mine(small_app(llm, thread), max_running=2, max_waiting=1, seconds=1.0)
        with LocalServer(app) as server, ThreadPoolExecutor(5) as pool:
            url = f"{server.url}/v1/chat/completions"
            for got in pool.map(lambda _: httpx.post(url, json=asked, timeout=60), range(5)):
                print(got.status_code, got.headers.get("retry-after", "answered"))

Harder: A waiting client may disconnect. ASGI does not cancel your task for that: `receive()`
returns a message of the type "http.disconnect". Wait for it and for the turn at once, and leave
the queue at whichever comes first. The request's body must still reach the app.
"""

# exercise: minigen_course.ch51_server.lesson.BoundedQueue
from starlette.types import ASGIApp


class BoundedQueue:
    """ASGI middleware: a few requests run in `app`, a few wait in order, the others get status 429.

    Only POST requests are counted; everything else goes to the app at once. `seconds` is how long a
    request runs on average. `Retry-After` is the time until a request behind the full queue would
    start, in whole seconds, rounded up.
    """

    def __init__(self, app: ASGIApp, max_running: int, max_waiting: int, seconds: float):
        raise NotImplementedError  # your turn
