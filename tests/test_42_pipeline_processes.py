"""Stages as real processes: the answers of one process, under load, with torchrun, and refused.

Shapes are checked over threads, in `test_42_pipeline_stages.py`. A started pipeline serves several
tests.
"""

import os
import random
import subprocess
from collections.abc import Generator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.errors import EngineStoppedError, OptionError
from minigen.parallel import launch
from minigen.parallel.comm import MessageCounters
from minigen.parallel.pipeline import stage_layers, stage_tensors
from minigen.trace.chrome import chrome_trace
from minigen.trace.events import EventKind
from minigen.trace.timeline import Timeline
from minigen_course.lab.inspect_model import read_along
from tests.processes import own_bytes, workers_of
from tests.ranks import FEW_BLOCKS, GREEDY, PROMPTS, answers, equal_for_200, save_eight_heads
from tests.stages import CROWDED, NUM_LAYERS, exact_answers, in_turn, save_five_layers, staged
from tests.test_41_families import bytes_of_one
from tests.test_41_processes import TIE, TORCHRUN, parting_margin, text_of_one_rank

SAMPLED = SamplingParams(seed=3, n=2, max_tokens=12, temperature=0.8, ignore_eos=True)


BLOCK = 2 * 16 * 2 * 8 * 4  # bytes per layer: keys and values of 16 tokens, 2 heads of 8
MEMORY: dict[str, Any] = {"kv_cache_memory": 30 * BLOCK * NUM_LAYERS, "max_num_seqs": 64}

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_five_layers(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def pair(directory: Path) -> Generator[LLM, None, None]:
    """Two stages with three micro-batches, and a KV cache of the usual size."""
    with staged(directory, 2, num_micro_batches=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting_pair(directory: Path) -> Generator[LLM, None, None]:
    """Two stages that verify drafts, with a KV cache of some bytes."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with staged(directory, 2, speculative_config=config, **MEMORY) as llm:
        yield llm


@pytest.mark.parametrize(
    ("num_stages", "per_stage"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.long),
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_one_process_with_preemptions_and_shared_prefixes(
    directory: Path, num_stages: int, per_stage: int
) -> None:
    alone = LLM.load(directory, weights="float32", threads=1, **CROWDED)
    before = workers_of(os.getpid())
    with staged(directory, num_stages, per_stage, **CROWDED) as llm:
        assert len(workers_of(os.getpid())) == len(before) + num_stages * per_stage - 1
        said = llm.describe()
        assert said["ranks"] == f"{num_stages * per_stage} processes, over gloo"
        assert said["stages"].startswith(f"{num_stages}, layers 0-")
        assert said["stages"].endswith(f"up to {num_stages} micro-batches per step")
        with llm.count_work() as counted:
            for params in (GREEDY, SAMPLED):
                assert answers(llm, params) == answers(alone, params)
        assert counted.preemptions > 0
        assert counted.tokens_cached > 0
        assert counted.blocks_copied > 0
        assert next(llm.stream("given up", GREEDY)) is not None
        assert not llm.engine.has_work()
        counters = MessageCounters()
        with llm.trace.subscribed(Timeline(on_message=counters)):
            llm.generate("abc", SamplingParams(max_tokens=1))
    of_tensors: dict[str, int] = {}
    if per_stage > 1:
        num_layers = len(stage_layers(NUM_LAYERS, num_stages)[0])
        of_tensors = {"all_reduced": 2 * num_layers + 1}
    assert counters.num_messages == {"broadcast": 2, "sent": 1, "received": 1, **of_tensors}
    with pytest.raises(EngineStoppedError):
        llm.generate("a", GREEDY)
    assert workers_of(os.getpid()) == before, "closing ends all stages"


def test_log_probabilities_are_equal_in_every_bit(directory: Path, pair: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    expected = list(exact_answers(in_turn(directory, 3), PROMPTS, params))
    assert list(exact_answers(pair, PROMPTS, params)) == expected


def test_the_trace_shows_every_micro_batch_of_every_stage_in_its_turn(pair: LLM) -> None:
    with pair.record() as recorder:
        pair.generate(PROMPTS, GREEDY, progress=False)
    kept = [
        each for each in recorder.events if each.kind in (EventKind.STEP, EventKind.MICRO_BATCH)
    ]
    of_step: list[dict[str, int]] = []
    for event in kept:
        if event.kind is EventKind.MICRO_BATCH:
            of_step.append(dict(event.counts))
            continue
        started = event.time_ns - event.counts["duration_ns"]
        first, second = ([each for each in of_step if each["stage"] == s] for s in (0, 1))
        assert len(first) == len(second) == min(3, event.counts["sequences"])
        assert sum(each["tokens"] for each in first) == event.counts["tokens"]
        assert sum(each["sequences"] for each in first) == event.counts["sequences"]
        ended = [0, 0]
        for mine, next_one in zip(first, second, strict=True):
            assert mine["micro_batch"] == next_one["micro_batch"]
            for stage, each in enumerate((mine, next_one)):
                assert max(started, ended[stage]) <= each["started_ns"]
                ended[stage] = each["started_ns"] + each["duration_ns"]
            assert ended[0] <= next_one["started_ns"], "one machine, one clock"
        assert max(ended) <= event.time_ns
        of_step.clear()
    drawn = chrome_trace(recorder.events)["traceEvents"]
    tracks = {each["args"].get("name") for each in drawn if each["name"] == "thread_name"}
    assert {"stage 0", "stage 1"} <= tracks


def test_speculation_runs_through_stages(directory: Path, drafting_pair: LLM) -> None:
    prompts = ["abcabcabcabc", "xyzxyzxyz"]
    expected = LLM.load(directory, weights="float32").generate(prompts, GREEDY, progress=False)
    with drafting_pair.count_work() as counted:
        found = drafting_pair.generate(prompts, GREEDY, progress=False)
    assert counted.drafts > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_the_stage_with_the_most_layers_sets_the_number_of_blocks(
    directory: Path, drafting_pair: LLM
) -> None:
    """Each of 2 stages has memory for 75 blocks of a layer, and the first one has 3 layers."""
    of_one = LLM.load(directory, weights="float32", **MEMORY).describe()["kv cache"]
    assert of_one.startswith("30 blocks")
    assert drafting_pair.describe()["kv cache"].startswith("25 blocks")


@pytest.mark.parametrize(
    ("dealt", "per_stage"),
    [
        ((4, 1), 1),
        pytest.param((1, 1, 3), 1, marks=pytest.mark.long),
        pytest.param((1, 4), 2, marks=pytest.mark.long),
    ],
)
def test_layers_dealt_by_hand_give_every_bit_and_set_the_number_of_blocks(
    directory: Path, dealt: tuple[int, ...], per_stage: int
) -> None:
    num_stages = len(dealt)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with staged(directory, num_stages, per_stage, pipeline_layers=dealt, **MEMORY) as llm:
        said, found = llm.describe(), list(exact_answers(llm, PROMPTS, params))
    spans = stage_layers(NUM_LAYERS, num_stages, dealt)
    layers = ", ".join(f"{each.start}-{each.stop - 1}" for each in spans)
    assert said["stages"].startswith(f"{num_stages}, layers {layers};")
    assert said["kv cache"].startswith(f"{30 * NUM_LAYERS // num_stages // max(dealt)} blocks")
    if per_stage == 1:
        assert found == list(exact_answers(in_turn(directory, num_stages), PROMPTS, params))
        return
    with staged(directory, num_stages, per_stage) as equal:
        assert found == list(exact_answers(equal, PROMPTS, params))


def test_what_does_not_work_with_stages_is_refused_in_a_sentence(directory: Path) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pipeline_parallel_size": 6}, r"leaves a stage without .* values are 1 to 5\."),
        ({"pipeline_parallel_size": 0}, "from 1 to 64"),
        ({"pipeline_parallel_size": 2, "device": "cuda"}, "runs no stages"),
        ({"pipeline_parallel_size": 2, "kv_cache_dtype": "int4"}, "is split over 2 processes"),
        ({"pipeline_layers": (3, 2)}, "of no use while pipeline_parallel_size is 1"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3,3"}, r"sum to 5, such as 3,2\."),
        ({"num_micro_batches": 2}, "of no use while pipeline_parallel_size is 1"),
        ({"pipeline_parallel_size": 2, "num_micro_batches": 0}, "from 1 to 65536"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 3},
            r"tensor_parallel_size 3 .* possible values are: 1, 2, 4, 8\.",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "speculative_config": {"method": "draft_model", "weights": "bfloat16"},
            },
            "A draft_model runs in one process",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "attention_backend": lambda pool, batch, windows: None,
            },
            "pipeline_parallel_size above 1 needs minigen's own attention_backend",
        ),
        ({"pipeline_parallel_size": 2, "proposer": "none.py:Mine"}, "none.py"),
        ({"pipeline_parallel_size": 2, "logits_processor": "none.py:Mine"}, "none.py"),
        (
            {
                "pipeline_parallel_size": 2,
                "scheduler": "static",
                "speculative_config": {"method": "ngram"},
            },
            "verifies no drafts",
        ),
    )
    before, kept = workers_of(os.getpid()), []
    for options, message in refused:
        with pytest.raises(OptionError, match=message) as caught:
            LLM.load(directory, **{"weights": "float32", **options})
        kept.append(caught.value)  # as a notebook keeps the last one
        assert workers_of(os.getpid()) == before


def test_int8_that_fits_no_stage_is_refused_before_any_starts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(launch, "Workers", None)
    with pytest.raises(OptionError, match=r"weights='int8' needs a multiple of .* Use weights="):
        LLM.load(directory, weights="int8", pipeline_parallel_size=2)


def test_the_ranks_of_torchrun_run_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "_JOINED", set())
    monkeypatch.setattr(launch, "joined_comm", lambda: "connected")
    assert launch._torchrun_comm(2, "it is 2") == "connected"
    with pytest.raises(OptionError, match="run one model until they end"):
        launch._torchrun_comm(2, "it is 2")


def on_torchrun(
    directory: Path, started: int, num_stages: int, per_stage: int
) -> "subprocess.CompletedProcess":
    command = [*TORCHRUN, "--nproc-per-node", str(started)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "minigen", "generate", "-m", str(directory), "--weights", "float32", "abc"]
    command += [
        "--pipeline-parallel-size",
        str(num_stages),
        "--tensor-parallel-size",
        str(per_stage),
    ]
    return subprocess.run(
        [*command, "--max-tokens", "12"],
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("per_stage", [1, pytest.param(2, marks=pytest.mark.long)])
def test_stages_of_ranks_that_torchrun_started_are_joined(per_stage: int, tmp_path: Path) -> None:
    model = save_eight_heads(tmp_path)
    done = on_torchrun(model, 2 * per_stage, 2, per_stage)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\n") == text_of_one_rank(model).strip("\n")


@pytest.mark.long
def test_another_number_of_ranks_than_torchrun_started_is_refused(directory: Path) -> None:
    done = on_torchrun(directory, 3, 2, 2)
    assert done.returncode != 0
    message = "pipeline_parallel_size 2 times tensor_parallel_size 2 is 4; they must be equal."
    assert f"torchrun started 3 ranks, but {message}" in done.stderr


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.long)])
def test_200_requests_with_preemptions_and_aborts_get_the_tokens_of_one_process(
    directory: Path, num_stages: int
) -> None:
    alone = LLM.load(directory, weights="float32", threads=1, **FEW_BLOCKS)
    with staged(directory, num_stages, **FEW_BLOCKS) as llm:
        equal_for_200(llm, alone)


TEXT = "The old keeper of the lighthouse climbed the stairs. " * 2


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_default_model_in_stages_gives_every_bit(
    default_model_path: Path, num_stages: int, form: str
) -> None:
    alone = in_turn(default_model_path, num_stages, weights=form)
    ids = alone.tokenizer.encode(TEXT)
    texts = [ids, ids[5:20], ids[3:9]]
    expected = read_along(alone, *texts).logits
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    answered = list(exact_answers(alone, [TEXT, "Once", TEXT[20:]], params))
    with staged(default_model_path, num_stages, weights=form) as llm:
        for mine, right in zip(read_along(llm, *texts).logits, expected, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(right))
        assert list(exact_answers(llm, [TEXT, "Once", TEXT[20:]], params)) == answered


@pytest.mark.long
@pytest.mark.model
def test_200_requests_of_the_default_model_get_the_tokens_of_one_process(
    default_llm: LLM, default_model_path: Path
) -> None:
    """An answer may part where the two likeliest tokens were tied: micro-batches sum otherwise."""
    rng = random.Random(42)
    beginnings = [[rng.randrange(1000, 40_000) for _ in range(32)] for _ in range(10)]
    prompts = [
        beginnings[request % 10] + [rng.randrange(1000, 40_000) for _ in range(request % 7 + 1)]
        for request in range(200)
    ]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    expected = default_llm.generate(prompts, params, progress=False)
    with staged(default_model_path, 3, num_blocks=30) as llm, llm.count_work() as counted:
        found = llm.generate(prompts, params, progress=False)
    assert counted.preemptions > 0
    assert counted.tokens_cached > 0
    parted = [
        parting_margin(ours, theirs)
        for ours, theirs in zip(found, expected, strict=True)
        if ours.token_ids != theirs.token_ids
    ]
    print(f"\n{len(parted)} of 200 answers part at a tie; {counted.preemptions} preemptions")
    assert all(margin < TIE for margin in parted)
    assert len(parted) <= 2


@pytest.mark.long
@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_a_stage_has_the_memory_of_its_layers(default_model_path: Path, tmp_path: Path) -> None:
    """Its weights, and as much memory to work in as one process has beside all weights, or less.

    Without Python's and torch's own memory, known from a model of a few thousand numbers.
    """
    nothing = save_five_layers(tmp_path)
    options: dict[str, Any] = {"kv_cache_memory": "24M", "num_micro_batches": 1}

    others = workers_of(os.getpid())

    def bytes_of_workers(path: Path) -> list[int]:
        with staged(path, 3, **options) as llm:
            llm.generate("a", SamplingParams(max_tokens=4), progress=False)
            return [own_bytes(worker) for worker in workers_of(os.getpid()) if worker not in others]

    checkpoint = open_checkpoint(default_model_path)
    spans = stage_layers(checkpoint.config.num_layers, 3)
    whole = bytes_of_one(default_model_path) - bytes_of_one(nothing)
    to_work_in = whole - 4 * checkpoint.num_parameters  # in float32
    assert 0 < to_work_in < 50e6
    pairs = zip(bytes_of_workers(nothing), bytes_of_workers(default_model_path), strict=True)
    for rank, (before, after) in enumerate(pairs, start=1):
        own = stage_tensors(checkpoint.tensors, checkpoint.config, spans[rank])
        weights = 4 * sum(prod(each.shape) for each in own.values())
        print(f"\nrank {rank}: {(after - before) / 1e6:.0f} MB, {weights / 1e6:.0f} MB of weights")
        assert weights <= after - before <= weights + to_work_in
