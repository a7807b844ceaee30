"""Arrivals run by a simulated clock, events become stories, and figures show their numbers."""

import ast
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from minigen import LLM, SamplingParams
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import PartError, RequestError
from minigen.sequence import ScheduledChunk
from minigen.sockets.resolve import find_part
from minigen.trace.events import EventKind
from minigen_course.ch24_scheduler.figures import gain, gains, spread, stutter
from minigen_course.ch24_scheduler.lesson import (
    ChunkingScheduler,
    PreemptingScheduler,
    SlotScheduler,
)
from minigen_course.figures.gantt import COLOURS, gantt
from minigen_course.figures.trace_views import (
    DECODE,
    MOST_CELLS,
    PREEMPTED,
    PREFILL,
    QUEUED,
    Part,
    Story,
    shown_places,
    slot_of,
    step_view,
    story,
)
from minigen_course.grading.save_part import save_part
from minigen_course.lab.cost_model import StepTime
from minigen_course.lab.simulator import Ask, Knobs, Run, random_arrivals, serve, simulate

STEP = StepTime(read=0.004, token=0.0005, overhead=0.001)
CROWD = random_arrivals(12, 40, (20, 60), (20, 100), seed=5)
TWO = [Ask.of_lengths(0.0, 4, 3), Ask.of_lengths(0.005, 6, 2)]


def run_of(*load: Ask, **knobs: Any) -> Run:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    return simulate(load, Knobs(**sizes | knobs), STEP)


def test_a_step_takes_the_longer_of_reading_and_computing_and_the_overhead() -> None:
    assert [STEP(tokens) for tokens in (1, 8, 9, 100)] == pytest.approx(
        [0.005, 0.005, 0.0055, 0.051]
    )


def test_traffic_is_the_same_for_the_same_seed_and_within_its_bounds() -> None:
    assert random_arrivals(5, 10, (1, 3), (4, 6)) == random_arrivals(5, 10, (1, 3), (4, 6))
    assert random_arrivals(5, 10, (1, 3), (4, 6), seed=1) != random_arrivals(5, 10, (1, 3), (4, 6))
    found = random_arrivals(200, 10, (1, 3), (4, 6))
    assert {len(each.prompt_ids) for each in found} == {1, 2, 3}
    assert {each.output_tokens for each in found} == {4, 5, 6}
    assert found[-1].at == pytest.approx(20, rel=0.25)


def test_a_run_reports_when_tokens_came_by_the_clock() -> None:
    run = run_of(*TWO)
    expected = [[0.005, 0.010, 0.015], [0.010, 0.015]]
    for found, times in zip(run.token_times(), expected, strict=True):
        assert found == pytest.approx(times)
    assert run.first_tokens() == pytest.approx([0.005, 0.005])
    assert [len(each) for each in run.gaps()] == [2, 1]
    assert (run.num_steps, run.num_computed, run.seconds) == (3, 13, 0.015)
    assert run.throughput == pytest.approx(5 / 0.015)


def test_without_requests_the_clock_advances_to_the_next_arrival() -> None:
    run = run_of(Ask.of_lengths(0.0, 2, 1), Ask.of_lengths(3.0, 2, 1))
    assert run.token_times() == [[pytest.approx(0.005)], [pytest.approx(3.005)]]


def test_a_dynamic_batch_waits_by_the_clock() -> None:
    run = run_of(Ask.of_lengths(0.0, 2, 1), Ask.of_lengths(0.02, 2, 1), scheduler="dynamic")
    assert run.num_steps == 1
    assert run.token_times()[0][0] == pytest.approx(0.055, abs=0.002)


def test_a_foreign_schedulers_mistake_is_named_and_a_request_too_large_is_refused() -> None:
    class Greedy(SlotScheduler):
        def schedule(self) -> list[ScheduledChunk]:
            return [ScheduledChunk(each, 99) for each in self.waiting]

    with pytest.raises(PartError, match="Greedy"):
        run_of(*TWO, scheduler=Greedy)
    with pytest.raises(RequestError, match="does not fit into 2 blocks"):
        run_of(Ask.of_lengths(0.0, 30, 9), num_blocks=2)
    with pytest.raises(RequestError, match="Request 1 has an empty prompt"):
        run_of(Ask.of_lengths(0.0, 3, 9), Ask.of_lengths(0.0, 0, 9))


def test_the_small_preempting_scheduler_makes_the_steps_of_the_engines_own() -> None:
    for num_blocks in (16, 24, 60):
        own, small = (
            run_of(*CROWD, scheduler=kind, max_num_batched_tokens=128, num_blocks=num_blocks)
            for kind in (ContinuousScheduler, PreemptingScheduler)
        )
        assert own.token_times() == small.token_times()
        assert own.num_preempted == small.num_preempted


def test_a_loaded_model_makes_the_steps_of_the_simulation(tiny_directory: Path) -> None:
    arrivals = random_arrivals(6, 60, (3, 20), (2, 12))
    llm = LLM.load(
        tiny_directory, max_num_seqs=3, max_num_batched_tokens=12, enable_prefix_caching=False
    )
    real = serve(llm, arrivals, range(5, 60), STEP)
    run = run_of(*arrivals, max_num_seqs=3, max_num_batched_tokens=12)
    assert real.token_times() == run.token_times()
    assert [len(each) for each in real.outputs] == [each.output_tokens for each in arrivals]
    assert real.asks[0].prompt_ids == tuple(range(5, 5 + len(arrivals[0].prompt_ids)))


def kinds_of(timeline: Story, request: int) -> list[str | None]:
    """Return what a request did in each step; None where it was absent."""
    place, found = timeline.requests[request], []
    for seen in timeline.steps:
        own = [part.kind for part in seen.parts if part.request == place]
        found.append(own[0] if own else seen.others.get(place))
    return found


def test_a_story_records_what_each_request_did_in_each_step() -> None:
    timeline = story(
        run_of(
            Ask.of_lengths(0, 4, 3),
            Ask.of_lengths(0.001, 9, 2),
            max_num_batched_tokens=8,
            max_num_seqs=2,
        ).events
    )
    assert kinds_of(timeline, 0) == [PREFILL, DECODE, DECODE, None]
    assert kinds_of(timeline, 1) == [None, PREFILL, PREFILL, DECODE]
    assert [(seen.num_prefill, seen.num_decode) for seen in timeline.steps] == [
        *((4, 0), (7, 1), (2, 1), (0, 1)),
    ]
    assert [part.gives for part in timeline.steps[1].parts] == [True, False]
    assert timeline.arrived[timeline.requests[1]][0] == 1
    assert timeline.ended[timeline.requests[0]][0] == 2


def test_a_story_records_waiting_requests_and_blocks() -> None:
    run = run_of(*[Ask.of_lengths(0, 4, 5)] * 3, max_num_seqs=3, num_blocks=6, block_size=2)
    timeline = story(run.events)
    assert kinds_of(timeline, 2)[:3] == [PREFILL, PREEMPTED, PREEMPTED]
    assert [seen.num_blocks for seen in timeline.steps[:2]] == [6, 6]
    assert PREFILL in kinds_of(timeline, 2)[3:], "it is recomputed"
    waiting = story(run_of(*[Ask.of_lengths(0, 4, 2)] * 2, max_num_seqs=1).events)
    assert kinds_of(waiting, 1) == [QUEUED, QUEUED, PREFILL, DECODE]


def test_a_storys_tables_are_the_schedulers(tiny_directory: Path) -> None:
    """With sharing, forks and copies, too: the slots of a step are those that the engine wrote."""
    llm = LLM.load(tiny_directory, max_num_seqs=4, block_size=4, num_blocks=40)
    packed_slots: list[list[int]] = []
    runner: Any = llm.engine.runner
    pack = runner.packer.pack

    def listening(chunks: Any) -> Any:
        packed = pack(chunks)
        packed_slots.append(packed.slots.tolist())
        return packed

    runner.packer.pack = listening
    prompt = list(range(5, 19))
    with llm.record() as recorder:
        llm.generate([prompt], params(n=3), progress=False)
        llm.generate([prompt, prompt[:9]], params(), progress=False)
    kinds = {event.kind for event in recorder.events}
    assert {EventKind.BLOCK_COPIED, EventKind.FORKED, EventKind.PREFIX_HIT} <= kinds
    found = [
        [slot_of(part, place, 4) for part in seen.parts for place in range(part.first, part.end)]
        for seen in story(recorder.events).steps
    ]
    assert found == packed_slots


def params(n: int = 1) -> Any:
    return SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, n=n)


def test_a_gantt_has_a_row_for_each_request_and_limits_below() -> None:
    runs = {name: run_of(*CROWD, scheduler=name, num_blocks=24).events for name in ("static",)}
    made = gantt(runs, by="seconds", budget=256, num_blocks=24)
    rows, tokens, blocks = made.axes
    assert [each.get_text() for each in rows.get_yticklabels()][:2] == ["request 1", "request 2"]
    assert len(rows.get_yticklabels()) == len(CROWD)
    assert tokens.get_ylim()[1] == pytest.approx(1.08 * 256)
    assert blocks.get_ylim()[1] == pytest.approx(1.08 * 24)
    words = [text.get_text() for text in made.legends[0].texts]
    assert words == ["queued", "prefill", "decode"]


def test_a_gantts_bars_are_the_steps_of_the_story() -> None:
    timeline = story(
        run_of(
            Ask.of_lengths(0, 4, 3),
            Ask.of_lengths(0, 9, 2),
            max_num_batched_tokens=8,
            max_num_seqs=2,
        ).events
    )
    rows, tokens, _ = gantt({"run": timeline}).axes
    bars = dict(zip(COLOURS, rows.collections, strict=True))
    corners = {
        kind: [path.vertices[0].tolist() for path in bars[kind].get_paths()]
        for kind in (PREFILL, DECODE)
    }
    assert corners[PREFILL] == [[0, -0.36], [0, 0.64], [1, 0.64]]
    assert corners[DECODE] == [[1, -0.36], [2, 0.64]]
    assert rows.get_title(loc="left") == "run: 3 steps, 2.0 run in each"
    highest = max(float(path.vertices[:, 1].max()) for path in tokens.collections[0].get_paths())
    assert highest == 8


def test_a_gantt_up_to_a_step_shows_all_runs_up_to_the_same_moment() -> None:
    runs = {
        name: story(run_of(*CROWD, scheduler=name, max_num_seqs=2).events)
        for name in ("static", "continuous")
    }
    left, right = gantt(runs, 20, by="seconds").axes[:2]
    until = runs["static"].steps[20].ended_ns
    others = sum(step.ended_ns <= until for step in runs["continuous"].steps)
    assert left.get_title(loc="left").startswith("static: 21 steps")
    assert right.get_title(loc="left").startswith(f"continuous: {others} steps")
    assert left.get_xlim() == right.get_xlim()


def test_a_gantt_is_by_steps_or_seconds() -> None:
    with pytest.raises(ValueError, match="steps or seconds"):
        gantt({"run": run_of(*TWO).events}, by="hours")


def test_a_run_without_steps_is_drawn() -> None:
    assert "0 steps" in gantt({"empty": []}, by="seconds").axes[0].get_title(loc="left")
    queued = [event for event in run_of(*TWO).events if event.kind is EventKind.QUEUED]
    assert "0 steps" in gantt({"run": queued}).axes[0].get_title(loc="left")


def test_the_step_view_shows_tokens_positions_slots_and_what_is_left() -> None:
    timeline = story(
        run_of(
            Ask.of_lengths(0, 4, 3),
            Ask.of_lengths(0.001, 9, 2),
            max_num_batched_tokens=8,
            max_num_seqs=2,
        ).events
    )
    texts = {timeline.requests[0]: list("abcdefg")}
    (axes,) = step_view(timeline, 1, block_size=16, budget=8, texts=texts).axes
    shown = [each.get_text() for each in axes.texts]
    first, second = (part.blocks[0] * 16 for part in timeline.steps[1].parts)
    assert shown[:3] == ["e", f"4 → {first + 4}", "request 1, decode"]
    assert f"6 → {second + 6}" in shown
    assert shown[-1].startswith("1 for decodes, 7 for prompts, 0 left of 8")
    title = axes.get_title(loc="left")
    assert title == "Step 1: 8 tokens of 2 sequences, 1 row of logits (framed)"
    framed = [patch for patch in axes.patches if patch.get_linewidth() == 2 and has_edge(patch)]
    assert len(framed) == 1
    with pytest.raises(ValueError, match="there is no step 9"):
        step_view(timeline, 9, block_size=16, budget=8)


def has_edge(patch: Any) -> bool:
    return bool(patch.get_edgecolor()[3] > 0)


def test_a_long_chunk_is_shown_without_its_middle() -> None:
    part = Part(1, PREFILL, 10, 90, False, (3, 7))
    places = shown_places(part)
    assert len(places) == MOST_CELLS
    assert (places[0], places[-1], places.count(None)) == (10, 89, 1)
    assert shown_places(Part(1, PREFILL, 2, 5, True, ())) == [2, 3, 4]
    assert [slot_of(part, place, 16) for place in (0, 17, 32)] == [48, 113, None]


def test_gains_are_ratios_of_tokens_per_second() -> None:
    seconds = {1: 4.0, 2: 4.0, 4: 8.0}
    assert [gain(seconds, 1, 2), gain(seconds, 2, 4)] == [1.0, 0.0]
    _, right = gains(seconds, {"sum": seconds}).axes
    assert [bar.get_height() for bar in right.patches] == [100, 0, 100, 0]


def test_gains_are_drawn_for_the_doublings_of_one_and_the_knee_where_it_was_measured() -> None:
    seconds = {1: 4.0, 2: 4.0, 3: 8.0, 4: 8.0}
    for knee, num_lines in ((None, 2), (1.5, 3), (0.5, 2), (9.0, 2)):
        left, right = gains(seconds, {"sum": seconds}, knee).axes
        assert len(left.lines) == num_lines
        assert [bar.get_height() for bar in right.patches] == [100, 0, 100, 0]


def test_the_curve_has_the_points_that_it_is_given() -> None:
    (axes,) = spread({"alike": [(1.0, 1.0)], "mixed": [(2.0, 1.5), (3.0, 2.5)]}).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 3.0], [1.0], [2.0, 3.0]]


def test_stutter_names_the_worst_gap_of_each_policy() -> None:
    made = stutter({"whole": [[0.0, 0.1, 0.4]], "chunks": [[0.0, 0.1, 0.2]]}, arrives=0.1)
    titles = [axes.get_title(loc="left") for axes in made.axes]
    assert titles == ["whole: 300 ms at worst", "chunks: 100 ms at worst"]


NOTEBOOK = '''from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import SlotScheduler
import math as numbers

MOST = (1, 2)

def least(x: int) -> int:
    return min(x, *MOST) + least(x - 1) if x > 1 else numbers.floor(x)

class Between(SlotScheduler):
    """Not alone."""

    def limit(self) -> int:
        return least(3)

class Mine(Between):
    def schedule(self) -> list[ScheduledChunk]:
        assert self.limit()
        return super().schedule()

class Unsaved(SlotScheduler):
    def add(self, sequence):
        STATE.append(sequence)

STATE = [object()]
'''


@pytest.fixture
def cells(tmp_path: Path) -> InteractiveShell:
    """A notebook's kernel that has run a cell with a learner's classes."""
    shell = InteractiveShell(ipython_dir=str(tmp_path / "ipython"))
    shell.run_cell("%load_ext minigen_course")
    assert shell.run_cell("%precision 3\n" + NOTEBOOK).success
    return shell


def test_a_part_of_a_notebook_becomes_a_self_contained_file(
    cells: InteractiveShell, tmp_path: Path, tiny_directory: Path
) -> None:
    name = save_part(cells.user_ns["Mine"], tmp_path / "mine.py")
    assert name == f"{tmp_path / 'mine.py'}:Mine"
    text = (tmp_path / "mine.py").read_text("utf-8")
    defined = [each.name for each in ast.parse(text).body if hasattr(each, "name")]
    assert defined == ["least", "Between", "Mine"]
    assert "import math as numbers" in text
    assert "MOST = (1, 2)" in text
    assert find_part("scheduler", name, {}).__module__ != "__main__"
    llm = LLM.load(tiny_directory, scheduler=name, max_num_seqs=2)
    run = serve(llm, TWO, range(5, 60), STEP)
    assert [len(each) for each in run.outputs] == [3, 2]


def test_a_package_part_is_imported_and_a_state_is_refused(
    cells: InteractiveShell, tmp_path: Path
) -> None:
    save_part(ChunkingScheduler, tmp_path / "own.py")
    text = (tmp_path / "own.py").read_text("utf-8")
    assert text == "from minigen_course.ch24_scheduler.lesson import ChunkingScheduler\n"
    with pytest.raises(ValueError, match=r"STATE is .* cannot be written"):
        save_part(cells.user_ns["Unsaved"], tmp_path / "not.py")


@pytest.mark.parametrize(
    ("before", "value", "written"),
    [
        ("from random import choice", "choice([1])", "from random import choice"),
        ("from torch import zeros as none", "none(1).sum()", "from torch import zeros as none"),
        ("from pathlib import Path", "Path('x').name", "from pathlib import Path"),
        ("def f(): return 1\ndef f(): return 2\ng = f", "g()", "def f(): return 2"),
        ("def f(): return 1\nclass A:\n    def f(self): return 3", "f()", "def f(): return 1"),
        ("def f(): return (5\n    % 3)", "f()", "    % 3)"),
        ("def f(): return 1\ng = f\ndef f(): return 2", "g()", None),
        ("import torch\nx = torch.zeros(3)", "x", None),
        ("import re\nx = re.compile('a')", "x", None),
        ("import logging\nlog = logging.getLogger('x')", "log", None),
        ("from functools import partial\nx = partial(max, 3)", "x", None),
        ("from minigen import LLM\nload = LLM.load", "load", None),
        ("x = int | float", "x", None),
    ],
)
def test_what_a_file_imports_or_defines_is_what_the_notebook_used(
    cells: InteractiveShell, tmp_path: Path, before: str, value: str, written: str | None
) -> None:
    code = (
        f"{before}\nclass Used:\n    value = staticmethod(lambda: {value})\n    def f(self): pass"
    )
    assert cells.run_cell(code).success
    if written is None:
        with pytest.raises(ValueError, match=r"which cannot be written|is an earlier f"):
            save_part(cells.user_ns["Used"], tmp_path / "used.py")
        assert not (tmp_path / "used.py").exists()
        return
    save_part(cells.user_ns["Used"], tmp_path / "used.py")
    loaded = run_path(str(tmp_path / "used.py"))
    assert loaded["Used"].value() == cells.user_ns["Used"].value()
    assert written in (tmp_path / "used.py").read_text("utf-8")


def test_a_value_without_a_name_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save a class or a function"):
        save_part(partial(max, 3), tmp_path / "part.py")


@pytest.mark.parametrize("kind", [SlotScheduler, ChunkingScheduler, PreemptingScheduler])
def test_the_exercises_schedulers_serve_a_model_with_shared_prefixes_and_forks(
    tiny_directory: Path, kind: Any
) -> None:
    shared = "a beginning that they have in common, "
    prompts = [shared + "first", "b", shared + "second", "else", shared + "first, and more"]
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    answers = []
    for scheduler in ("continuous", kind):
        llm = LLM.load(
            tiny_directory,
            **{"weights": "float32", "scheduler": scheduler, "max_num_seqs": 3},
            **{"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 64},
        )
        cold = llm.generate(prompts, greedy, progress=False)
        warm = llm.generate(prompts, greedy, progress=False)
        three = llm.generate(prompts[0], params(n=3))
        answers.append([each.token_ids for each in [*cold, *warm, *three.choices]])
        assert llm.kv_usage == 0
    assert answers[0] == answers[1]
