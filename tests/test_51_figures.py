"""Chapter 51's figures show the given numbers."""

import pytest

from minigen_course.ch51_server.figures import arrivals, tokens_after_disconnect


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
