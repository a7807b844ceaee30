"""One rank over NCCL (over gloo without a GPU) gets back what it sends, and the same products."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minigen.model.layers import DenseLinear
from minigen.parallel.comm import Comm, GroupComm, SoloComm, joined_comm
from minigen.parallel.sharding import GatheredHead, SummedLinear
from tests.gpu.contexts import DEVICE

BACKEND = "nccl" if DEVICE == "cuda" else "gloo"


@pytest.fixture(scope="module")
def comm() -> Iterator[GroupComm]:
    """A group of one rank, as `torchrun --nproc-per-node 1` would start it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= alone
    yield joined_comm(BACKEND)
    dist.destroy_process_group()
    for name in alone:
        del os.environ[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_messages_bring_back_what_was_sent(comm: GroupComm, dtype: torch.dtype) -> None:
    assert (comm.rank, comm.num_ranks) == (0, 1)
    sent = torch.arange(60).reshape(3, 20).to(DEVICE, dtype)
    for message in (comm.all_reduce, comm.all_gather, comm.broadcast):
        assert torch.equal(message(sent.clone()), sent)


def test_split_products_on_the_device_are_the_whole_ones(comm: GroupComm) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(50, 64, device=DEVICE), torch.randn(4, 64, device=DEVICE)
    linear = DenseLinear(weight, None, (50,))

    def both(over: Comm) -> tuple[Tensor, Tensor]:
        return SummedLinear(linear, over)(x), GatheredHead(linear, over, 50)(x)

    for found, alone in zip(both(comm), both(SoloComm()), strict=True):
        assert torch.equal(found, alone)
        assert torch.equal(found, linear(x))
