"""Shares of a model: every number is on the right rank, and together they give the same logits."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.kernels.panel_linear import panel_linear
from minigen.model.attention import attend_packed
from minigen.model.transformer import MakeLinear, build_transformer, dense_linear
from minigen.parallel.comm import Comm, MessageCounters, TracedComm, run_ranks
from minigen.parallel.sharding import (
    PLAN,
    Split,
    build_share,
    check_ranks,
    module_of,
    obstacle,
    shard_tensors,
    share_bytes,
    span,
)
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from tests.panels import root_mean_square, with_unrounded_inputs
from tests.tiny import VARIANTS, save_model

LENGTHS = (7, 1, 12)
IN_EIGHTS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def checkpoint_of(directory: Path, variant: str, num_ranks: int, **changes: Any) -> Checkpoint:
    """Return a tiny model that `num_ranks` ranks can share; of 4 ranks, two share each KV head."""
    sizes = IN_EIGHTS | ({"num_key_value_heads": 8} if variant == "llama-mha" else {})
    sizes |= {"num_key_value_heads": 1} if variant == "llama-mqa" else {}
    save_model(directory, variant, **(sizes if num_ranks == 4 else {}), **changes)
    return open_checkpoint(directory)


def logits_of(model: Any, config: ModelConfig) -> Tensor:
    own = torch.Generator().manual_seed(1)  # ranks are threads, which would share torch's
    token_ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=own)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = model(token_ids, positions, attend_packed(LENGTHS, config.sliding_windows))
    return model.logits(hidden)


def whole_and_split(
    checkpoint: Checkpoint, num_ranks: int, make_linear: MakeLinear
) -> tuple[Tensor, list[Tensor]]:
    config, tensors = checkpoint.config, checkpoint.tensors
    whole = build_transformer(config, tensors, torch.float32, make_linear)

    def work(comm: Comm) -> Tensor:
        return logits_of(build_share(config, tensors, torch.float32, make_linear, comm), config)

    return logits_of(whole, config), run_ranks(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_together_give_the_logits_of_one(
    variant: str, num_ranks: int, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(tmp_path, variant, num_ranks)
    whole, everybodys = whole_and_split(checkpoint, num_ranks, dense_linear(torch.float32))
    for logits in everybodys:
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_packed_product_is_cut_between_groups_so_that_only_sums_differ(
    form: str, num_ranks: int
) -> None:
    own = torch.Generator().manual_seed(41)
    numbers, x = torch.randn(64, 256, generator=own), torch.randn(5, 256, generator=own)
    stored = StoredTensor("weight", "F32", (64, 256), numbers.view(torch.uint8))
    make, width = panel_linear(form, 1), 256 // num_ranks
    whole = make([stored], [])
    rows = [range(each, each + 64 // num_ranks) for each in range(0, 64, 64 // num_ranks)]
    some_outputs = [make([stored.rows(each.start, each.stop)], [])(x) for each in rows]
    assert torch.equal(torch.cat(some_outputs, dim=-1), whole(x))
    parts_of_sums = [
        make([stored.columns(start, start + width)], [])(x[:, start : start + width].contiguous())
        for start in range(0, 256, width)
    ]
    # A float32 sum of n terms is wrong by at most n half-steps of their magnitudes, in any order.
    weights = whole(torch.eye(256)).T
    bound = 256 * 2**-23 * (x.abs() @ weights.abs().T)
    assert ((sum(parts_of_sums) - whole(x)).abs() <= bound).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_models_are_as_far_apart_as_two_roundings_of_their_inputs(
    form: str, num_ranks: int, tmp_path: Path
) -> None:
    """Another order of sums moves inputs over the edge between two bytes, as in a second draw.

    Two draws are the square root of 2 times as far apart as either is from inputs that are not
    rounded.
    """
    wide = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    wide |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    save_model(tmp_path, "llama", **wide)
    checkpoint = open_checkpoint(tmp_path)
    whole, everybodys = whole_and_split(checkpoint, num_ranks, panel_linear(form, 1))
    unrounded, _ = whole_and_split(checkpoint, 1, with_unrounded_inputs(form))
    for logits in everybodys:
        assert root_mean_square(logits - whole) < 2**0.5 * root_mean_square(whole - unrounded)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_stored_number_is_on_some_rank_and_split_ones_on_one_only(
    num_ranks: int, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama-biases", num_ranks)
    config, tensors = checkpoint.config, checkpoint.tensors
    shares = [shard_tensors(tensors, config, rank, num_ranks) for rank in range(num_ranks)]
    for name, tensor in tensors.items():
        split, axis = PLAN.get(module_of(name), (None, ""))
        parts = [share[name].dequantize() for share in shares if name in share]
        if split is None:
            assert len(parts) == num_ranks
        elif split is Split.ROW and len(tensor.shape) == 1:
            assert len(parts) == 1, "a bias that is added once"
        elif axis == "kv_heads" and num_ranks == 4:
            assert torch.equal(parts[0], parts[1])
            assert torch.equal(parts[2], parts[3])
            assert torch.equal(torch.cat(parts[::2]), tensor.dequantize())
        else:
            joined = torch.cat(parts, dim=1 if split is Split.ROW else 0)
            assert torch.equal(joined, tensor.dequantize())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ranks_bytes_are_its_part_and_what_is_repeated(num_ranks: int, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, "qwen3", num_ranks, vocab_size=208)
    config, tensors = checkpoint.config, checkpoint.tensors
    everybodys = [share_bytes(tensors, config, rank, num_ranks) for rank in range(num_ranks)]
    norms = sum(each.num_bytes for name, each in tensors.items() if "norm" in name)
    kv = sum(each.num_bytes for name, each in tensors.items() if "k_proj" in name) * 2
    for share in everybodys:
        assert share.own <= checkpoint.num_bytes / num_ranks
        assert share.repeated == (norms if num_ranks == 2 else norms + kv // 2)
    split = checkpoint.num_bytes - norms - (0 if num_ranks == 2 else kv)
    assert sum(share.own for share in everybodys) == split


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_no_more_numbers_than_its_share_of_the_file_has(
    num_ranks: int, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama-biases", num_ranks)
    config, tensors = checkpoint.config, checkpoint.tensors

    def work(comm: Comm) -> int:
        make_linear = dense_linear(torch.float32)
        return held_bytes(build_share(config, tensors, torch.float32, make_linear, comm).share)

    for rank, held in enumerate(run_ranks(num_ranks, work)):
        share = share_bytes(tensors, config, rank, num_ranks)
        frequencies = config.head_dim // 2 * 4
        assert held == share.own + share.repeated + frequencies


def held_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a model's parts."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(map(held_bytes, part))
    if is_dataclass(part):
        return sum(held_bytes(getattr(part, each.name)) for each in fields(part))
    return 0


@pytest.mark.parametrize("file_size", ["1GB", "50KB"])
def test_a_rank_reads_no_byte_of_another_rank(file_size: str, tmp_path: Path) -> None:
    """Every byte of the other ranks is made a NaN, so a share that reads one would not be equal."""
    checkpoint = checkpoint_of(tmp_path, "llama", 2, max_shard_size=file_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_size == "50KB")
    config, tensors = checkpoint.config, checkpoint.tensors
    for rank in range(2):
        own = shard_tensors(tensors, config, rank, 2)
        expected = {name: each.dequantize() for name, each in own.items()}
        blinded = {
            name: replace(each, data=torch.full_like(each.data, 255))
            for name, each in tensors.items()
        }
        for name, share in shard_tensors(blinded, config, rank, 2).items():
            share.data.copy_(own[name].data)
        read = shard_tensors(blinded, config, rank, 2)
        assert all(torch.equal(read[name].dequantize(), expected[name]) for name in expected)
        assert any(each.dequantize().isnan().any() for each in blinded.values())


def test_messages_are_two_per_layer_one_for_the_embedding_and_one_for_the_logits(
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama", 2)
    config, tensors = checkpoint.config, checkpoint.tensors
    counters, trace = MessageCounters(), Trace()
    trace.subscribe(Timeline(on_message=counters))

    def work(comm: Comm) -> None:
        traced = TracedComm(comm, trace) if comm.rank == 0 else comm
        make_linear = dense_linear(torch.float32)
        logits_of(build_share(config, tensors, torch.float32, make_linear, traced), config)

    run_ranks(2, work)
    num_tokens, summed = sum(LENGTHS), 2 * config.num_layers + 1
    assert counters.num_messages == {"all_reduced": summed, "all_gathered": 1}
    assert counters.num_bytes == {
        "all_reduced": summed * num_tokens * config.hidden * 4,
        "all_gathered": num_tokens * 106 * 4,  # half of 211 tokens; the last part is padded
    }


def test_counts_that_do_not_divide_are_refused_with_counts_that_do(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama", 2)
    with pytest.raises(OptionError, match=r"6 query heads .* possible values are: 1, 2\."):
        check_ranks(checkpoint.config, checkpoint.tensors, "float32", 4)
    with pytest.raises(OptionError, match=r"2 KV heads .* possible values are: 1, 2\."):
        check_ranks(checkpoint.config, checkpoint.tensors, "float32", 3)
    one_kv_head = replace(checkpoint.config, kv_heads=1)
    with pytest.raises(OptionError, match=r"ffn of 80 .* possible values are: 1, 2\."):
        check_ranks(one_kv_head, checkpoint.tensors, "float32", 3)
    check_ranks(checkpoint.config, checkpoint.tensors, "float32", 2)


def test_a_cut_within_a_group_of_a_scale_is_refused() -> None:
    config = open_config(q_heads=4, kv_heads=4, head_dim=16, ffn=128)
    data = torch.zeros(64, 64 // 32 * 20, dtype=torch.uint8)
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = {name: StoredTensor(name, "Q4_1", (64, 64), data)}
    assert obstacle(config, stored, "float32", 2) is None
    assert "16 inputs, within a group of 32" in str(obstacle(config, stored, "float32", 4))
    plain = {name: StoredTensor(name, "F32", (64, 64), torch.zeros(64, 256, dtype=torch.uint8))}
    assert obstacle(config, plain, "float32", 4) is None
    assert "16 inputs, within a group of 32" in str(obstacle(config, plain, "int4", 4))


class _EightRowsToAWord(StoredTensor):
    row_unit = 8  # type: ignore[assignment]  # zero points of four bits


def test_a_vocabulary_is_cut_where_the_file_can_be_cut() -> None:
    config = open_config(vocab_size=304)
    name = "model.embed_tokens.weight"
    data = torch.zeros(304, 256, dtype=torch.uint8)
    stored = {name: _EightRowsToAWord(name, "F32", (304, 64), data)}
    assert obstacle(config, stored, "float32", 2) is None
    assert "into 76 outputs, which is not a multiple of 8" in str(
        obstacle(config, stored, "float32", 4)
    )
    plain = {name: StoredTensor(name, "F32", (304, 64), data)}
    for form in ("float32", "int8"):  # its rows are looked up one by one, in any form
        assert obstacle(config, plain, form, 4) is None


def open_config(**sizes: int) -> ModelConfig:
    base = ModelConfig(
        "llama", 211, 64, 1, 8, 8, 8, 64, 128, 1e-5, 1e4, 1.0, None,
        False, False, False, False, False, (None,), None, (),
    )  # fmt: skip
    return replace(base, **sizes)


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, [0, 2, 4, 6]), (2, [0, 0, 1, 1])])
def test_kv_heads_are_on_the_ranks_of_their_query_heads(kv_heads: int, expected: list[int]) -> None:
    config = open_config(kv_heads=kv_heads)
    first = [span(config, "kv_heads", rank, 4).start // config.head_dim for rank in range(4)]
    assert first == expected
