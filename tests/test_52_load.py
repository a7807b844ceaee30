"""The load generator against a server whose delays and faults are known."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minigen import __version__
from minigen.bench.client import Clock, Target, find_model, open_loop, send
from minigen.bench.report import Outcome
from minigen.bench.workload import Planned
from minigen.cli import bench as commands
from minigen.cli import main as cli
from minigen.errors import LoadError, OptionError
from tests.fake_openai import FakeOpenAI


def requests(*times: float, output_tokens: int = 4) -> list[Planned]:
    return [Planned(at, "three short words", output_tokens) for at in times]


def put(server: FakeOpenAI, load: list[Planned], **options: Any) -> list[Outcome]:
    """Send a load to the fake server; return the outcomes."""

    async def run() -> list[Outcome]:
        async with server.running() as url:
            target = Target(url, "fake", **options)
            async with target.session() as session:
                return await open_loop(
                    load, lambda request, clock: send(session, target, request, clock)
                )

    return asyncio.run(run())


def put_one(server: FakeOpenAI, **options: Any) -> Outcome:
    (outcome,) = put(server, requests(0.0), **options)
    return outcome


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_stream_is_timed_event_by_event_and_its_usage_is_trusted(endpoint: str) -> None:
    server, started = FakeOpenAI(wait=0.05, gap=0.02), time.perf_counter()
    outcome = put_one(server, endpoint=endpoint)
    assert outcome.error is None
    assert (outcome.output_tokens, len(outcome.text_times), outcome.has_usage) == (4, 4, True)
    assert (outcome.ttft or 0) >= 0.05
    assert all(gap >= 0.015 for gap in outcome.gaps)
    assert (outcome.ttft or 0) + sum(outcome.gaps) <= outcome.e2e <= time.perf_counter() - started
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"], body["stream"]) == ("fake", 4, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    if endpoint == "chat":
        assert body["messages"] == [{"role": "user", "content": "three short words"}]
        assert server.paths == ["/v1/chat/completions"]
    else:
        assert (body["prompt"], outcome.prompt_tokens) == ("three short words", 3)
        assert server.paths == ["/v1/completions"]


def test_an_event_of_several_tokens_is_one_event_and_several_tokens() -> None:
    outcome = put_one(FakeOpenAI(per_event=3))
    assert (len(outcome.text_times), outcome.output_tokens) == (2, 4)


def test_without_usage_events_are_counted_and_eos_stops_on_request() -> None:
    server = FakeOpenAI(usage=False)
    outcome = put_one(server, ignore_eos=False)
    assert (outcome.output_tokens, outcome.has_usage, outcome.error) == (4, False, None)
    assert "ignore_eos" not in server.bodies[0]


def test_usage_without_a_count_of_tokens_is_no_usage() -> None:
    outcome = put_one(FakeOpenAI(fault="no count", per_event=2))
    assert (outcome.output_tokens, outcome.has_usage, outcome.error) == (2, False, None)


@pytest.mark.parametrize("delta", ["content", "reasoning_content", "reasoning"])
def test_text_and_reasoning_are_timed_under_each_name_that_servers_have(delta: str) -> None:
    outcome = put_one(FakeOpenAI(delta=delta), endpoint="chat")
    assert (len(outcome.text_times), outcome.error) == (4, None)


def test_an_answer_that_ends_at_once_is_an_answer() -> None:
    (outcome,) = put(FakeOpenAI(fault="empty"), requests(0.0, output_tokens=1))
    assert (outcome.error, outcome.output_tokens, outcome.ttft) == (None, 1, None)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("429", "HTTP 429", "slow down"),
        ("cut", "stream cut off", "after 1 events"),
        ("torn", "stream cut off", "after 0 events"),
        ("gone", "connection lost", "Server disconnected"),
        ("html", "no event stream", "text/html"),
        ("broken", "no JSON in the stream", "not json"),
        ("deep", "no JSON in the stream", "[[["),
        ("error event", "error in the stream", "out of memory"),
        ("empty", "no text", "no text"),
        ("silent", "timed out", "after 0.1 s"),
    ],
)
def test_each_fault_is_an_error_of_its_kind(fault: str, kind: str, detail: str) -> None:
    timeout = 0.1 if fault == "silent" else 30
    outcome = put_one(FakeOpenAI(fault=fault), timeout=timeout)
    assert outcome.error == kind
    assert detail in outcome.detail
    assert len(outcome.detail) < 120
    assert "{" not in outcome.detail or kind == "no JSON in the stream"
    assert outcome.ended > 0


def test_a_stopped_server_refuses_the_connection() -> None:
    async def run() -> Outcome:
        async with FakeOpenAI().running() as url:
            pass
        target = Target(url, "fake")
        async with target.session() as session:
            return await send(session, target, requests(0.0)[0], time.perf_counter)

    outcome = asyncio.run(run())
    assert outcome.error == "connection refused"


def test_a_server_that_never_answers_does_not_stop_arrivals() -> None:
    sent: list[float] = []

    async def never(request: Planned, clock: Clock) -> Outcome:
        sent.append(clock())
        await asyncio.Event().wait()
        raise AssertionError("this request has no answer")

    async def run() -> None:
        load = requests(*(number / 200 for number in range(40)))
        async with asyncio.timeout(0.5):
            await open_loop(load, never)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert len(sent) == 40
    assert all(at >= number / 200 - 1e-3 for number, at in enumerate(sent))


def test_over_http_too_all_are_sent_before_the_first_is_answered() -> None:
    server = FakeOpenAI(fault="silent")
    outcomes = put(server, requests(*(number / 500 for number in range(30))), timeout=0.5)
    assert len(server.bodies) == 30
    assert {each.error for each in outcomes} == {"timed out"}
    assert max(each.sent for each in outcomes) < min(each.ended for each in outcomes)


def test_lateness_and_waiting_for_a_connection_count_from_the_arrival() -> None:
    server = FakeOpenAI(wait=0.1)
    outcomes = put(server, requests(0.0, 0.0, 0.0), max_connections=1)
    waits = sorted(each.ttft or 0 for each in outcomes)
    assert waits[1] >= 0.2
    assert waits[2] >= 0.3

    async def run() -> list[Outcome]:
        async def blocked(request: Planned, clock: Clock) -> Outcome:
            sent = clock()
            time.sleep(0.05)  # the loop can do nothing else
            return Outcome(request.at, sent, clock())

        return await open_loop(requests(0.0, 0.01, 0.02), blocked)

    lateness = [each.sent - each.arrived for each in asyncio.run(run())]
    assert lateness[1] > 0.03
    assert lateness[2] > 0.06


def found(server: FakeOpenAI, model: str = "", **options: Any) -> str:
    async def run() -> str:
        async with server.running() as url:
            target = Target(url + "/v1/", model, **options)
            async with target.session() as session:
                return await find_model(session, target)

    return asyncio.run(run())


def test_the_model_is_the_servers_only_one_or_the_requested_one() -> None:
    assert found(FakeOpenAI()) == "fake"
    assert found(FakeOpenAI(models=("a", "b")), "b") == "b"
    assert found(FakeOpenAI(key="k"), api_key="k") == "fake"
    with pytest.raises(LoadError, match="not list just one model: give --model with one of a, b"):
        found(FakeOpenAI(models=("a", "b")))
    assert found(FakeOpenAI(models=(5,))) == "5"
    assert found(FakeOpenAI(models=(None,)), "c") == "c"
    with pytest.raises(LoadError, match="no model 'c': give --model with one of a, b"):
        found(FakeOpenAI(models=("a", "b")), "c")
    with pytest.raises(LoadError, match=r"requires a key .* --api-key"):
        found(FakeOpenAI(key="k"))


def test_an_impossible_target_is_refused() -> None:
    assert Target("http://host:1").base == Target("http://host:1/v1/").base == "http://host:1/v1"
    for wrong, said in (
        ({"url": "localhost:8000"}, "--url must be like"),
        ({"url": "http://"}, "--url must be like"),
        ({"url": "http://host", "endpoint": "embeddings"}, "--endpoint must be completions or"),
        ({"url": "http://host", "timeout": 0.0}, "--timeout must be more than 0 seconds"),
        ({"url": "http://host", "timeout": float("inf")}, "and finite, not inf"),
        ({"url": "http://host", "api_key": "a\nb"}, "--api-key has a character"),
    ):
        with pytest.raises(OptionError, match=said):
            Target(**wrong)  # type: ignore[arg-type]


def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run `minigen bench ...` in this process; return exit status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["minigen", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_bench_serve_prints_a_table_and_writes_json_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, plot = tmp_path / "out.json", tmp_path / "out.png"
    load = ["--rate", "200", "--requests", "20", "--input-tokens", "3-6", "--output-tokens", "5"]
    slos = ["--slo", "ttft=30s", "--slo", "itl=0.001ms"]
    files = ["--json", str(numbers), "--plot", str(plot), "--api-key", "secret"]
    with FakeOpenAI(gap=0.002, key="secret").in_thread() as url:
        code, out, err = bench(*(monkeypatch, capsys), "serve", "--url", url, *load, *slos, *files)
    assert code == 0, err
    assert "fake at http://127.0.0.1" in out
    assert "poisson arrivals, 200 per second" in out
    assert "completed 20 of 20" in out
    assert (
        "goodput: 0.00 requests/s met every objective; met each: ttft=30s 20, itl=1e-06s 0" in out
    )
    assert "µs per token" in out
    assert "error" not in out
    found = json.loads(numbers.read_text("utf-8"))
    assert found["report"]["num_answered"] == 20
    assert found["report"]["output_tokens"] == 100
    assert 60 <= found["report"]["prompt_tokens"] <= 120
    assert len(found["requests"]) == 20
    assert all(len(each["text_times"]) == 5 for each in found["requests"])
    assert found["load"]["input_tokens"] == "3-6"
    assert "secret" not in numbers.read_text("utf-8")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_serve_reports_errors_by_kind_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeOpenAI(per_event=2, fault="every other 429")
    with server.in_thread() as url:
        code, out, _ = bench(
            *(monkeypatch, capsys, "serve", "--url", url, "--arrivals", "burst"),
            *("--requests", "8", "--output-tokens", "6", "--endpoint", "chat"),
        )
    assert code == 0
    assert "completed 4 of 8" in out
    assert "error: HTTP 429, 4 times (slow down)" in out
    assert "an event had 2.00 tokens on average" in out
    assert "goodput" not in out


def test_bench_serve_replays_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": at + 2, "output_length": 3})
            for at in (0, 10, 30)
        ),
        encoding="utf-8",
    )
    server = FakeOpenAI(usage=False)
    with server.in_thread() as url:
        code, out, _ = bench(monkeypatch, capsys, "serve", "--url", url, "--arrivals", str(trace))
    assert code == 0
    assert "the server sent no usage" in out
    assert [len(body["prompt"].split()) for body in server.bodies] == [2, 12, 32]
    assert [body["max_tokens"] for body in server.bodies] == [3, 3, 3]


def test_bench_serve_reports_a_mistake_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeOpenAI(fault="429").in_thread() as url:
        gone = url
        wrongs = [
            (("--url", url, "--requests", "3", "--arrivals", "burst"), "of 3 requests succeeded"),
            (("--url", url, "--slo", "fast"), "--slo must be a latency"),
            (("--url", url, "--json", str(tmp_path / "no" / "x.json")), "folder does not exist"),
            (("--url", url, "--model", "other"), "no model 'other'"),
            (("--url", "nowhere"), "--url must be like"),
        ]
        for arguments, said in wrongs:
            code, out, err = bench(monkeypatch, capsys, "serve", *arguments)
            (sentence,) = [line for line in err.splitlines() if line.startswith("minigen: ")]
            assert (code, out) == (1, "")
            assert said in sentence
            assert "Traceback" not in err
    code, _, err = bench(monkeypatch, capsys, "serve", "--url", gone)
    assert code == 1
    assert f"No server responds at {gone}: start one there (minigen serve)" in err


def test_bench_serve_prints_the_report_even_if_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeOpenAI().in_thread() as url:
        code, out, err = bench(
            *(monkeypatch, capsys, "serve", "--url", url, "--arrivals", "burst"),
            *("--requests", "3", "--json", "/dev/full"),
        )
    assert code == 1
    assert "completed 3 of 3" in out
    assert "--json /dev/full cannot be written: No space left on device." in err


def test_bench_never_replaces_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, link = tmp_path / "prompts.txt", tmp_path / "link"
    prompts.write_text("hello\n", encoding="utf-8")
    link.symlink_to(prompts)
    new, serve = str(tmp_path / "new"), ("serve", "--dataset", str(prompts))
    for arguments, said in (
        ((*serve, "--json", str(prompts)), "would replace the file of --dataset"),
        ((*serve, "--plot", str(link)), "would replace the file of --dataset"),
        ((*serve, "--json", new, "--plot", new), "would replace the file of --json"),
        ((*serve, "--json", str(tmp_path)), "cannot be written: it is a folder"),
        (("throughput", "--json", f"{new}/x.json"), "its folder does not exist"),
        (("latency", "--json", f"{new}/x.json"), "its folder does not exist"),
        (("--json", f"{new}/x.json"), "its folder does not exist"),
        (("--model", str(prompts), "--json", str(link)), "would replace the file of --model"),
    ):
        code, _, err = bench(monkeypatch, capsys, *arguments)
        assert (code, prompts.read_text("utf-8")) == (1, "hello\n")
        assert said in err


def test_bench_serve_without_its_libraries_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing, extra in (("aiohttp", "server"), ("matplotlib", "notebooks")):
        monkeypatch.setattr(
            commands, "find_spec", lambda name, missing=missing: None if name == missing else name
        )
        code, _, err = bench(monkeypatch, capsys, "serve", "--plot", "x.png")
        assert code == 1
        assert f"{missing} is not installed: pip install 'minigen[{extra}]'." in err


def test_bench_throughput_answers_all_requests_at_once(
    tiny_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers, model = tmp_path / "out.json", ["--model", str(tiny_directory)]
    load = ["--requests", "6", "--input-tokens", "4-9", "--output-tokens", "3"]
    code, out, err = bench(monkeypatch, capsys, "throughput", *model, *load, "--json", str(numbers))
    assert code == 0, err
    assert "6 requests at once" in out
    found = json.loads(numbers.read_text("utf-8"))
    assert (found["requests"], found["output_tokens"]) == (6, 18)
    assert 24 <= found["input_tokens"] <= 54
    assert found["requests_per_second"] == pytest.approx(6 / found["seconds"])
    assert found["minigen"] == __version__
    assert found["engine"]["model"] == f"llama, safetensors (F32), from {tiny_directory.name}"
    assert str(tiny_directory) not in numbers.read_text("utf-8")
    code, _, err = bench(monkeypatch, capsys, "throughput", *model, "--input-tokens", "4-900")
    assert code == 1
    assert "add up to 964 tokens, but this model's context holds 128" in err


def test_bench_latency_measures_one_request_after_the_other(
    tiny_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers, model = tmp_path / "out.json", ["--model", str(tiny_directory)]
    load = ["--turns", "3", "--input-tokens", "7", "--output-tokens", "4"]
    code, out, err = bench(monkeypatch, capsys, "latency", *model, *load, "--json", str(numbers))
    assert code == 0, err
    assert "one request alone, 3 times" in out
    assert "time to first token" in out
    seconds = json.loads(numbers.read_text("utf-8"))["seconds"]
    assert seconds["e2e"]["max"] >= seconds["ttft"]["max"] > 0
    assert seconds["itl"]["p50"] > 0
    rest = 3 * seconds["tpot"]["mean"]  # of four tokens
    assert seconds["e2e"]["mean"] == pytest.approx(seconds["ttft"]["mean"] + rest)
    assert seconds["tpot"]["mean"] == pytest.approx(seconds["itl"]["mean"])
    assert "speculation" not in out
    ngram = ["--speculative-config", '{"method": "ngram"}']
    code, out, err = bench(monkeypatch, capsys, "latency", *model, *load, *ngram)
    assert code == 0, err
    assert "with speculation, the tokens of one step arrive together" in out


def test_a_load_that_fills_the_context_is_warmed_up_within_it(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(tiny_directory), "--weights", "float32"]
    for few, num_in, num_out in (
        (["throughput", "--requests", "1"], 127, 1),
        (["latency", "--turns", "1"], 127, 1),
        (["--requests", "1", "--turns", "1"], 126, 2),
    ):
        lengths = ["--input-tokens", str(num_in), "--output-tokens", str(num_out)]
        code, _, err = bench(monkeypatch, capsys, *few, *model, *lengths)
        assert code == 0, err


def test_an_option_of_the_summary_before_a_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = bench(monkeypatch, capsys, "--requests", "3", "serve")
    assert code == 1
    assert "--requests cannot stand before 'serve'" in err


def test_a_load_is_measured_without_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import minigen.bench.{}"
    for module in ("serve", "offline", "client", "workload"):
        command = [sys.executable, "-c", code.format(module)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr


def test_help_does_not_import_packages_that_only_a_load_needs() -> None:
    heavy = ("aiohttp", "asyncio", "numpy", "matplotlib", "prometheus_client", "torch", "uvloop")
    asked = (
        f"import sys, minigen.cli.main; print([each for each in {heavy} if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, encoding="utf-8")
    assert done.stdout == "[]\n", done.stderr
