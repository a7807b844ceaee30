"""Shares of a model in a GPU's kernels together give what the whole model gives.

In Triton's interpreter two, three and four ranks are threads. On a GPU there is a group of one
rank, over NCCL and in CUDA graphs.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minigen.kernels.triton.matvec import matvec_triton
from minigen.model.layers import DenseLinear
from minigen.parallel.comm import GroupComm, MessageCounters, joined_comm
from minigen.parallel.sharding import vocab_share
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from tests.gpu.contexts import DEVICE
from tests.gpu.shares import (
    CONFIG,
    exact_logits,
    random_tensors,
    run_share,
    run_shares,
    run_whole,
    saved,
    sums_without_an_order,
)

interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="ranks that are threads need a CPU")
each_count = pytest.mark.parametrize("num_ranks", [2, 3])


def config_for(num_ranks: int, **changes: Any) -> Any:
    """Return a model in which each of these ranks has a KV head and two query heads."""
    return replace(CONFIG, q_heads=2 * num_ranks, kv_heads=num_ranks, **changes)


@interpreted
@pytest.mark.parametrize(("num_ranks", "kv_heads"), [(2, 2), (3, 3), (4, 2)])
def test_where_sums_have_no_order_ranks_give_the_bits_of_one(
    num_ranks: int, kv_heads: int, tmp_path: Path
) -> None:
    config = config_for(num_ranks) if num_ranks == kv_heads else CONFIG
    checkpoint = saved(config, sums_without_an_order(config), tmp_path)
    whole, shares = run_whole(checkpoint), run_shares(checkpoint, num_ranks)
    assert {tokens for tokens, _ in whole.steps} >= {1, 3, 8}, "decodes, alone and together"
    for share in shares:
        assert share.tokens == whole.tokens
        assert torch.equal(share.logits, whole.logits)
    one_of_each = shares[:: num_ranks // kv_heads]  # two of four ranks hold the same KV head
    joined = torch.cat([share.kv for share in one_of_each], dim=-2)
    assert torch.equal(joined, whole.kv), "each rank has its heads' keys and values"


@interpreted
@each_count
def test_another_order_of_sums_changes_logits_less_than_rounding_does(
    num_ranks: int, tmp_path: Path
) -> None:
    """The logits are as far from those of one rank as two roundings are from each other, at most.

    Two independent errors differ by the square root of 2 times the size of one. Here most roundings
    are the same, because only the sums over ranks have another order.
    """
    config = config_for(num_ranks, out_bias=True, mlp_bias=True, tied_embeddings=True)
    checkpoint = saved(config, random_tensors(config), tmp_path)
    traces, counters = [Trace() for _ in range(num_ranks)], MessageCounters()
    with traces[0].subscribed(Timeline(on_message=counters)):
        shares = run_shares(checkpoint, num_ranks, traces)
    whole = run_whole(checkpoint)
    rounding = root_mean_square(whole.logits - exact_logits(checkpoint, whole.tokens))
    for share in shares:
        assert share.tokens == whole.tokens
        assert torch.equal(share.logits, shares[0].logits), "every rank has the same logits"
        assert root_mean_square(share.logits - whole.logits) < 2**0.5 * rounding
    num_tokens, num_rows = (sum(each) for each in zip(*whole.steps, strict=True))
    sums, share = 2 * config.num_layers + 1, vocab_share(config.vocab_size, num_ranks)
    assert counters.num_messages == {
        "all_reduced": sums * len(whole.steps),
        "all_gathered": sum(rows > 0 for _, rows in whole.steps),
    }
    assert counters.num_bytes == {
        "all_reduced": sums * num_tokens * config.hidden * 4,
        "all_gathered": num_rows * share * 4,
    }


def root_mean_square(numbers: Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


@interpreted
@each_count
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_product_cut_into_sums_is_the_whole_one_within_the_roundings_of_its_terms(
    num_ranks: int, num_rows: int
) -> None:
    torch.manual_seed(3)
    terms, outputs = 96, 40
    x, weight = torch.randn(num_rows, terms), torch.randn(outputs, terms)
    residual = torch.randn(num_rows, outputs)

    def product(columns: slice, adds: bool) -> Tensor:
        linear = DenseLinear(weight[:, columns].contiguous(), None, (outputs,))
        own = x[:, columns].contiguous()
        if num_rows == 1:
            return matvec_triton(own, linear, residual=residual if adds else None)
        return linear(own) + residual if adds else linear(own)

    whole, width = product(slice(0, terms), adds=True), terms // num_ranks
    parts = [
        product(slice(rank * width, (rank + 1) * width), adds=rank == 0)
        for rank in range(num_ranks)
    ]
    # A float32 sum of n terms is wrong by at most n half-steps of their magnitudes, in any order,
    # and so are both of these: the terms of a product, one for the residual, and one for each rank.
    magnitudes = x.abs() @ weight.abs().T + residual.abs()
    bound = (terms + 1 + num_ranks) * 2**-23 * magnitudes
    assert ((sum(parts) - whole).abs() <= bound).all()


@pytest.fixture(scope="module")
def alone() -> Iterator[GroupComm]:
    """A group of one rank, over NCCL; without a GPU over gloo."""
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= settings
    yield joined_comm("nccl" if DEVICE == "cuda" else "gloo")
    dist.destroy_process_group()
    for name in settings:
        del os.environ[name]


def test_a_group_of_one_rank_gives_the_bits_of_the_model_without_a_group(
    alone: GroupComm, tmp_path: Path
) -> None:
    checkpoint = saved(CONFIG, random_tensors(CONFIG), tmp_path)
    whole, share = run_whole(checkpoint), run_share(checkpoint, alone)
    assert share.tokens == whole.tokens
    assert torch.equal(share.logits, whole.logits)
    assert torch.equal(share.kv, whole.kv)
