"""Timelines of stages: one rule, several schedules, and what idles; stages that are threads."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minigen import LLM
from minigen.trace.events import Event
from minigen_course.ch42_pipeline import lesson
from minigen_course.ch42_pipeline.reference import bubble, deal_layers, micro_batches
from minigen_course.lab.cost_model import SHAPES, ModelShape


def idle(run: lesson.Timeline) -> float:
    return bubble(run.computing(), run.num_ranks)


def no_stage_does_two_things(run: lesson.Timeline) -> bool:
    for rank in range(run.num_ranks):
        own = sorted((start, end) for owner, start, end in run.computing() if owner == rank)
        if any(after[0] < before[1] - 1e-9 for before, after in pairwise(own)):
            return False
    return True


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 5, 16])
def test_a_pass_has_the_bubble_of_the_formula(stages: int, batches: int) -> None:
    run = lesson.pass_once([0.1] * stages, batches)
    assert idle(run) == pytest.approx(lesson.least_bubble(stages, batches))
    assert run.seconds == pytest.approx(0.1 * (batches + stages - 1))
    assert no_stage_does_two_things(run)


def test_uneven_stages_take_the_pace_of_the_slowest_one() -> None:
    run = lesson.pass_once([1.0, 3.0, 2.0], 5)
    assert run.seconds == pytest.approx(6.0 + 4 * 3.0)


def test_a_micro_batch_visits_the_stages_in_order_with_its_transfers() -> None:
    run = lesson.pass_once([1.0, 1.0, 1.0], 4, 0.5)
    assert run.seconds == pytest.approx(6 + 2 * 0.5)
    for batch in range(4):
        visits = sorted(
            (each.rank, each.start, each.end) for each in run.spans if each.batch == batch
        )
        assert all(after[1] >= before[2] + 0.5 - 1e-9 for before, after in pairwise(visits))


@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (4, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaved_stages_have_the_bubble_of_the_formula(
    stages: int, batches: int, groups: int
) -> None:
    run = lesson.interleaved([1.0] * stages, batches, groups)
    assert idle(run) == pytest.approx(lesson.least_bubble(stages, batches, groups))
    assert len(run.spans) == stages * batches * groups
    assert no_stage_does_two_things(run)


def test_interleaving_pays_more_transfers() -> None:
    free = [lesson.interleaved([1.0] * 4, 4, groups).seconds for groups in (1, 2, 4, 8)]
    assert free == sorted(free, reverse=True)
    dear = [lesson.interleaved([1.0] * 4, 4, groups, 0.3).seconds for groups in (1, 2, 4, 8)]
    assert min(dear) != dear[-1]


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 6])
def test_decode_without_a_barrier_idles_only_for_lack_of_micro_batches(batches: int) -> None:
    run = lesson.decode_tokens([1.0] * 4, batches, 200, barrier=False)
    assert idle(run) == pytest.approx(max(0.0, 1 - batches / 4), abs=0.01)


@pytest.mark.parametrize("batches", [1, 2, 4, 6])
def test_a_barrier_brings_the_bubble_back(batches: int) -> None:
    run = lesson.decode_tokens([1.0] * 4, batches, 10, barrier=True)
    assert idle(run) == pytest.approx(lesson.least_bubble(4, batches))
    assert run.seconds == pytest.approx(10 * (batches + 3))


def test_no_token_begins_before_the_one_before_it_is_known() -> None:
    run = lesson.decode_tokens([1.0, 2.0, 1.0], 3, 5, 0.25, barrier=False)
    for batch in range(3):
        own = [each for each in run.spans if each.batch == batch]
        for step in range(1, 5):
            begins = min(each.start for each in own if each.step == step)
            known = max(each.end for each in own if each.step == step - 1)
            assert begins >= known + 0.25 - 1e-9


def test_orders_that_wait_for_each_other_are_refused() -> None:
    orders = [[(0, 0, 0), (0, 1, 0)], [(0, 1, 0), (0, 0, 0)]]
    assert lesson.run_schedule(orders, lambda *_: 1.0, 0.0).seconds == pytest.approx(4.0)
    orders = [[(1, 0, 0), (0, 0, 0)], [(0, 0, 0), (1, 0, 0)]]
    with pytest.raises(ValueError, match="no order of work can go on"):
        lesson.run_schedule(orders, lambda *_: 1.0, 0.0)


def test_a_timeline_is_cut_and_measured() -> None:
    run = lesson.pass_once([1.0, 2.0], 2)
    assert (run.start, run.end, run.busy(0), run.busy(1)) == (0.0, 5.0, 2.0, 4.0)
    assert len(run.upto(1.5).spans) == 3
    assert lesson.Timeline(2, ()).seconds == 0.0


def test_a_ring_waits_for_the_slowest_rank_and_for_messages() -> None:
    even = [[1, 1, 1]] * 3
    assert lesson.ring_turns(even, 1.0, 0.0).seconds == pytest.approx(3.0)
    assert lesson.ring_turns(even, 1.0, 5.0).seconds == pytest.approx(11.0)
    last = [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    run = lesson.ring_turns(last, 1.0, 0.5)
    assert run.seconds == pytest.approx(3.0)
    assert len([each for each in run.spans if each.kind == lesson.MESSAGE]) == 6
    assert lesson.ring_turns(last, 1.0, 0.5, barrier=True).seconds == pytest.approx(3.0)


# Stages that are threads


@pytest.fixture(scope="module")
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", block_size=4, num_blocks=64)


TEXTS = [[5, 6, 7, 8], [9, 3, 1], [4, 4, 4, 4, 2], [7]]


def test_stages_give_the_results_of_the_whole_model(llm: LLM) -> None:
    layers = llm.config.num_layers
    (right,), alone = lesson.run_stages(lesson.cut_model(llm, [range(layers + 1)]), [TEXTS])
    assert right.shape == (sum(map(len, TEXTS)), llm.config.vocab_size)
    assert alone.num_ranks == 1
    cut = lesson.cut_model(llm, deal_layers([1.0] * layers + [1.0], 2))
    for count in (1, 2, 4):
        parts = micro_batches([len(each) for each in TEXTS], count)
        found, run = lesson.run_stages(cut, [[TEXTS[each] for each in part] for part in parts])
        rows: dict[int, torch.Tensor] = {}
        for part, logits in zip(parts, found, strict=True):
            pieces = logits.split([len(TEXTS[each]) for each in part])
            rows |= dict(zip(part, pieces, strict=True))
        together = torch.cat([rows[each] for each in range(len(TEXTS))])
        torch.testing.assert_close(together, right, rtol=1e-4, atol=1e-4)
        assert len(run.spans) == 2 * len(parts)
        assert run.start == 0.0
        assert no_stage_does_two_things(run)
        first = {each.batch: each.end for each in run.spans if each.rank == 0}
        assert all(each.start >= first[each.batch] for each in run.spans if each.rank == 1)


def test_the_head_is_weighed_in_layers() -> None:
    work = lesson.layer_work(SHAPES["SmolLM2-135M"])
    assert len(work) == 31
    assert work[-1] == pytest.approx(8.0, abs=0.05)
    shape = ModelShape(8, 2, 2, 2, 4, 16, 10, tied=False)
    assert lesson.layer_work(shape) == [1.0, 1.0, 10 * 8 / (4 * 8 * 8 + 3 * 8 * 16)]


def test_a_late_link_reads_in_order_and_late() -> None:
    link, out = lesson.LateLink(late=1), np.zeros(1)
    waits = []
    for number in range(3):
        out[:] = number
        waits.append(link.send(out))
    assert link.num_open == 1
    waits[2]()
    assert link.results == [[1.0], [2.0], [2.0]]


# The trace of an engine's stages


def event(kind: str, **counts: int) -> Event:
    """Return an event with the value of a kind; the kind need not exist."""
    return Event(SimpleNamespace(value=kind), 0, None, counts)  # type: ignore[arg-type]


def test_steps_are_read_from_a_trace() -> None:
    events = [event("broadcast", bytes=64, duration_ns=1)]
    for step in range(2):
        for stage in range(2):
            for batch in range(3):
                begin = 10**9 * (100 + 5 * step + stage + batch)
                times = {"started_ns": begin, "duration_ns": 10**9}
                events.append(event("micro_batch", stage=stage, micro_batch=batch, **times))
        events.append(event("sent", bytes=1000, duration_ns=7))
    run = lesson.all_steps(events)
    assert (run.num_ranks, len(run.spans), run.start, run.end) == (2, 12, 0.0, 9.0)
    steps = lesson.step_timelines(run)
    assert [each.seconds for each in steps] == [4.0, 4.0]
    assert idle(steps[1]) == pytest.approx(lesson.least_bubble(2, 3))
    assert lesson.messages(events) == {"broadcast": (1, 64), "sent": (2, 2000)}
    assert lesson.all_steps([]).seconds == 0.0
