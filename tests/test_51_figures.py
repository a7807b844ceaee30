"""Chapter 51's figures show the given numbers."""

import pytest

from minigen_course.ch51_server.figures import (
    LANES,
    PATH,
    arrivals,
    health_checks,
    request_path,
    tokens_after_disconnect,
)


def test_a_row_has_a_tick_for_each_event_of_its_stream() -> None:
    (axes,) = arrivals([[0.1, 0.2, 0.3], [0.2, 0.4]]).axes
    ticks = [each.get_positions() for each in axes.collections]
    assert [list(each) for each in ticks] == [[0.1, 0.2, 0.3], [0.2, 0.4]]
    assert [bar.get_width() for bar in axes.patches] == [0.1, 0.2]
    assert axes.get_title(loc="left") == "2 streams, 12 events per second"
    with pytest.raises(ValueError, match="no events with text"):
        arrivals([[0.1], []])


def test_bars_show_tokens_that_were_read_and_tokens_in_vain() -> None:
    (axes,) = tokens_after_disconnect({"forgetful": (5, 120), "careful": (5, 6)}).axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        *((0, 5), (5, 115)),
        *((0, 5), (5, 1)),
    ]
    assert "Up to 115 tokens" in axes.get_title(loc="left")


def test_a_requests_path_goes_down_to_the_engine_and_back_to_the_client() -> None:
    (axes,) = request_path().axes
    texts = [each.get_text() for each in axes.texts]
    assert set(LANES) <= set(texts)
    assert {text for *_, what, waits in PATH for text in (what, waits)} <= set(texts)
    lanes = [lane for _, lane, *_ in PATH]
    assert (lanes[0], max(lanes), lanes[-1]) == (0, 3, 0)
    assert len(axes.patches) == len(PATH), "one box each"


def test_a_look_at_health_is_a_bar_and_the_longest_is_named() -> None:
    (axes,) = health_checks({"naive": [(0, 0.5)], "threads": [(0, 0.01), (0.02, 0.05)]}).axes
    bars = [(bar.get_x(), round(bar.get_width(), 3)) for bar in axes.patches]
    assert bars == [(0, 0.5), (0, 0.01), (0.02, 0.03)]
    texts = [each.get_text() for each in axes.texts]
    assert texts == ["answers: 1,\nlongest 500 ms", "answers: 2,\nlongest 30 ms"]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["naive", "threads"]
    assert axes.get_title(loc="left").endswith("the slowest took 500 ms")
    with pytest.raises(ValueError, match="no look"):
        health_checks({"naive": []})
