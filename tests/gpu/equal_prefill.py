"""FlashAttention gives the result of a whole matrix of scores."""

import pytest
import torch

from minigen.kernels.triton.prefill_attention import flash_prefill_torch, flash_prefill_triton
from tests.gpu.contexts import DEVICE, HEADS, assert_near, make_contexts, randn

each_head = pytest.mark.parametrize(("head_dim", "dtype"), HEADS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@each_head
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(
    ("new", "lengths"),
    [([1], [1]), ([16, 5, 1], [16, 90, 40]), ([70], [70]), ([66, 130], [131, 130])],
)
def test_prefill_equals_its_twin(
    new: list[int], lengths: list[int], window: int | None, head_dim: int, dtype: torch.dtype
) -> None:
    contexts = make_contexts(lengths, 1, head_dim, dtype)
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0)
    q = randn(sum(new), 2, head_dim, dtype=dtype)
    keys, values, tables, context_lens = contexts
    ours = flash_prefill_triton(q, keys, values, tables, starts, context_lens, max(new), window)
    assert_near(ours, flash_prefill_torch(q, keys, values, tables, starts, context_lens, window))
