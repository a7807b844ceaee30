"""The comparisons of chapter 22, and the parts that it plugs into the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from minigen import LLM, SamplingParams
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.paged import KVPool, slots_of
from minigen_course.ch22_paged.figures import table_map
from minigen_course.ch22_paged.lesson import ReservingScheduler
from minigen_course.figures.block_map import block_map
from minigen_course.figures.trace_views import PoolState, pool_states
from minigen_course.grading.plug_in import using
from tests.bench import Bench, build

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def run_all(bench: Bench) -> dict[int, list[int]]:
    """Run five requests of 6 tokens that allow 14 more, and return their answers."""
    families = [build(number, [1, 2, 4, 5, 6, number], max_output=14) for number in range(5)]
    for family in families:
        bench.add(family)
    bench.drain(200)
    return {family[0].sequence_id: family[0].output_ids for family in families}


def test_reserving_the_longest_answer_preempts_none_and_runs_fewer() -> None:
    reserving = Bench(num_blocks=12, block_size=4, scheduler=ReservingScheduler)
    paged = Bench(num_blocks=12, block_size=4, scheduler=ContinuousScheduler)
    assert run_all(reserving) == run_all(paged)
    reserved, as_needed = (pool_states(each.recorder.events) for each in (reserving, paged))
    assert max(len(state.tables) for state in reserved) == 2
    assert max(len(state.tables) for state in as_needed) == 5
    for state in reserved:
        assert {len(table) for table in state.tables.values()} <= {blocks_needed(6 + 14, 4)}
    assert len(reserved) > len(as_needed)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_lead_to_the_tokens_places_in_the_pool(block_size: int) -> None:
    table = list(range(30, 0, -1))[: blocks_needed(20, block_size)]
    pool = KVPool(1, 30, 2, block_size, 4, torch.float32)
    k = torch.arange(20.0)[:, None, None].expand(20, 2, 4)
    pool.store(0, k, -k, torch.tensor(slots_of(table, range(20), block_size)))
    for position in range(20):
        block, offset = table[position // block_size], position % block_size
        assert (pool.kv[0, 0, block, offset] == position).all()
        assert (pool.kv[0, 1, block, offset] == -position).all()


def test_a_learners_slots_and_pool_run_in_the_engine(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = []

    class Mine(KVPool):
        def store(
            self, layer_id: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
        ) -> None:
            stored.append(len(slots))
            super().store(layer_id, k, v, slots)

    own = LLM.load(tiny_directory, weights="float32", num_blocks=40)
    expected = own.generate("a beginning", GREEDY).text
    with using(22, KVPool=Mine):
        llm = LLM.load(tiny_directory, weights="float32", num_blocks=40)
    with using(22, slots_of=lambda *given: slots_of(*given)):
        assert llm.generate("a beginning", GREEDY).text == expected
    assert "in place of slots_of, was called 9 times" in capsys.readouterr().out
    assert len(stored) == 9 * llm.config.num_layers


def test_a_table_leads_from_tokens_to_their_blocks() -> None:
    (axes,) = table_map([7, 3, 9, 5], 50, num_blocks=10, block_size=16).axes
    words = [each.get_text() for each in axes.texts]
    for index, tokens in enumerate(("0-15", "16-31", "32-47", "48-49")):
        assert words.count(tokens) == 2, "once among the tokens, once in the pool"
        assert f"entry {index}" in words
    arrows = [each for each in axes.texts if isinstance(each, Annotation)]
    assert [round(each.xy[0] - 0.42) for each in arrows] == [7, 3, 9, 5]
    for table, num_tokens in (([7, 3], 50), ([7, 30], 20)):
        with pytest.raises(ValueError, match=r"tokens need \d blocks of a pool of blocks 0 to 10"):
            table_map(table, num_tokens, num_blocks=10, block_size=16)


def test_no_two_of_twenty_requests_have_the_same_colour() -> None:
    """A full block of one request must not look like the waste of another, nor like its own."""
    tables = {number: (number + 1,) for number in range(20)}
    lanes = {number: number for number in tables}
    state = PoolState(tables, dict.fromkeys(tables, 4), lanes, frozenset(), ())
    fills: Any = block_map([state], 0, 20, 4).axes[0].collections[1].get_facecolor()
    assert len({to_hex(each) for each in fills}) == 20
