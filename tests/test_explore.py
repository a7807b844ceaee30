"""Explorables redraw when moved, show a sentence for errors, and leave a picture behind."""

import asyncio
import base64
import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest
from ipywidgets.widgets.widget import _instances
from matplotlib.figure import Figure

from minigen_course.figures import explore as module
from minigen_course.figures.explore import WIDGET, explore, picture
from minigen_course.figures.style import figure, printable


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The objects that a notebook would display."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "display", lambda data, raw: found.append(data))
    return found


def box_of(shown: list[dict[str, Any]]) -> ipywidgets.VBox:
    found: ipywidgets.VBox = _instances[shown[-1][WIDGET]["model_id"]]
    return found


def bar(height: float, **_: Any) -> Figure:
    if height < 0:
        raise ValueError("A bar cannot be < 0 high.")
    made, axes = figure(2, 2)
    axes.bar(0, height)
    return made


def test_a_slider_redraws_the_picture(shown: list[dict[str, Any]]) -> None:
    explore(bar, "a bar", height=(-1, 5, 1, 2))
    slider, sentence, image = box_of(shown).children
    before = image.value
    slider.value = 4
    assert image.value != before
    assert sentence.value == ""


def test_an_error_is_a_sentence_above_the_last_picture(shown: list[dict[str, Any]]) -> None:
    explore(bar, "a bar", height=(-1.0, 5.0, 0.5, 2.0))
    slider, sentence, image = box_of(shown).children
    before = image.value
    slider.value = -0.5
    assert sentence.value == "<b>⚠ A bar cannot be &lt; 0 high.</b>"
    assert image.value == before
    slider.value = 1.0
    assert sentence.value == ""


def test_a_button_redraws_and_counts(shown: list[dict[str, Any]]) -> None:
    seen = []
    explore(lambda again: seen.append(again) or bar(again), "a bar", again=None)
    button = box_of(shown).children[0]
    button.click()
    button.click()
    assert seen == [0, 1, 2]


def test_a_draw_that_yields_shows_each_picture_as_it_comes(shown: list[dict[str, Any]]) -> None:
    drawn: list[int] = []

    def growing(again: int) -> Iterator[Figure]:
        for number in range(3):
            drawn.append(len(set(pictures)))
            yield bar(number + 1 + 10 * again)

    pictures: list[bytes] = []
    explore(growing, "caption", again=None)
    button, _, image = box_of(shown).children
    image.observe(lambda change: pictures.append(change["new"]), names="value")
    button.click()
    assert drawn == [0, 0, 0, 0, 1, 2]


def test_if_another_thread_moves_it_the_showing_thread_draws_the_last_values(
    shown: list[dict[str, Any]],
) -> None:
    drawn = []

    def draw(height: int) -> Figure:
        drawn.append((threading.current_thread(), height))
        return bar(height)

    async def notebook() -> None:
        explore(draw, "a bar", height=(0, 9, 1, 2))
        slider = box_of(shown).children[0]
        for ends in (5, 8):
            before = list(drawn)
            mover = threading.Thread(target=lambda to=ends: move(slider, to))
            mover.start()
            mover.join()  # this thread is as busy as in a cell
            assert drawn == before
            await asyncio.sleep(0.01)

    def move(slider: ipywidgets.IntSlider, ends: int) -> None:
        slider.value = ends - 1
        slider.value = ends

    asyncio.run(notebook())
    here = threading.current_thread()
    assert drawn == [(here, 2), (here, 5), (here, 8)]


def test_without_a_front_end_the_picture_replaces_it(shown: list[dict[str, Any]]) -> None:
    explore(bar, "a bar", height=(0, 5, 1, 2))
    picture(bar(2), "the same bar")
    widget, plain = shown
    assert widget["text/plain"] == "a bar"
    assert base64.b64decode(widget["image/png"]).startswith(b"\x89PNG")
    assert widget["image/png"] == plain["image/png"]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (True, ipywidgets.Checkbox),
        ("text", ipywidgets.Text),
        (["a", "b"], ipywidgets.Dropdown),
        ((0, 3, 1, 2), ipywidgets.IntSlider),
        ((0, 3, 0.5, 2), ipywidgets.FloatSlider),
        (ipywidgets.ToggleButtons(options=["x"]), ipywidgets.ToggleButtons),
    ],
)
def test_plain_values_become_controls(shown: list[dict[str, Any]], given: Any, kind: type) -> None:
    explore(lambda value: bar(1), "a bar", value=given)
    assert type(box_of(shown).children[0]) is kind


def test_a_value_without_a_control_is_named(shown: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="size: 7 stands for no control"):
        explore(bar, "a bar", size=7)


def test_tokens_are_labels_that_can_be_seen() -> None:
    assert printable([" a", "\n", "$x"]) == ["␣a", "⏎", r"\$x"]
