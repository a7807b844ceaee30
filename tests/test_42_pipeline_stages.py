"""Stages of layers: all ranks together compute what one process does, each with its own part."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import SamplingParams
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.config import EngineConfig
from minigen.errors import OptionError
from minigen.kv_cache.paged import Batch
from minigen.model.attention import attend_packed
from minigen.model.transformer import dense_linear
from minigen.parallel.comm import SoloComm
from minigen.parallel.pipeline import (
    Place,
    balanced_layers,
    build_stage,
    check_stages,
    micro_batches,
    stage_bytes,
    stage_layers,
    stage_tensors,
)
from minigen.parallel.runner import Step
from minigen.parallel.sharding import share_bytes
from tests.ranks import PROMPTS
from tests.stages import CROWDED, NUM_LAYERS, in_turn, replay, save_five_layers
from tests.test_41_shard import held_bytes

SAMPLED = SamplingParams(seed=3, n=2, max_tokens=4, temperature=0.8, ignore_eos=True)
VARIANTS = ["llama", "llama-tied", "llama-biases", "qwen2-window", "qwen3-tied-biases"]
Recorded = tuple[Checkpoint, list[Step], list[torch.Tensor]]
Record = Callable[..., Recorded]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return `record_once`, which computes what it has recorded once per module."""
    return cache(lambda *case: record_once(tmp_path_factory.mktemp("staged"), *case))


def record_once(directory: Path, most: int, variant: str = "llama") -> Recorded:
    """Return the steps of one process with too few blocks, and their logits in micro-batches."""
    save_five_layers(directory, variant)
    llm = in_turn(directory, most, keeps=True, **CROWDED)
    with llm.count_work() as counted:
        llm.generate([*PROMPTS[:3], PROMPTS[4]], SAMPLED, progress=False)
    assert counted.preemptions > 0
    assert counted.blocks_copied > 0
    runner: Any = llm.engine.runner
    steps, logits = zip(*runner.steps, strict=True)
    assert max(len(micro_batches(step.batch, most)) for step in steps) == most
    return open_checkpoint(directory), list(steps), list(logits)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("most", "stage_counts"), [(1, (2, 4)), (3, (2, 3, 5))])
def test_stages_give_every_bit_of_the_logits(
    most: int, stage_counts: tuple[int, ...], record: Record
) -> None:
    checkpoint, steps, expected = record(most)
    for num_stages in stage_counts:
        first, *others = replay(checkpoint, steps, num_stages, most)
        assert all(map(torch.equal, first.logits, expected))
        assert all(len(logits) == 0 for each in others for logits in each.logits)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_stages_of_every_kind_of_model_give_every_bit(variant: str, record: Record) -> None:
    checkpoint, steps, expected = record(2, variant)
    assert all(map(torch.equal, replay(checkpoint, steps, 3, 2)[0].logits, expected))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("variant", "dealt"), [("llama", (4, 1)), ("llama-tied", (1, 3, 1))])
def test_stages_of_layers_dealt_by_hand_give_every_bit(
    variant: str, dealt: tuple[int, ...], record: Record
) -> None:
    checkpoint, steps, expected = record(2, variant)
    found = replay(checkpoint, steps, len(dealt), 2, dealt=dealt)
    assert all(map(torch.equal, found[0].logits, expected))
    assert [len(each.held.layers) for each in found] == list(dealt)


@pytest.mark.usefixtures("unchecked_shapes")
def test_split_stages_give_every_bit_that_split_layers_give(record: Record) -> None:
    """A sum over two ranks has one order; over one rank it has another, so that it is near."""
    checkpoint, steps, expected = record(2)
    whole, *_ = replay(checkpoint, steps, 1, 2, per_stage=2)
    for mine, right in zip(whole.logits, expected, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
    for dealt in (None, (1, 4)):
        first, *_ = replay(checkpoint, steps, 2, 2, per_stage=2, dealt=dealt)
        assert all(map(torch.equal, first.logits, whole.logits))


@pytest.mark.parametrize("per_stage", [1, 2])
def test_messages_and_their_bytes_are_those_of_the_formulas(per_stage: int, record: Record) -> None:
    num_stages, most = 3, 2
    checkpoint, steps, _ = record(most)
    config, hidden_bytes = checkpoint.config, 4 * checkpoint.config.hidden
    parts = [part for step in steps for part in micro_batches(step.batch, most)]
    with_rows = [part for part in parts if len(part.logits_rows)]
    asked = [step for step in steps if len(step.batch.logits_rows)]
    num_tokens = sum(len(step.batch.token_ids) for step in steps)
    num_rows = sum(len(step.batch.logits_rows) for step in steps)
    states = (len(parts), num_tokens * hidden_bytes)  # between two ranks of neighbouring stages
    logits = (len(asked), num_rows * config.vocab_size * 4)  # from the last stage to rank 0
    for rank, found in enumerate(replay(checkpoint, steps, num_stages, most, per_stage)):
        place = Place(rank, num_stages * per_stage, num_stages)
        sent = states if not place.is_last else (0, 0)
        received = states if not place.is_first else (0, 0)
        if place.is_last and place.leads:
            sent = (sent[0] + logits[0], sent[1] + logits[1])
        if rank == 0:
            received = (received[0] + logits[0], received[1] + logits[1])
        expected = {"sent": sent, "received": received}
        if per_stage > 1:
            num_sums = 2 * len(stage_layers(NUM_LAYERS, num_stages)[place.stage]) + place.is_first
            summed = (num_sums * len(parts), num_sums * num_tokens * hidden_bytes)
            expected["all_reduced"] = summed
            joined = (len(with_rows), num_rows * 4 * -(-config.vocab_size // per_stage))
            expected["all_gathered"] = joined if place.is_last else (0, 0)
        counts = found.counters.num_messages, found.counters.num_bytes
        counted = {kind: tuple(each.get(kind, 0) for each in counts) for kind in expected}
        assert counted == expected, rank
        assert counts[0].keys() <= expected.keys()


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize(("per_stage", "dealt"), [(1, None), (2, None), (1, (1, 3, 1))])
def test_a_rank_holds_the_bytes_of_its_layers_only(
    variant: str, per_stage: int, dealt: tuple[int, ...] | None, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(save_five_layers(tmp_path, variant))
    config, tensors = checkpoint.config, checkpoint.tensors
    num_stages, of_layer = (
        3,
        sum(each.num_bytes for name, each in tensors.items() if ".layers.0." in name),
    )
    embedding = tensors["model.embed_tokens.weight"].num_bytes
    norm, frequencies = config.hidden * 4, config.head_dim // 2 * 4
    ranks = replay(checkpoint, [], num_stages, 1, per_stage, dealt=dealt)
    for rank, found in enumerate(ranks):
        place = Place(rank, num_stages * per_stage, num_stages)
        layers = stage_layers(NUM_LAYERS, num_stages, dealt)[place.stage]
        num_layers, share = len(layers), stage_bytes(tensors, config, layers, place)
        assert held_bytes(found.held) == share.own + share.repeated + frequencies
        if per_stage == 1:
            ends = embedding * (place.is_first + place.is_last) + norm * place.is_last
            assert share.own + share.repeated == num_layers * of_layer + ends
        kv_heads = config.kv_heads // per_stage
        of_token = 2 * num_layers * kv_heads * config.head_dim * 4
        assert found.kv_bytes == of_token * 4 * (11 + 1), "with block 0"


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_tensor_is_on_one_stage_and_a_tied_embedding_on_two(
    variant: str, num_stages: int, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(save_five_layers(tmp_path, variant))
    config, tensors = checkpoint.config, checkpoint.tensors
    spans = stage_layers(NUM_LAYERS, num_stages)
    stages = [stage_tensors(tensors, config, each) for each in spans]
    for name in tensors:
        owners = [number for number, stage in enumerate(stages) if name in stage]
        is_embedding = name == "model.embed_tokens.weight"
        expected = 2 if is_embedding and config.tied_embeddings else 1
        assert len(owners) == expected, name
        assert not is_embedding or owners[0] == 0
    assert ("lm_head.weight" in stages[-1]) == (variant == "llama")


def test_a_stage_reads_no_byte_of_another_stage(tmp_path: Path) -> None:
    """Every byte of the other ranks is made a NaN, so a stage that reads one is not equal."""
    checkpoint = open_checkpoint(save_five_layers(tmp_path))
    config, tensors = checkpoint.config, checkpoint.tensors
    make_linear = dense_linear(torch.float32)
    for layers in stage_layers(NUM_LAYERS, 3):
        own = stage_tensors(tensors, config, layers)
        blinded = {
            name: each if name in own else replace(each, data=torch.full_like(each.data, 255))
            for name, each in tensors.items()
        }
        assert sum(each.dequantize().isnan().all().item() for each in blinded.values()) > 9
        solo = SoloComm()
        alone, seeing = (
            build_stage(config, each, torch.float32, make_linear, layers, solo)
            for each in (blinded, tensors)
        )
        x, positions = torch.ones(2, config.hidden), torch.arange(2)
        attend = attend_packed([2], config.sliding_windows)
        assert torch.equal(alone(x, positions, attend), seeing(x, positions, attend))


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_layers_are_dealt_out_in_order_and_differ_by_one_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        spans = stage_layers(num_layers, num_stages)
        assert [layer for each in spans for layer in each] == list(range(num_layers))
        sizes = [len(each) for each in spans]
        assert len(sizes) == num_stages
        assert sizes == sorted(sizes, reverse=True), "the last stage has the output head"
        assert max(sizes) - min(sizes) <= 1


def test_more_stages_than_layers_are_refused_with_the_counts_that_would_do(tmp_path: Path) -> None:
    config = open_checkpoint(save_five_layers(tmp_path)).config
    with pytest.raises(OptionError, match=r"leaves a stage without .* values are 1 to 5\."):
        check_stages(config, 6)
    check_stages(config, 5)


def test_layers_dealt_by_hand_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    config = open_checkpoint(save_five_layers(tmp_path)).config
    message = r"4,2 are 6 layers, but the model has 5: give numbers that sum to 5, such as 3,2\."
    with pytest.raises(OptionError, match=message):
        check_stages(config, 2, (4, 2))
    check_stages(config, 2, (4, 1))


@pytest.mark.parametrize("value", ["", "3,", "3;2", "3,-2", (0, 5), (5.0, 1), (True, 4), [], 7])
def test_what_are_no_numbers_of_layers_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"whole numbers from 1 on, .* such as \(19, 11\) or"):
        EngineConfig(pipeline_parallel_size=2, pipeline_layers=value)


def test_layers_dealt_by_hand_must_be_those_of_all_stages() -> None:
    with pytest.raises(OptionError, match=r"of no use while pipeline_parallel_size is 1; leave it"):
        EngineConfig(pipeline_layers=(3, 2))
    with pytest.raises(OptionError, match=r"has 2 numbers of layers, .* is 3; give 3 numbers, one"):
        EngineConfig(pipeline_parallel_size=3, pipeline_layers=(3, 2))
    for value in ((3, 2), [3, 2], "3,2", " 3 , 2"):
        found = EngineConfig(pipeline_parallel_size=2, pipeline_layers=value)  # type: ignore[arg-type]
        assert found.num_layers_of_stages == (3, 2)


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_balanced_layers_give_the_slowest_stage_the_least_work(
    num_stages: int, variant: str, tmp_path: Path
) -> None:
    """Of all ways to deal 5 layers, with the head counted by its weights."""
    checkpoint = open_checkpoint(save_five_layers(tmp_path, variant))
    config, tensors = checkpoint.config, checkpoint.tensors
    of_layer = sum(prod(each.shape) for name, each in tensors.items() if ".layers.0." in name)
    head = config.vocab_size * config.hidden / of_layer

    def slowest(dealt: tuple[int, ...]) -> float:
        return max(*dealt[:-1], dealt[-1] + head) if num_stages > 1 else dealt[0] + head

    every = product(range(1, NUM_LAYERS + 1), repeat=num_stages)
    found = balanced_layers(tensors, config, num_stages)
    check_stages(config, num_stages, found)
    assert slowest(found) == min(slowest(each) for each in every if sum(each) == NUM_LAYERS)


def batch_of_lengths(lengths: list[int], rows: list[int]) -> Batch:
    """Return a batch with as many new tokens per sequence, and these rows of logits."""
    starts = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    numbers = torch.arange(starts[-1])
    return Batch(
        token_ids=numbers,
        positions=numbers,
        slots=numbers,
        query_starts=starts,
        context_lens=torch.tensor(lengths),
        block_tables=torch.arange(len(lengths)).unsqueeze(-1),
        logits_rows=torch.tensor(rows, dtype=torch.int64),
        num_decodes=sum(1 for each in lengths if each == 1),
    )


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize(
    "lengths", [[1], [1] * 8, [1] * 5 + [40], [1, 1, 7, 9, 3], [50, 1 + 1], [64]]
)
def test_micro_batches_in_order_are_the_batch(lengths: list[int], most: int) -> None:
    last_tokens = [sum(lengths[: place + 1]) - 1 for place in range(len(lengths))]
    batch = batch_of_lengths(lengths, sorted([0, *last_tokens]))
    parts = micro_batches(batch, most)
    assert 1 <= len(parts) <= min(most, len(lengths))
    assert torch.equal(torch.cat([each.token_ids for each in parts]), batch.token_ids)
    assert torch.equal(torch.cat([each.block_tables for each in parts]), batch.block_tables)
    rows = [each.token_ids[each.logits_rows] for each in parts]
    assert torch.equal(torch.cat(rows), batch.logits_rows)
    for part in parts:
        assert part.query_starts[0] == 0
        sizes = [b - a for a, b in zip(part.query_starts, part.query_starts[1:], strict=False)]
        assert sizes == part.context_lens.tolist()
        assert part.num_decodes == sum(1 for each in sizes if each == 1)
    if set(lengths) == {1}:
        assert len(parts) == min(most, len(lengths)), "decodes are divided evenly"
        assert max(len(each.token_ids) for each in parts) <= -(-len(lengths) // len(parts)) + 1


def test_a_rank_alone_neither_sends_nor_receives() -> None:
    solo, x = SoloComm(), torch.ones(prod((2, 3)))
    for message in (lambda: solo.send(x, 1), lambda: solo.receive(x, 1)):
        with pytest.raises(Exception, match="There is one rank, so none can"):
            message()
    assert solo.subgroup([0]) is solo


def test_the_bytes_of_all_ranks_are_the_file_and_what_is_repeated(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_five_layers(tmp_path, "llama-tied"))
    config, tensors = checkpoint.config, checkpoint.tensors
    shares = [
        stage_bytes(tensors, config, layers, Place(rank, 4, 2))
        for layers, ranks in zip(stage_layers(NUM_LAYERS, 2), ((0, 1), (2, 3)), strict=True)
        for rank in ranks
    ]
    alone = [share_bytes(tensors, config, rank, 2) for rank in range(2)]
    embedding = tensors["model.embed_tokens.weight"].num_bytes
    assert sum(each.own for each in shares) == sum(each.own for each in alone) + embedding
    assert sum(each.repeated for each in shares) == sum(each.repeated for each in alone)
