"""What chapter 41 runs, draws and plugs in: split layers, diverging ranks, messages over time."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.parallel.comm import SoloComm, run_ranks
from minigen.parallel.sharding import shard_tensors
from minigen.trace.events import Event, EventKind
from minigen_course.ch41_tensor_parallel.figures import (
    messages_in_time,
    messages_of_steps,
    rank_batches,
)
from minigen_course.ch41_tensor_parallel.lesson import (
    RankRuns,
    continue_split,
    message_size,
    on_ranks,
    run_split_layer,
    serve_on_ranks,
)
from minigen_course.ch41_tensor_parallel.message_timing import seconds_by_bytes, time_all_reduces
from minigen_course.grading.plug_in import using
from minigen_course.lab.gpu_ranks import run_prompt
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

PROMPTS = [[5, 3, 8], [9, 9, 1, 4, 7], [2, 6], [1, 1, 1, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("split")
    save_model(made, "llama", vocab_size=TINY_VOCAB)
    save_tokenizer(made)
    return made


def test_written_out_layers_on_threads_continue_as_the_whole_model_does(directory: Path) -> None:
    llm = LLM.load(directory, weights="float32")
    expected = llm.generate("a beginning", GREEDY).token_ids
    ids = llm.tokenizer.encode("a beginning")
    checkpoint, calls = open_checkpoint(directory), []

    def mine(*given: object) -> Tensor:
        calls.append(1)
        return run_split_layer(*given)  # type: ignore[arg-type]

    for num_ranks in (1, 2):
        calls.clear()
        assert continue_split(checkpoint, num_ranks, ids, 6, run_layer=mine) == expected
        assert len(calls) == 6 * num_ranks * llm.config.num_layers


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")
def test_ranks_of_gpus_interpreted_give_the_logits_of_plain_torch(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    found = run_prompt(checkpoint, 2, [5, 3, 8], num_layers=1)
    assert len(found.logits) == 2
    for logits in found.logits:
        torch.testing.assert_close(logits, found.expected, atol=1e-4, rtol=1e-4)
    assert found.num_messages == {"all_reduced": 3, "all_gathered": 1}


def test_a_learners_shares_are_loaded_by_rank_0(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = LLM.load(directory, weights="float32").generate("a beginning", GREEDY).token_ids
    with using(41, shard_tensors=lambda *given: shard_tensors(*given)):
        llm = LLM.load(directory, weights="float32", tensor_parallel_size=2)
    try:
        assert llm.generate("a beginning", GREEDY).token_ids == expected
    finally:
        llm.close()
    assert "in place of shard_tensors, was called 1 time" in capsys.readouterr().out


def test_ranks_with_equal_memory_run_the_same_batches_however_small_it_is() -> None:
    right = serve_on_ranks(PROMPTS, [40, 40])
    assert right.first_difference is None
    for room in (5, 7, 9, 12):
        found = serve_on_ranks(PROMPTS, [room, room])
        assert found.first_difference is None
        assert not found.stuck
        assert found.answers == right.answers
    assert len(serve_on_ranks(PROMPTS, [5, 5]).batches) > len(right.batches)


def test_ranks_with_unequal_memory_diverge_and_give_wrong_answers_or_stop() -> None:
    prompts = [*PROMPTS, [7, 7, 7, 2, 2, 2, 3]]
    right = serve_on_ranks(prompts, [40, 40]).answers[0]
    ends = set()
    for room in range(5, 16):
        found = serve_on_ranks(prompts, [room, room + 1])
        if found.first_difference is not None:
            ends.add(found.stuck)
            assert found.answers[0] != right or found.answers[1] != right
    assert ends == {True, False}


def test_a_preempted_request_may_return_on_one_rank_only() -> None:
    found = serve_on_ranks([[5, 3, 8], [9, 1, 4], [2, 6, 6], [1, 1, 7]], [6, 7])
    step = found.first_difference
    assert step is not None
    before, now = found.batches[step - 1], found.batches[step]
    (returned,) = now[1].keys() - now[0].keys()
    assert returned not in before[0]
    assert before[0] == before[1]
    assert returned in found.batches[0][0]
    assert found.stuck


def test_batches_are_filled_up_before_they_are_sent() -> None:
    assert [message_size(each) for each in ({}, {0: 1}, {0: 1, 4: 7}, {1: 9})] == [0, 8, 8, 16]


def test_each_rank_schedules_with_its_own_memory() -> None:
    asked = on_ranks(lambda comm, free, working, block: free - working + block, [(9, 2), (8, 8)], 5)
    assert asked == [12, 5]


def test_processes_time_all_reduces_of_every_size_in_groups_of_them() -> None:
    found = time_all_reduces((2, 3), sizes=[256, 65_536], repeats=2)
    assert list(found) == [2, 3]
    for of_group in found.values():
        assert list(of_group) == [256, 65_536]
        assert all(0 < seconds < 5 for seconds in of_group.values())
    assert list(seconds_by_bytes(SoloComm(), [64], 3)) == [64]
    assert run_ranks(2, lambda comm: list(seconds_by_bytes(comm, [64], 1))) == [[64], [64]]


def message(kind: EventKind, end_us: int, took_us: int, num_bytes: int = 100) -> Event:
    return Event(kind, 1000 * end_us, None, {"bytes": num_bytes, "duration_ns": 1000 * took_us})


STEP = [
    message(EventKind.BROADCAST, 10, 5),
    message(EventKind.BROADCAST, 20, 5),
    message(EventKind.ALL_REDUCED, 1000, 300, 2304),
    message(EventKind.ALL_REDUCED, 3000, 1000, 2304),
    message(EventKind.ALL_GATHERED, 4000, 500, 65_536),
]


def test_messages_are_divided_into_steps_at_rank_0s_broadcasts() -> None:
    loading = [message(EventKind.ALL_REDUCED, 1, 1)]
    other = [Event(EventKind.STEP, 5, None, {"tokens": 1})]
    assert messages_of_steps([*loading, *STEP, *other, *STEP]) == [STEP, STEP]
    assert messages_of_steps([]) == []


def test_a_bar_is_as_long_as_its_message_and_lanes_count_them() -> None:
    made = messages_in_time(STEP)
    (axes,) = made.axes
    broadcasts, reduces, gathers = (each.get_paths() for each in axes.collections[::2])
    assert [len(each) for each in (broadcasts, reduces, gathers)] == [2, 2, 1]
    begins, ends = reduces[1].vertices[:, 0].min(), reduces[1].vertices[:, 0].max()
    moving = [each.get_paths()[1].vertices[:, 0] for each in axes.collections[1:4:2]]
    assert moving[1].max() == pytest.approx(ends)
    shortest = min(np.ptp(each.vertices[:, 0]) for each in reduces)
    assert np.ptp(moving[1]) == pytest.approx(shortest)
    assert (begins, ends) == pytest.approx((1.995, 2.995))
    texts = [text.get_text() for text in axes.texts]
    assert texts[1] == "all-reduce: sums\n2 sent, 4.6 kB"
    assert "5 messages" in axes.get_title(loc="left")


def test_the_picture_of_batches_frames_what_one_rank_alone_computes() -> None:
    batches = [[{0: 3, 1: 1}, {0: 3, 1: 1}], [{0: 1, 1: 1}, {0: 1}]]
    made = rank_batches(RankRuns([[[1], [2]], [[1], [2]]], batches, stuck=True))
    frames = [[not patch.get_fill() for patch in axes.patches].count(True) for axes in made.axes]
    assert frames == [1, 1]
    assert [text.get_text() for text in made.axes[1].texts] == ["3", "1", "8", "1", "8"]
    assert "from step 1 on, and then wait" in made.axes[0].get_title(loc="left")
    alike = rank_batches(RankRuns([[[1]], [[1]]], [[{0: 1}, {0: 1}]], stuck=False))
    assert alike.axes[0].get_title(loc="left") == "All ranks run the same batches"
    assert [len(axes.patches) for axes in alike.axes] == [1, 1]
