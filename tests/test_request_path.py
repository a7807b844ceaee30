"""The way of a request from `LLM.generate` to its token is short, and is drawn by running it."""

import re
import subprocess
import sys

import pytest

from tools.chapters import ROOT
from tools.request_path import MARKS, PAGE

ROOMS = [
    *("llm", "engine.request_processor", "engine.dispatcher", "engine.engine"),
    "engine.model_runner",
]


@pytest.fixture(scope="module")
def drawing() -> str:
    """Return the drawing, made in a process without the tests' checks of types."""
    command = [sys.executable, "-m", "tools.request_path"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


def participants(drawing: str) -> dict[str, str]:
    return dict(re.findall(r"^    participant (\w+) as (.+)$", drawing, re.MULTILINE))


def arrows(drawing: str) -> list[tuple[str, str]]:
    return re.findall(r"^    (\w+)->>(\w+): \S", drawing, re.MULTILINE)


def test_a_request_passes_five_modules_on_the_way_to_its_token(drawing: str) -> None:
    numbered = [each for each in participants(drawing).values() if each[0].isdigit()]
    assert numbered == [f"{number} {name}" for number, name in enumerate(ROOMS, start=1)]


def test_the_architecture_page_shows_the_drawing(drawing: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"{MARKS[0]}\n```mermaid\n{drawing}```\n{MARKS[1]}" in page, (
        "run python -m tools.request_path --write"
    )


def test_no_call_leads_back_to_an_earlier_room(drawing: str) -> None:
    names = {key: name.split()[-1] for key, name in participants(drawing).items()}
    calls = [(names[caller], names[called]) for caller, called in arrows(drawing)]
    both = [(caller, called) for caller, called in calls if {caller, called} <= set(ROOMS)]
    assert len(set(both)) == len(ROOMS) - 1
    assert all(ROOMS.index(caller) < ROOMS.index(called) for caller, called in both)


def test_the_drawing_shows_all_four_calls_of_a_step_and_only_known_modules(drawing: str) -> None:
    assert drawing.startswith("sequenceDiagram\n")
    assert {name for arrow in arrows(drawing) for name in arrow} == participants(drawing).keys()
    step = drawing[drawing.index("llm: a step") : drawing.index("llm: out")]
    for call in ("engine_scheduler: schedule, commit", "engine_model_runner: logits", "sampling: "):
        assert f"engine_engine->>{call}" in step


LONGER = """
import types
from minigen.engine.engine import Engine
from tools.request_path import record

room = types.ModuleType("minigen.engine.detour")
exec("step = lambda engine: real(engine)", vars(room))
room.real, Engine.step = Engine.step, room.step
print(*record().rooms)
"""


def test_a_module_more_on_the_way_is_a_room_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LONGER], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    assert set(done.stdout.split()) == {*ROOMS, "engine.detour"}


HTTP_IN = [
    *("server.replies", "server.openai.routes", "llm", "engine.request_processor"),
    *("engine.dispatcher", "engine.engine"),
]
HTTP_BACK = ["engine.dispatcher", "outputs", "server.replies"]


def test_a_request_over_http_passes_six_modules_and_its_token_three() -> None:
    command = [sys.executable, "-m", "tools.http_path"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"in: {', '.join(HTTP_IN)}\nback: {', '.join(HTTP_BACK)}\n"
