"""The results of a load: percentiles as in numpy and scipy, goodput as counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minigen.bench.figures import load_figure
from minigen.bench.report import Outcome, Slo, Spread, print_report, report
from minigen.cli.bench import serve
from minigen.errors import OptionError
from minigen.trace.summary import percentile


def outcome(arrived: float, first: float, gaps: list[float], **others: object) -> Outcome:
    """Return a request whose first text came `first` after sending, and then one token per gap."""
    times = tuple(np.cumsum([arrived + first, *gaps]).tolist())
    known = {"output_tokens": len(times), "prompt_tokens": 5, "has_usage": True, **others}
    return Outcome(arrived, arrived, times[-1], times, **known)  # type: ignore[arg-type]


def failed(arrived: float, ended: float, kind: str = "HTTP 429", detail: str = "") -> Outcome:
    return Outcome(arrived, arrived, ended, error=kind, detail=detail)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_a_spread_equals_scipys_and_minigens_own_percentiles(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.max == max(values)
    for share in (50, 90, 95, 99):
        found = getattr(spread, f"p{share}")
        assert found == pytest.approx(stats.scoreatpercentile(values, share), rel=1e-9, abs=1e-12)
        assert found == pytest.approx(percentile(values, share / 100), rel=1e-9, abs=1e-12)


def test_an_empty_sample_has_no_spread() -> None:
    assert Spread.of([]) is None


def test_a_requests_times_start_when_it_was_due() -> None:
    late = Outcome(
        arrived=10.0, sent=10.4, ended=12.0, text_times=(11.0, 11.25, 11.75), output_tokens=7
    )
    assert late.ttft == 1.0
    assert late.e2e == 2.0
    assert late.gaps == [0.25, 0.5]  # from event to event
    assert late.tpot == 0.125  # 0.75 s for the 6 tokens after the first
    one = Outcome(arrived=0, sent=0, ended=1, text_times=(1,), output_tokens=1)
    assert (one.gaps, one.tpot) == ([], None)
    assert failed(0, 1).ttft is None


def test_objectives_are_read_with_their_units() -> None:
    assert Slo.parse("ttft=500ms") == Slo("ttft", 0.5)
    assert Slo.parse(" e2e = 5s ") == Slo("e2e", 5.0)
    assert Slo.parse("tpot=12.5ms") == Slo("tpot", 0.0125)
    for wrong in ("ttft", "ttft=5", "ttft=0ms", "p99=5ms", "itl=-5ms", "itl=5min", "itl>5ms", ""):
        with pytest.raises(OptionError, match="--slo must be a latency"):
            Slo.parse(wrong)


def test_a_request_meets_an_objective_or_not() -> None:
    steady = outcome(0, 0.5, [0.04] * 19 + [0.4])
    assert Slo("ttft", 0.5).is_met(steady)
    assert not Slo("ttft", 0.499).is_met(steady)
    assert Slo("itl", 0.06).is_met(steady)  # one gap in twenty may be longer
    assert not Slo("itl", 0.06).is_met(outcome(0, 0.5, [0.04] * 17 + [0.4] * 3))
    assert Slo("tpot", 0.06).is_met(steady)
    assert not Slo("tpot", 0.05).is_met(steady)
    assert Slo("e2e", 1.67).is_met(steady)
    assert not Slo("e2e", 1.65).is_met(steady)
    alone = outcome(0, 0.5, [])
    assert Slo("itl", 0.001).is_met(alone)
    assert Slo("tpot", 0.001).is_met(alone)
    assert not any(Slo(each, 100).is_met(failed(0, 1)) for each in ("ttft", "itl", "tpot", "e2e"))


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=50), st.floats(1e-3, 1))
def test_an_objective_for_gaps_is_one_for_the_p95_of_the_report(
    gaps: list[float], seconds: float
) -> None:
    request = outcome(0, 0.5, gaps)
    spread = Spread.of(request.gaps)
    assert spread is not None
    assert Slo("itl", seconds).is_met(request) == (spread.p95 <= seconds)


def test_the_help_says_which_gaps_meet_an_objective() -> None:
    assert serve.__doc__ is not None
    words = " ".join(serve.__doc__.split())
    assert "A request meets an ITL objective if the p95 of its gaps does." in words


def test_goodput_equals_a_count_by_hand() -> None:
    """Of six requests in 10 s, two fail, one starts slowly, one continues slowly: two are good."""
    outcomes = [
        outcome(0, 0.2, [0.1] * 4),
        outcome(1, 0.2, [0.1] * 4),
        outcome(2, 2.0, [0.1] * 4),
        outcome(3, 0.2, [0.1] * 3 + [6.5]),
        failed(4, 4.1),
        failed(5, 5.1, "stream cut off", "after 3 events"),
    ]
    found = report(outcomes, [Slo("ttft", 0.5), Slo("itl", 0.5)])
    assert found.seconds == pytest.approx(10.0)
    assert (found.num_requests, found.num_answered) == (6, 4)
    assert found.request_rate == pytest.approx(0.4)
    assert found.output_rate == pytest.approx(2.0)
    assert found.goodput == pytest.approx(0.2)
    assert found.met == {"ttft=0.5s": 3, "itl=0.5s": 3}
    assert found.errors == {"HTTP 429": 1, "stream cut off": 1}
    assert found.details["stream cut off"] == "after 3 events"
    assert found.tokens_per_event == 1
    assert found.ttft is not None
    assert found.ttft.mean == pytest.approx((0.2 * 3 + 2.0) / 4)
    assert found.itl is not None
    assert found.itl.max == pytest.approx(6.5)
    assert found.lateness is not None
    assert found.lateness.max == 0


def test_a_narrow_table_keeps_its_numbers_and_a_title_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    outcomes = [outcome(0, 12.5, [1.234] * 20)]
    print_report("model at http://host/[/b]", report(outcomes), True, 0.0)
    out = capsys.readouterr().out
    assert out.count("1,234") >= 8
    assert out.count("12,500") == 6
    assert "[/b]" in out
    assert "inter-token" in out


def test_a_load_that_failed_completely_still_has_a_report() -> None:
    found = report([failed(0, 1), failed(1, 3)])
    assert (found.num_answered, found.request_rate, found.goodput) == (0, 0, None)
    assert found.ttft is found.itl is found.tpot is found.e2e is found.tokens_per_event is None
    assert found.errors == {"HTTP 429": 2}
    assert found.as_dict()["requests_per_second"] == 0
    with pytest.raises(ValueError, match="no requests"):
        report([])


def test_events_of_several_tokens_are_distinguished_from_tokens() -> None:
    several = outcome(0, 1.0, [0.5, 0.5], output_tokens=9)
    found = report([several])
    assert found.tokens_per_event == 3
    assert found.output_tokens == 9
    assert found.tpot is not None
    assert found.tpot.p50 == pytest.approx(1 / 8)
    assert found.itl is not None
    assert found.itl.p50 == pytest.approx(0.5)


def test_the_figure_shows_every_request_and_its_objectives() -> None:
    outcomes = [outcome(number / 4, 0.2, [0.1, 0.3]) for number in range(9)]
    made = load_figure([*outcomes, failed(3, 3.5)], [Slo("ttft", 0.25), Slo("itl", 0.25)])
    first, gaps, requests = made.axes
    assert first.get_title(loc="left") == "Time to first token, 9 values"
    assert gaps.get_title(loc="left") == "Inter-token latency, 18 values"
    assert requests.get_title(loc="left") == "10 requests, by arrival"
    assert "100.0% within 250 ms" in first.texts[0].get_text()
    assert "50.0% within 250 ms" in gaps.texts[0].get_text()
    waits, streams = requests.collections
    assert len(waits.get_segments()) == len(streams.get_segments()) == 10
    assert waits.get_segments()[1].tolist() == [[0.25, 2], [pytest.approx(0.45), 2]]
    (crosses,) = requests.lines
    assert crosses.get_xydata().tolist() == [[3.5, 10]]


def test_a_figure_of_failures_alone_is_drawn_too() -> None:
    made = load_figure([failed(0, 1)])
    assert made.axes[0].get_title(loc="left") == "Time to first token, 0 values"
    made.draw_without_rendering()
