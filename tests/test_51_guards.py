"""The middleware between network and app: keys, limits, timeouts, ids and the log, on tiny apps."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.types import ASGIApp, Receive, Scope, Send

from minigen.errors import ContextLengthError, MinigenError, OptionError, ParamsError
from minigen.server.middleware.admission import LONGEST_WAIT, Admission, Turns
from minigen.server.middleware.auth import ApiKeys, RequireKey, read_keys
from minigen.server.middleware.limits import Limits, record_of, set_failure
from minigen.server.middleware.stack import MiddlewareStack
from minigen.server.middleware.timeouts import Deadline, WholeBody
from tests.asgi import Exchange, ask

NO_KEYS = ApiKeys()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body that one `receive` returns."""
    message = await receive() if scope["method"] == "POST" else {"body": b"", "more_body": False}
    assert message.get("type") != "http.disconnect"
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


class Stream:
    """Sends a chunk for each release of `let`; `freed` says that its `finally` ran."""

    def __init__(self, num_chunks: int = 3):
        self.headers = [(b"content-type", b"text/event-stream")]
        self.num_chunks = num_chunks
        self.let = asyncio.Semaphore(0)
        self.freed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            for number in range(self.num_chunks):
                await self.let.acquire()
                body = b"data: %d\n\n" % number
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.freed = True


def guarded(app: ASGIApp, keys: ApiKeys = NO_KEYS, **limits: Any) -> MiddlewareStack:
    return MiddlewareStack(app, Limits(**limits), keys)


# Limits


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"max_body_bytes": None},
        {"max_in_flight": True},
        {"max_in_flight_per_key": -1},
        {"max_queue": -1},
        {"max_n": 1.5},
        {"max_n": 129},  # more than the schema of a request accepts
        {"max_prompt_tokens": "many"},
        {"body_timeout": 0},
        {"body_timeout": None},
        {"send_timeout": float("nan")},
        {"drain_timeout": float("inf")},
        {"request_timeout": "1"},
        {"cors_origins": ("localhost:3000",)},
        {"cors_origins": ("http://localhost:3000/",)},
        {"cors_origins": ("http://*.example",)},
    ],
)
def test_an_impossible_limit_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Limits(**wrong)
    name = "origin" if "cors_origins" in wrong else next(iter(wrong))
    assert name in str(caught.value)


def test_limits_of_prompt_and_n_apply_where_they_are_set() -> None:
    limits = Limits(max_prompt_tokens=5, max_n=2)
    limits.check_prompt(5)
    limits.check_n(2)
    with pytest.raises(ContextLengthError, match="6 tokens; this server accepts at most 5"):
        limits.check_prompt(6)
    with pytest.raises(ParamsError, match="n is 3; this server allows at most 2"):
        limits.check_n(3)
    Limits(max_prompt_tokens=None, max_n=None).check_n(10**6)


# Keys


@pytest.mark.parametrize("given", ["Bearer one", "bearer   two", "BEARER two "])
def test_any_of_several_keys_is_accepted(given: str) -> None:
    app = RequireKey(echo, ApiKeys(["one", "two"]))
    assert ask(app, headers={"authorization": given}).status == 200


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer three", "one", "Basic one", "Bearer one two", "Bearer on"]
)
def test_any_other_key_is_refused_with_openais_error(given: str | None) -> None:
    app = RequireKey(echo, ApiKeys(["one", "two"]))
    answer = ask(app, headers={} if given is None else {"authorization": given})
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.answer_headers["www-authenticate"] == "Bearer"
    assert ask(app, "/api/chat").error == (
        "This server requires an API key: send it in the header 'Authorization: Bearer KEY' or "
        "'x-api-key: KEY'."
    ), "as Ollama's clients read it"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "two"}, 200),
        ({"x-api-key": " two "}, 200),
        ({"x-api-key": "two", "authorization": "Bearer other"}, 200),
        ({"x-api-key": "other", "authorization": "Bearer one"}, 200),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer two"}, 401),
        ({"x-api-key": "other", "authorization": "Basic one"}, 401),
    ],
)
def test_a_key_may_come_in_anthropics_header(headers: dict[str, str], status: int) -> None:
    app = RequireKey(echo, ApiKeys(["one", "two"]))
    assert ask(app, "/v1/messages", headers=headers).status == status


def test_health_needs_no_key_and_metrics_optionally() -> None:
    for path, open_metrics, status in [
        ("/health", False, 200),
        ("/ready", False, 200),
        ("/version", False, 200),
        ("/metrics", True, 200),
        ("/metrics", False, 401),
        ("/health/", True, 401),
        ("/v1/models", True, 401),
        ("/openapi.json", True, 401),
    ]:
        app = guarded(echo, ApiKeys(["one"]), open_metrics=open_metrics)
        assert ask(app, path, method="GET").status == status, path
    assert ask(guarded(echo), "/metrics", method="GET").status == 200, "no key is set, none asked"


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("minigen.server.middleware.auth.hmac.compare_digest", compare)
    keys = ApiKeys(["one", "two", "three"])
    for key in (b"one", b"three", b"no"):
        keys.name_of(key)
    assert len(compared) == 9
    assert {len(each) for each in compared} == {32}, "digests, so no length is revealed"


def test_keys_are_not_stored_as_text() -> None:
    assert "opensesame" not in repr(vars(ApiKeys(["opensesame"])))


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# the team's\none\n\n  two  \n", encoding="utf-8")
    assert read_keys(path) == ["one", "two"]
    path.write_text("# none\n", encoding="utf-8")
    with pytest.raises(OptionError, match="has no API key"):
        read_keys(path)
    path.write_text("one\nse cret\n", encoding="utf-8")
    with pytest.raises(OptionError, match="line 2") as caught:
        read_keys(path)
    assert "cret" not in str(caught.value)
    with pytest.raises(MinigenError, match="cannot be read"):
        read_keys(tmp_path)
    with pytest.raises(OptionError, match="API key 2") as caught:
        ApiKeys(["one", "naïve"])
    assert "na" not in str(caught.value).split("must")[0]


# Bodies


def test_a_body_arrives_whole_and_at_once() -> None:
    app = WholeBody(echo, 10, 1)
    assert ask(app, chunks=[b"12345", b"", b"67890"]).body == b"1234567890"
    assert ask(app, chunks=[], headers={"content-length": "0"}, method="GET").status == 200


def test_a_body_with_a_declared_length_over_the_limit_is_not_read() -> None:
    answer = ask(WholeBody(echo, 10, 1), headers={"content-length": "11"}, chunks=[])
    assert answer.status == 413
    assert "10 bytes" in answer.error["message"]


@pytest.mark.parametrize("headers", [{}, {"content-length": "5"}, {"content-length": "9" * 5000}])
def test_a_body_that_turns_out_too_large_is_refused(headers: dict[str, str]) -> None:
    app = WholeBody(echo, 10, 1)
    assert ask(app, headers=headers, chunks=[b"123456"] * 2, whole=False).status == 413


def test_half_a_body_is_a_408_after_a_time_and_the_connection_ends() -> None:
    answer = ask(WholeBody(echo, 10, 0.02), chunks=[b"123"], whole=False)
    assert answer.status == 408
    assert answer.answer_headers["connection"] == "close"


def test_a_client_that_disconnects_in_mid_body_ends_quietly() -> None:
    async def run() -> Exchange:
        exchange = Exchange(chunks=[b"123"], whole=False)
        exchange.leave()
        return await exchange.run(WholeBody(echo, 10, 1))

    assert asyncio.run(run()).messages == []


def test_the_app_still_receives_the_disconnect() -> None:
    heard: list[str] = []

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    async def run() -> None:
        exchange = Exchange()
        exchange.leave()
        await exchange.run(WholeBody(listen, 10, 1))

    asyncio.run(run())
    assert heard == ["http.request", "http.disconnect"]


# Admission


class Clock:
    """A simulated clock; its time is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Callers:
    """Requests that run until they are finished, behind an `Admission`."""

    def __init__(self, queued: Callable[[], int] = lambda: 0, **limits: Any):
        self.clock, self.streams, self.refused = Clock(), list[Stream](), list[int]()
        self.draining = False
        draining, refused = lambda: self.draining, self.refused.append
        self.app = Admission(self.stay, Limits(**limits), draining, queued, self.clock, refused)
        self.tasks = list[asyncio.Task[Exchange]]()

    async def stay(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams.append(Stream(num_chunks=1))
        await self.streams[-1](scope, receive, send)

    async def enter(self, key: str | None = None) -> Exchange:
        exchange = Exchange()

        async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
            record_of(scope).key = key
            await self.app(scope, receive, send)

        self.tasks.append(asyncio.create_task(exchange.run(keyed)))
        await exchange.until(1)
        return exchange

    async def finish_all(self) -> None:
        for stream in self.streams:
            stream.let.release()
        await asyncio.gather(*self.tasks)


def test_as_many_requests_are_admitted_as_may_be_in_flight() -> None:
    async def run() -> None:
        callers = Callers(max_in_flight=2)
        assert [(await callers.enter()).status for _ in range(3)] == [200, 200, 429]
        refused = await callers.enter()
        assert refused.error["code"] == "rate_limit_exceeded"
        assert "2 requests are in flight" in refused.error["message"]
        assert callers.refused == [429, 429]
        assert int(refused.answer_headers["retry-after"]) >= 1
        await callers.finish_all()
        assert callers.app.num_in_flight == 0
        assert (await callers.enter()).status == 200
        await callers.finish_all()

    asyncio.run(run())


def test_only_requests_that_cause_work_are_counted() -> None:
    async def run() -> None:
        callers = Callers(max_in_flight=1)
        await callers.enter()
        for path, method in [("/v1/models", "GET"), ("/health", "GET"), ("/api/show", "POST")]:
            exchange = Exchange(path, method)
            task = asyncio.create_task(exchange.run(callers.app))
            await exchange.until(1)
            assert exchange.status == 200
            callers.tasks.append(task)
        await callers.finish_all()

    asyncio.run(run())


def test_one_key_does_not_use_the_limit_of_another() -> None:
    async def run() -> None:
        callers = Callers(max_in_flight=10, max_in_flight_per_key=2)
        assert [(await callers.enter("a")).status for _ in range(3)] == [200, 200, 429]
        assert (await callers.enter("b")).status == 200
        await callers.finish_all()
        assert not callers.app._of_key

    asyncio.run(run())


def test_no_request_is_admitted_while_too_many_wait_in_the_engine() -> None:
    async def run() -> None:
        queue = [1]
        callers = Callers(lambda: queue[0], max_queue=2)
        assert (await callers.enter()).status == 200
        queue[0] = 2
        refused = await callers.enter()
        assert refused.status == 429
        assert "queue of waiting requests" in refused.error["message"]
        queue[0] = 0
        assert (await callers.enter()).status == 200
        await callers.finish_all()

    asyncio.run(run())


def test_a_failing_app_also_leaves_the_count_of_requests() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    app = Admission(fail, Limits(max_in_flight=1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ask(app)


def test_retry_after_is_when_the_next_request_should_be_admitted() -> None:
    clock = Clock()
    turns = Turns(clock)
    for _ in range(10):
        turns.ended(8.0)
    assert turns.next(4) == pytest.approx(2), "four of eight seconds each: one ends every two"
    assert turns.next(4) == pytest.approx(4), "the second free slot, because the first is promised"
    clock.now += 3
    assert turns.next(4) == pytest.approx(3)
    clock.now += 100
    assert turns.next(4) == pytest.approx(2), "old promises are past"
    assert max(turns.next(1) for _ in range(100)) == LONGEST_WAIT


def test_while_draining_new_work_is_refused_and_running_requests_continue() -> None:
    async def run() -> None:
        callers = Callers(drain_timeout=7.5, max_in_flight=1)
        running = await callers.enter()
        callers.draining = True
        refused = await callers.enter()
        assert refused.status == 503, "and no 429: no request will be admitted"
        assert refused.error["code"] == "server_draining"
        assert callers.refused == [503]
        assert refused.answer_headers["retry-after"] == "8"
        still = Admission(echo, Limits(), lambda: True)
        assert (await Exchange("/health", "GET").run(still)).status == 200
        await callers.finish_all()
        assert running.body == b"data: 0\n\n"

    asyncio.run(run())


# Timeouts


async def hang(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


def test_an_answer_that_does_not_come_in_time_is_a_504() -> None:
    answer = ask(Deadline(hang, 0.02))
    assert answer.status == 504
    assert "0.02 seconds" in answer.error["message"]
    assert answer.answer_headers["x-should-retry"] == "false"


@pytest.mark.parametrize("can_fail", [True, False])
def test_a_stream_that_takes_too_long_ends_with_its_own_error_and_frees_its_resources(
    can_fail: bool,
) -> None:
    stream = Stream()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if can_fail:
            set_failure(scope, lambda error: f"failed: {error.message}".encode())
        await stream(scope, receive, send)

    async def run() -> None:
        stream.let.release()
        answer = await Exchange().run(Deadline(app, 0.02))
        first, *last = answer.messages[1:]
        assert first["body"] == b"data: 0\n\n"
        assert [each["more_body"] for each in last] == [False] * can_fail
        assert all(b"failed: The request took longer than 0.02 s" in each["body"] for each in last)
        assert stream.freed

    asyncio.run(run())


def test_timely_answers_are_unchanged_and_an_apps_own_timeout_is_raised() -> None:
    async def slow_inside(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(0.01):
            await hang(scope, receive, send)

    assert ask(Deadline(echo, 5)).status == 200
    with pytest.raises(TimeoutError):
        ask(Deadline(slow_inside, 5))


# Ids and the log


class Lines(logging.Handler):
    """Stores the log lines that it receives, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        assert "\n" not in text
        self.lines.append(json.loads(text))


@pytest.fixture
def lines() -> Any:
    handler, logger = Lines(), logging.getLogger("tests.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def logged(app: ASGIApp, keys: ApiKeys = NO_KEYS, **limits: Any) -> MiddlewareStack:
    return MiddlewareStack(app, Limits(**limits), keys, logger=logging.getLogger("tests.access"))


@pytest.mark.parametrize("given", ["abc-1.2_3:4", "x" * 128])
def test_a_valid_request_id_is_kept(given: str) -> None:
    answer = ask(guarded(echo), headers={"x-request-id": given})
    assert answer.answer_headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", 'a"b', "naïve", "a\x1b[31m"])
def test_an_invalid_request_id_is_replaced_by_the_servers(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    one, two = (ask(guarded(echo), headers=headers).answer_headers for _ in range(2))
    assert one["x-request-id"].startswith("req-")
    assert one["x-request-id"] != two["x-request-id"]


def test_a_line_reports_the_outcome_of_a_request(lines: list[dict[str, Any]]) -> None:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.model, record.prompt_tokens, record.completion_tokens = "tiny", 3, 5
        await echo(scope, receive, send)

    keys = ApiKeys(["opensesame"])
    answer = ask(
        logged(route, keys),
        headers={"authorization": "Bearer opensesame"},
        chunks=[b"a secret of mine"],
    )
    (line,) = lines
    assert line.pop("time").startswith("20")
    assert 0 <= line.pop("first_byte_seconds") <= line.pop("seconds") < 1
    assert line == {
        "id": answer.answer_headers["x-request-id"],
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "bytes": len(b"a secret of mine"),
        "client": "192.0.2.7",
        "key": keys.name_of(b"opensesame"),
        "model": "tiny",
        "prompt_tokens": 3,
        "cached_tokens": None,
        "completion_tokens": 5,
        "aborted": False,
    }
    assert "secret" not in str(lines)
    assert "opensesame" not in str(lines)


def test_refusals_have_an_id_and_a_line_too(lines: list[dict[str, Any]]) -> None:
    app = logged(echo, ApiKeys(["one"]), max_body_bytes=10)
    key = {"authorization": "Bearer one"}
    for request, status in [
        ({"headers": {}}, 401),
        ({"headers": key, "chunks": [b"x" * 11]}, 413),
    ]:
        answer = ask(app, **request)  # type: ignore[arg-type]
        assert answer.status == status
        assert answer.answer_headers["x-request-id"] == lines[-1]["id"]
        assert lines[-1]["status"] == status
        assert lines[-1]["bytes"] == len(answer.body)


def test_a_line_cannot_be_forged_by_a_path(lines: list[dict[str, Any]]) -> None:
    ask(logged(echo), "/a\n{}\x1b" + "x" * 5000, method="GET")
    assert lines[0]["path"].startswith("/a\n{}\x1bx")
    assert len(lines[0]["path"]) == 200


def test_the_log_records_disconnects_and_errors(lines: list[dict[str, Any]]) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def run() -> None:
        stream = Stream()
        exchange = Exchange()
        task = asyncio.create_task(exchange.run(logged(until_left(stream))))
        stream.let.release()
        await exchange.until(2)
        exchange.leave()
        await task
        assert stream.freed

    asyncio.run(run())
    assert lines[0]["aborted"]
    assert lines[0]["bytes"] == len(b"data: 0\n\n")
    with pytest.raises(ZeroDivisionError):
        ask(logged(fail))
    assert lines[1]["aborted"]
    assert lines[1]["status"] == 200


def until_left(stream: Stream) -> ASGIApp:
    """Return a route that ends its stream when the client disconnects, as a server's does."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(stream(scope, receive, send))
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    return route


# All together


def test_a_stream_passes_through_all_middleware_chunk_by_chunk() -> None:
    async def run() -> None:
        stream = Stream()
        app = guarded(
            stream, ApiKeys(["one"]), cors_origins=("http://a.example",), max_in_flight_per_key=1
        )
        headers = {"authorization": "Bearer one", "origin": "http://a.example"}
        exchange = Exchange(headers=headers)
        task = asyncio.create_task(exchange.run(app))
        await exchange.until(1)
        for number in range(3):
            assert len(exchange.messages) == 1 + number, "the next is not made yet"
            stream.let.release()
            await exchange.until(2 + number)
            assert exchange.messages[1 + number]["body"] == b"data: %d\n\n" % number
        await task

    asyncio.run(run())


def test_a_page_may_call_from_its_own_origin_alone() -> None:
    app = guarded(echo, ApiKeys(["one"]), cors_origins=("http://a.example",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-any"}
    leave = ask(app, method="OPTIONS", headers={"origin": "http://a.example", **asked})
    assert leave.status == 200, "without a key: browsers send none here"
    assert leave.answer_headers["access-control-allow-origin"] == "http://a.example"
    assert leave.answer_headers["access-control-allow-headers"] == "x-any"
    other = ask(app, method="OPTIONS", headers={"origin": "http://b.example", **asked})
    assert "access-control-allow-origin" not in other.answer_headers
    refused = ask(app, headers={"origin": "http://a.example"})
    assert refused.status == 401
    assert refused.answer_headers["access-control-allow-origin"] == "http://a.example"
    plain = ask(guarded(echo), headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in plain.answer_headers


def test_a_limit_per_key_needs_keys() -> None:
    with pytest.raises(OptionError, match="needs API keys"):
        guarded(echo, max_in_flight_per_key=3)


def test_what_is_not_http_goes_straight_to_the_app() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def run() -> None:
        exchange = Exchange()
        await guarded(app, ApiKeys(["one"]))({"type": "lifespan"}, exchange.inbox.get, print)  # type: ignore[arg-type]

    asyncio.run(run())
    assert seen == ["lifespan"]
