"""Runs over time are played step by step, and watched while they run."""

import asyncio
import base64
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ipywidgets
import pytest
from ipywidgets.widgets.widget import _instances
from matplotlib.figure import Figure

from minigen.trace.events import Event, EventKind, Trace
from minigen_course.figures import explore as explore_module
from minigen_course.figures import explore as replay_module
from minigen_course.figures.explore import MOST_OF_THE_TIME, WIDGET, Player, png, replay, watch
from minigen_course.figures.style import figure


class Shown(list[dict[str, Any]]):
    """The objects that a notebook would display, and the updates of the display."""

    def display(self, data: dict[str, Any], raw: bool, display_id: bool = False) -> "Shown":
        self.append(data)
        return self

    def update(self, data: dict[str, Any], raw: bool) -> None:
        self.append(data)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    found = Shown()
    monkeypatch.setattr(explore_module, "display", found.display)
    monkeypatch.setattr(replay_module, "display", found.display)
    return found


def bar(step: int, width: float = 1.0) -> Figure:
    made, axes = figure(2, 2)
    axes.bar(0, step, width)
    return made


def twin(shown: Shown) -> bytes:
    return base64.b64decode(shown[-1]["image/png"])


def children(shown: Shown) -> Any:
    return _instances[shown[-1][WIDGET]["model_id"]].children


def test_a_replay_starts_at_its_last_step_and_its_slider_draws_others(shown: Shown) -> None:
    replay(bar, 5, "a bar that grows")
    player, _, image = children(shown)
    assert image.value == twin(shown) == png(bar(4))
    player.slider.value = 2
    assert image.value == png(bar(2))
    assert twin(shown) == png(bar(4))


def test_the_step_of_the_picture_can_be_chosen_and_there_may_be_more_controls(
    shown: Shown,
) -> None:
    replay(bar, 5, "a bar that grows", at=3, width=(0.1, 1.0, 0.1, 0.5))
    player, width, _, image = children(shown)
    assert twin(shown) == png(bar(3, 0.5))
    player.slider.value, width.value = 1, 0.2
    assert image.value == png(bar(1, 0.2))
    assert shown[-1]["text/plain"] == "a bar that grows"


def test_button_and_slider_have_the_same_steps_and_are_linked_in_the_browser() -> None:
    player = Player(7, at=3)
    play, slider = player.children
    assert [(each.min, each.max, each.value) for each in (play, slider)] == [(0, 6, 3)] * 2
    links = [
        each
        for each in list(_instances.values())
        if isinstance(each, ipywidgets.widgets.widget_link.Link) and each.source[0] is play
    ]
    assert [each.target for each in links] == [(slider, "value")]


@pytest.mark.parametrize(("num_steps", "at"), [(0, None), (3, 3), (3, -1)])
def test_a_step_that_does_not_exist_is_refused(num_steps: int, at: int | None) -> None:
    with pytest.raises(ValueError, match="no step"):
        replay(bar, num_steps, "nothing", at=at)


def test_steps_that_come_faster_than_they_are_drawn_are_skipped(shown: Shown) -> None:
    drawn = []

    def draw(step: int) -> Figure:
        drawn.append(step)
        return bar(step)

    async def notebook() -> None:
        replay(draw, 100, "a bar", at=0)
        (player, _, _) = children(shown)

        def play() -> None:
            for step in range(1, 100):
                player.slider.value = step

        playing = threading.Thread(target=play)
        playing.start()
        playing.join()
        await asyncio.sleep(0.01)

    asyncio.run(notebook())
    assert drawn == [0, 99]


def step_of(trace: Trace, duration_ns: int = 1) -> None:
    trace.emit(EventKind.NEW_TOKEN, 1, token=5)
    trace.emit(EventKind.STEP, sequences=1, tokens=1, duration_ns=duration_ns)


@dataclass
class Clock:
    """A simulated clock set by hand, so that a busy machine makes no drawing slow."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return clock


def test_a_watched_run_is_drawn_from_its_events_and_its_last_picture_stays(
    shown: Shown, clock: Clock
) -> None:
    trace, drawn = Trace(), []

    def draw(events: list[Event]) -> Figure:
        drawn.append(len(events))
        return bar(len(events))

    with watch(trace, draw, "a bar", every=0.0) as events:
        assert twin(shown) == png(bar(0))
        for _ in range(2):
            step_of(trace)
    assert drawn == [0, 2, 4, 4]
    assert len(events) == 4
    assert twin(shown) == png(bar(len(events)))
    assert shown[0][WIDGET] == shown[-1][WIDGET]
    assert shown[0]["text/plain"] == shown[-1]["text/plain"] == "a bar"
    assert not trace.active


def test_a_picture_that_takes_long_is_drawn_less_often(shown: Shown, clock: Clock) -> None:
    trace, started_ns, drawing_ns, step_ns = Trace(), [], 10_000_000, 1_000_000

    def draw(events: list[Event]) -> Figure:
        started_ns.append(clock.now_ns)
        clock.now_ns += drawing_ns
        return bar(1)

    with watch(trace, draw, "a bar", every=0.0):
        for _ in range(400):
            clock.now_ns += step_ns
            step_of(trace)
        while_it_ran = started_ns[:]
    pause_ns = drawing_ns / MOST_OF_THE_TIME
    assert len(while_it_ran) == 1 + 400 * step_ns // pause_ns
    for started, again in pairwise(while_it_ran):
        assert pause_ns <= again - (started + drawing_ns) < pause_ns + step_ns


def test_it_is_drawn_between_steps_and_at_a_limited_rate(shown: Shown) -> None:
    trace, drawn = Trace(), []

    def draw(events: list[Event]) -> Figure:
        drawn.append(list(events))
        return bar(1)

    with watch(trace, draw, "a bar", every=1000.0):
        for _ in range(50):
            step_of(trace)
    assert [len(each) for each in drawn] == [0, 100]


def test_an_error_of_drawing_is_a_sentence_and_does_not_stop_the_engine(shown: Shown) -> None:
    trace = Trace()

    def draw(events: list[Event]) -> Figure:
        raise ValueError("There is nothing to <see>.")

    with watch(trace, draw, "nothing", every=0.0) as events:
        step_of(trace)
    assert len(events) == 2
    sentence, _ = children(shown)
    assert sentence.value == "<b>⚠ There is nothing to &lt;see&gt;.</b>"
    assert "image/png" not in shown[-1]


def test_a_run_that_fails_is_still_drawn_to_its_end(shown: Shown) -> None:
    trace = Trace()

    def run() -> None:
        with watch(trace, lambda events: bar(len(events)), "a bar"):
            step_of(trace)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    assert twin(shown) == png(bar(2))
    assert not trace.active
