"""The picture of the blocks agrees with the blocks, at every step, and shows its numbers."""

import random
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection

from minigen import LLM, SamplingParams
from minigen.trace.events import Event, EventKind
from minigen_course.figures.block_map import block_map, caption_of
from minigen_course.figures.explore import png
from minigen_course.figures.trace_views import PoolState, pool_states
from minigen_course.grading.plug_in import using
from tests.answers.ch21_blocks import ANSWERS
from tests.bench import VOCAB, Bench, build

ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "in chunks": {"num_blocks": 200, "max_num_batched_tokens": 9},
    "preempted": {"num_blocks": 24, "max_num_seqs": 6},
    "with a prefix cache": {"num_blocks": 60, "enable_prefix_caching": True},
    "preempted and evicted": {"num_blocks": 24, "enable_prefix_caching": True},
}


class Watched(Bench):
    """A bench that records the allocator's counts and the sequences' blocks after each step."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.references: list[list[int]] = []
        self.tables: list[dict[int, tuple[int, ...]]] = []
        self.held: list[dict[int, int]] = []
        self.trace.subscribe(self._look)

    def _look(self, event: Event) -> None:
        if event.kind is EventKind.STEP:
            blocks = range(1, self.num_blocks + 1)
            self.references.append([self.manager.allocator.num_owners(each) for each in blocks])
            rows = self.manager.rows
            self.tables.append({each.sequence_id: tuple(each.block_ids) for each in rows})
            self.held.append({each.sequence_id: each.num_computed for each in rows})


def random_run(bench: Watched, rng: random.Random, num_requests: int = 14) -> None:
    """Run requests that arrive over time: forked, with shared prefixes, some aborted."""
    beginning = [rng.randrange(VOCAB) for _ in range(20)]
    for number in range(num_requests):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        prompt_ids = beginning[: rng.choice((0, 8, 20))] + own
        outputs, n = rng.randrange(1, 16), rng.choice((1, 1, 2, 3))
        bench.add(build(10 * number, prompt_ids, outputs, n))
        for _ in range(rng.randrange(6)):
            if bench.engine.has_work():
                bench.engine.step()
        if bench.engine.live and rng.random() < 0.2:
            bench.engine.abort(rng.choice(list(bench.engine.live)))
    while bench.engine.has_work():
        bench.engine.step()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(8))
def test_events_give_the_owners_of_every_block_at_every_step(engine: str, seed: int) -> None:
    bench = Watched(**ENGINES[engine])
    random_run(bench, random.Random(seed))
    states = pool_states(bench.recorder.events)
    assert len(states) == len(bench.references) > 10
    for state, references, tables, held in zip(
        states, bench.references, bench.tables, bench.held, strict=True
    ):
        assert state.tables == tables
        assert state.held == held
        counted = [state.num_references(each) for each in range(1, bench.num_blocks + 1)]
        assert counted == references
        assert len(set(state.lanes.values())) == len(state.lanes) == len(tables)


def test_the_random_runs_contain_every_kind_of_event() -> None:
    kinds = set()
    for engine, seed in product(ENGINES.values(), range(3)):
        bench = Watched(**engine)
        random_run(bench, random.Random(seed))
        kinds |= {event.kind for event in bench.recorder.events}
    between_ranks = {EventKind.ALL_REDUCED, EventKind.ALL_GATHERED, EventKind.BROADCAST}
    between_ranks |= {EventKind.SHIFTED, EventKind.SENT, EventKind.RECEIVED, EventKind.MICRO_BATCH}
    others = {EventKind.FAILED, EventKind.VERIFIED}  # no errors, no speculation
    assert kinds == set(EventKind) - others - between_ranks


def state_of(
    tables: Mapping[int, tuple[int, ...]], held: Mapping[int, int], **more: Any
) -> PoolState:
    lanes = {each: lane for lane, each in enumerate(tables)}
    return PoolState(tables, held, lanes, **({"kept": frozenset(), "events": ()} | more))


FORKED = state_of({1: (1, 2, 4), 2: (1, 2, 3)}, {1: 9, 2: 10})


def test_waste_is_of_the_slots_of_owned_blocks_and_shared_blocks_count_once() -> None:
    assert FORKED.fills(4) == {1: 4, 2: 4, 3: 2, 4: 1}
    assert FORKED.waste(4) == pytest.approx(5 / 16)
    assert FORKED.owners(2) == [1, 2]
    assert state_of({}, {}).waste(4) == 0.0


def boxes(collection: PolyCollection) -> list[tuple[float, float, float]]:
    """Return (left, bottom, height) of a collection's boxes."""
    found = []
    for path in collection.get_paths():
        box = path.get_extents()
        found.append((round(box.x0, 2), round(box.y1, 2), round(box.y1 - box.y0, 2)))
    return found


def test_each_block_is_filled_as_far_as_it_holds_tokens_and_hatched_where_shared() -> None:
    pool, tables = block_map([FORKED], 0, num_blocks=20, block_size=4).axes
    squares, fills, shared, _ = pool.collections[:4]
    assert len(boxes(squares)) == 20
    assert [height for _, _, height in boxes(fills)] == [0.88, 0.88, 0.44, 0.22]
    assert boxes(shared) == [(0.06, 0.94, 0.88), (1.06, 0.94, 0.88)]
    assert shared.get_hatch() == "///"
    assert len(boxes(tables.collections[0])) == 6
    assert len(boxes(tables.collections[2])) == 4
    assert [each.get_text() for each in tables.texts] == [
        "request 1: 9 tokens",
        "request 2: 10 tokens",
    ]
    assert pool.get_title(loc="left") == "step 0: 4 of 20 blocks owned, 31.2% of their slots empty"


def test_a_copy_on_write_is_an_arrow_and_a_sentence() -> None:
    copied = Event(EventKind.BLOCK_COPIED, 0, 2, {"source": 4, "block": 19})
    forked = Event(EventKind.FORKED, 0, 2, {"parent": 1, "blocks": 3})
    state = state_of(FORKED.tables, FORKED.held, events=(forked, copied))
    made = block_map([FORKED, state], 1, num_blocks=20, block_size=4, name="r{}".format)
    (arrow,) = made.axes[0].texts
    assert (arrow.xyann, arrow.xy) == ((3.5, 0.5), (2.5, 1.5))  # type: ignore[attr-defined]
    assert made.texts[0].get_text() == "r2 forks from r1; r2 copies block 4 to 19"
    assert caption_of([copied] * 6, most=1) == "request 2 copies block 4 to 19; and 5 more"


def test_the_last_owner_writes_in_place_and_keeps_the_original() -> None:
    """Three answers part inside a block: two copies, and the third owns the block alone."""
    bench = Watched(num_blocks=24, block_size=4)
    bench.add(build(0, [1, 2, 3, 4, 5, 6], 8, 3))
    bench.drain(50)
    states = pool_states(bench.recorder.events)
    (state,) = (
        each for each in states if any(e.kind is EventKind.BLOCK_COPIED for e in each.events)
    )
    copies = [each.counts for each in state.events if each.kind is EventKind.BLOCK_COPIED]
    assert len(copies) == 2
    (source,) = {each["source"] for each in copies}
    assert state.tables[max(state.tables)][-1] == source
    assert state.owners(source) == [max(state.tables)]


def test_changes_of_the_pool_are_described_in_words() -> None:
    events = [
        Event(EventKind.PREFIX_HIT, 0, 3, {"tokens": 8, "blocks": 2}),
        Event(EventKind.PREEMPTED, 0, 4, {"computed": 8}),
        Event(EventKind.FINISHED, 0, 5, {"output_tokens": 8, "stopped": 0}),
        Event(EventKind.ABORTED, 0, 6, {"output_tokens": 8}),
    ]
    expected = "3 finds 2 blocks; 4 is preempted; 5 ends; 6 ends"
    assert caption_of(events, name=str, most=4) == expected


def test_a_step_that_does_not_exist_has_no_picture() -> None:
    for step in (-1, 1):
        with pytest.raises(ValueError, match=f"1 steps: there is no step {step}"):
            block_map([FORKED], step, 20, 4)


def test_many_sequences_and_cached_blocks_without_a_user_are_drawn_too() -> None:
    tables = {number: (number + 1,) for number in range(16)}
    state = state_of(tables, dict.fromkeys(tables, 3), kept=frozenset({1, 30}))
    made = block_map([state], 0, 300, 4)
    assert len(made.axes[1].texts) == 16
    assert "cached, no owner" in [each.get_text() for each in made.legends[0].get_texts()]


def test_a_drawing_keeps_up_with_playing() -> None:
    bench = Watched(num_blocks=64)
    random_run(bench, random.Random(1))
    states = pool_states(bench.recorder.events)
    seconds = []
    for step in range(0, len(states), len(states) // 8):
        started = time.process_time()
        png(block_map(states, step, 64, 4))
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1


def test_a_learners_allocator_and_copy_on_write_run_in_the_engine(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True)
    options: dict[str, Any] = {"weights": "float32", "num_blocks": 30, "block_size": 4}

    def answer(llm: LLM) -> list[str]:
        answers = llm.generate(["a beginning", "other"], params, progress=False)
        return [choice.text for each in answers for choice in each.choices]

    expected = answer(LLM.load(tiny_directory, **options))
    for right in ANSWERS["BlockAllocator"].right:
        assert answer(LLM.load(tiny_directory, **options, allocator=right)) == expected
    for right in ANSWERS["copy_on_write"].right:
        with using(21, copy_on_write=right):
            assert answer(LLM.load(tiny_directory, **options)) == expected
        assert "copy_on_write" in capsys.readouterr().out
