"""Draws an explorable for all chosen values of its controls; runs in a notebook's kernel.

The cell before a notebook's first one calls `install`. From then on `explore` works as before and
stores, for each figure that is wanted, its frames and what its controls offer.
"""

import io
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
from matplotlib.figure import Figure
from PIL import Image

from minigen_course.figures import explore as explorables

Grid = Mapping[str, int | list[Any]]  # control -> its values, or how many of them
NUM_COLOURS = 96
MOST_FRAMES = 150


def install(folder: str, grids: Mapping[str, Grid]) -> None:
    """Let `explore` store the frames of the figures that `grids` names, in folders by number."""
    show = explorables.explore

    def explore(draw: Callable[..., Any], caption: str, number: str = "", /, **given: Any) -> None:
        show(draw, caption, number, **given)
        if number in grids:
            _store(draw, given, grids[number], Path(folder) / number)

    explorables.explore = explore


def _store(draw: Callable[..., Any], given: Mapping[str, Any], grid: Grid, folder: Path) -> None:
    made = {name: explorables.control_of(name, each) for name, each in given.items()}
    unknown = set(grid) - set(made)
    if unknown:
        raise ValueError(f"Figure {folder.name} has no control named {', '.join(sorted(unknown))}.")
    values = {name: _values(made[name], wish) for name, wish in grid.items()}
    combinations = list(itertools.product(*(range(len(each)) for each in values.values())))
    if len(combinations) > MOST_FRAMES:
        raise ValueError(
            f"Figure {folder.name} would have {len(combinations)} frames, more than {MOST_FRAMES}."
        )
    fixed = {  # a button counts its presses
        name: 0 if isinstance(each, ipywidgets.Button) else each.value
        for name, each in made.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for chosen in combinations:
        settings = {name: values[name][at] for name, at in zip(values, chosen, strict=True)}
        path = folder / f"{'-'.join(map(str, chosen))}.png"
        path.write_bytes(_frame(draw(**fixed | settings)))
    controls = [
        {
            "name": name.replace("_", " "),
            "values": [_text(each) for each in values[name]],
            "at": values[name].index(made[name].value),
            "slider": not isinstance(made[name], ipywidgets.Dropdown),
        }
        for name in values
    ]
    (folder / "controls.json").write_text(json.dumps(controls), encoding="utf-8")


def _values(control: Any, wish: int | list[Any]) -> list[Any]:
    """Return the values to draw: those given, or about `wish` of them, spread over the control's.

    The value that the control has at first is always among them.
    """
    if isinstance(wish, list):
        offered = wish
    elif isinstance(control, ipywidgets.Dropdown):
        offered = list(control.options)[:wish]
    else:
        slider = getattr(control, "slider", control)
        steps = round((slider.max - slider.min) / slider.step)
        stride = max(1, -(-steps // (wish - 1)))
        offered = [
            round(slider.min + at * slider.step, 9) for at in [*range(0, steps, stride), steps]
        ]
    values = dict.fromkeys([*offered, control.value])
    return list(values) if isinstance(control.value, str) else sorted(values)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _frame(drawn: Any) -> bytes:
    """Return a figure, or the last of several, as a small PNG."""
    for figure in [drawn] if isinstance(drawn, Figure) else drawn:
        image = Image.open(io.BytesIO(explorables.png(figure)))
    small = io.BytesIO()
    image.convert("RGB").quantize(NUM_COLOURS).save(small, "PNG", optimize=True)
    return small.getvalue()
