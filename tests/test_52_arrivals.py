"""Arrivals, lengths and prompts of a load: correctly distributed, and reproducible by a seed."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from minigen.bench.serve import RequestMix
from minigen.bench.workload import (
    WORDS,
    Arrival,
    Span,
    burst,
    constant,
    draw_words,
    plan,
    plan_with,
    poisson,
    read_prompts,
    read_trace,
)
from minigen.errors import LoadError, OptionError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("rate", [0.5, 4.0, 250.0])
def test_gaps_of_poisson_arrivals_are_exponentially_distributed(rate: float) -> None:
    times = poisson(rate, 20_001, rng(5))
    assert times[0] == 0
    assert times == sorted(times)
    assert np.mean(gaps(times)) == pytest.approx(1 / rate, rel=0.03)
    assert stats.kstest(gaps(times), "expon", args=(0, 1 / rate)).pvalue > 0.01


def test_counts_of_poisson_arrivals_have_a_variance_equal_to_their_mean() -> None:
    times = np.array(poisson(10, 50_000, rng(2)))
    counts = np.bincount(times.astype(int))[:-1]
    assert np.mean(counts) == pytest.approx(10, rel=0.03)
    assert np.var(counts) == pytest.approx(10, rel=0.06)  # it would be 0 for a constant load


def test_the_same_seed_draws_the_same_arrivals() -> None:
    assert poisson(4, 50, rng(1)) == poisson(4, 50, rng(1)) != poisson(4, 50, rng(2))


def test_constant_arrivals_and_bursts() -> None:
    assert constant(4, 5) == [0, 0.25, 0.5, 0.75, 1]
    assert burst(3) == [0, 0, 0]
    assert poisson(4, 1, rng()) == constant(4, 1) == burst(1) == [0]


def test_a_span_of_tokens_is_drawn_evenly_with_both_of_its_ends() -> None:
    generator = rng(3)
    drawn = [Span(3, 6).draw(generator) for _ in range(4000)]
    assert set(drawn) == {3, 4, 5, 6}
    assert min(np.bincount(drawn)[3:]) > 900
    assert (Span.parse("x", " 64 "), Span.parse("x", "3-6")) == (Span(64, 64), Span(3, 6))
    for wrong in ("", "0", "9-3", "a", "-4", "3-", "1e3", "99999999999"):
        with pytest.raises(OptionError, match="--output-tokens must be a number of tokens"):
            Span.parse("output-tokens", wrong)


def trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines),
        encoding="utf-8",
    )
    return path


def request(timestamp: object = 0, **others: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 5, "output_length": 7, **others}


def test_a_trace_is_read_from_its_first_request_on(tmp_path: Path) -> None:
    path = trace(tmp_path, request(27_000), "", request(27_500, input_length=600, hash_ids=[1, 2]))
    assert read_trace(path) == [Arrival(0, 5, 7), Arrival(0.5, 600, 7, (1, 2))]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ({"timestamp": 1, "input_length": 5}, "output_length must be a number of tokens"),
        (request("now"), "timestamp must be milliseconds"),
        (request(True), "timestamp must be milliseconds"),
        (request(-1), "timestamp must be milliseconds"),
        (request(float("nan")), "timestamp must be milliseconds"),
        (request(1, input_length=0), "input_length must be a number of tokens"),
        (request(1, output_length=2.5), "output_length must be a number of tokens"),
        (request(1, hash_ids=["a"]), "hash_ids must be a list of whole numbers"),
        (request(1, model="gpt"), "'model' is not a field of a trace"),
    ],
)
def test_a_broken_trace_is_one_sentence_that_names_the_line(
    tmp_path: Path, broken: object, said: str
) -> None:
    path = trace(tmp_path, request(0), request(0), broken)
    with pytest.raises(LoadError, match=f"line 3: {said}") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_missing_empty_binary_or_out_of_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(LoadError, match="has no requests"):
        read_trace(trace(tmp_path, ""))
    with pytest.raises(LoadError, match="request 3 has an earlier timestamp than the one above"):
        read_trace(trace(tmp_path, request(0), request(9), request(8)))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(LoadError, match="cannot be read"):
        read_trace(tmp_path / "binary.jsonl")


def test_prompts_have_the_requested_lengths_and_share_no_prefix() -> None:
    planned = plan([Arrival(number, 40, 9) for number in range(50)], seed=4)
    assert [each.at for each in planned] == list(range(50))
    assert {each.output_tokens for each in planned} == {9}
    texts = [str(each.prompt) for each in planned]
    assert all(len(text.split()) == 40 for text in texts)
    assert len({text[:40] for text in texts}) == 50
    assert planned == plan([Arrival(number, 40, 9) for number in range(50)], seed=4)
    assert texts != [each.prompt for each in plan([Arrival(0, 40, 9)] * 50, seed=5)]
    assert len(set(WORDS)) == len(WORDS) > 200
    assert set(draw_words(4000, rng()).split()) > set(WORDS[:50])


def test_requests_of_a_trace_with_equal_hashes_share_a_prefix_and_then_differ() -> None:
    arrivals = [
        Arrival(0, 1100, 1, (7, 8)),
        Arrival(1, 1100, 1, (7, 8)),
        Arrival(2, 600, 1, (7, 9)),
    ]
    one, two, three = (str(each.prompt).split() for each in plan(arrivals, seed=0))
    assert (len(one), len(two), len(three)) == (1100, 1100, 600)
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:]
    assert one[:512] == three[:512]
    assert one[512:600] != three[512:600]


def test_a_files_prompts_are_used_in_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo words\n", encoding="utf-8")
    assert read_prompts(path) == ["one", "two words"]
    planned = plan_with([Arrival(number, 1, 5) for number in range(3)], read_prompts(path))
    assert [each.prompt for each in planned] == ["one", "two words", "one"]
    messages = [{"role": "user", "content": "hi"}]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        json.dumps({"prompt": "p"}) + "\n" + json.dumps({"messages": messages}), encoding="utf-8"
    )
    assert read_prompts(lines) == ["p", messages]
    for broken, said in (("{", "not JSON"), ("[]", "needs"), ('{"prompt": ""}', "needs")):
        lines.write_text('{"prompt": "p"}\n' + broken, encoding="utf-8")
        with pytest.raises(LoadError, match=f"line 2: .*{said}"):
            read_prompts(lines)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(LoadError, match="no prompts"):
        read_prompts(path)
    with pytest.raises(LoadError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.txt")


def test_a_line_ends_at_a_line_feed_alone_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028two\x0cthree\x85\r\nfour\n".encode())
    assert read_prompts(path) == ["one\u2028two\x0cthree\x85", "four"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_bytes('\ufeff{"prompt": "one\u2028two"}\n'.encode())
    assert read_prompts(lines) == ["one\u2028two"]
    arrivals = tmp_path / "trace.jsonl"
    arrivals.write_bytes(f"\ufeff{json.dumps(request())}\r\n".encode())
    assert len(read_trace(arrivals)) == 1


def test_json_that_python_cannot_hold_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for text, said in (("[" * 100_000, "nested too deeply"), (f"[{'1' * 5000}]", "4300 digits")):
        path.write_text(text, encoding="utf-8")
        for read in (read_prompts, read_trace):
            with pytest.raises(LoadError, match=f"line 1: .*{said}"):
                read(path)


def test_each_hash_has_its_own_block_also_if_it_is_negative() -> None:
    plus, minus = (Arrival(0, 20, 1, (each,)) for each in (5, -5))
    one, two = plan([plus, minus], 0)
    assert one.prompt != two.prompt


def asked(**options: object) -> RequestMix:
    nothing = dict.fromkeys(("rate", "requests", "input_tokens", "output_tokens", "dataset"))
    return RequestMix(**{"arrivals": "poisson", **nothing, "seed": 0, **options})  # type: ignore[arg-type]


def test_options_of_a_load_become_its_requests(tmp_path: Path) -> None:
    planned = asked(rate=50.0, requests=400, input_tokens="8-12", output_tokens="3").plan("chat")
    assert len(planned) == 400
    assert planned[-1].at == pytest.approx(8, rel=0.2)
    assert {len(str(each.prompt).split()) for each in planned} == {8, 9, 10, 11, 12}
    assert {each.output_tokens for each in planned} == {3}
    assert len(asked().plan("completions")) == 200
    assert [each.at for each in asked(arrivals="constant", requests=3).plan("chat")] == [
        0,
        0.25,
        0.5,
    ]
    path = trace(tmp_path, request(0), request(100), request(200))
    assert [each.at for each in asked(arrivals=str(path), requests=2).plan("chat")] == [0, 0.1]
    for load, words in (
        (asked(rate=2.0), "poisson arrivals, 2 per second"),
        (asked(arrivals="burst"), "all at once"),
        (asked(arrivals="t.jsonl"), "as in t.jsonl"),
    ):
        assert load.words() == words


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    messages, path = tmp_path / "chats.jsonl", trace(tmp_path, request())
    messages.write_text('{"messages": [{"role": "user", "content": "hi"}]}', encoding="utf-8")
    for wrong, said in (
        ({"arrivals": "sometimes"}, "--arrivals must be poisson, constant, burst"),
        ({"arrivals": "burst", "rate": 3.0}, "leave --rate out"),
        ({"arrivals": "t.jsonl", "rate": 3.0}, "A trace sets the times"),
        ({"arrivals": "t.jsonl", "input_tokens": "4"}, "A trace sets the times"),
        ({"rate": 0.0}, "--rate must be more than 0"),
        ({"rate": float("nan")}, "--rate must be more than 0"),
        ({"rate": 1e6}, "less than 1,000,000 requests per second, not 1e"),
        ({"arrivals": "t.jsonl", "dataset": messages}, "leave --dataset out"),
        ({"arrivals": str(path), "requests": 2}, "--requests 2 is more than the 1 requests"),
        ({"dataset": messages, "input_tokens": "4"}, "leave --input-tokens out"),
        ({"dataset": messages}, "need --endpoint chat"),
        ({"input_tokens": "x"}, "--input-tokens must be a number"),
    ):
        with pytest.raises(OptionError, match=said):
            asked(**wrong).plan("completions")
    assert len(asked(dataset=messages, requests=3).plan("chat")) == 3
