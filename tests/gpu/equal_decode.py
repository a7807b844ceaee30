"""Paged decode gives the result of gathering each context and attending to it."""

import pytest
import torch

from minigen.kernels.triton.decode_attention import paged_decode_torch, paged_decode_triton
from tests.gpu.contexts import DTYPES, HEADS, assert_near, make_contexts, randn

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_head = pytest.mark.parametrize(("head_dim", "dtype"), HEADS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@each_head
@pytest.mark.parametrize(
    ("lengths", "q_heads", "kv_heads"),
    [([1], 1, 1), ([16, 17, 1], 6, 2), ([64, 65], 4, 4), ([130], 9, 3)],
)
def test_paged_decode_equals_its_twin(
    lengths: list[int], q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    contexts = make_contexts(lengths, kv_heads, head_dim, dtype)
    q = randn(len(lengths), q_heads, head_dim, dtype=dtype)
    assert_near(paged_decode_triton(q, *contexts), paged_decode_torch(q, *contexts))


@each_dtype
@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_a_split_context_is_joined_and_a_window_is_respected(
    splits: int, window: int | None, dtype: torch.dtype
) -> None:
    contexts = make_contexts([1, 33, 200, 64], 2, 64, dtype)
    q = randn(4, 6, 64, dtype=dtype)
    expected = paged_decode_torch(q, *contexts, window)
    assert_near(paged_decode_triton(q, *contexts, window, splits), expected)
    assert_near(paged_decode_triton(q, *contexts, window), expected)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_a_context_of_thousands_in_blocks_of_any_size(block_size: int) -> None:
    contexts = make_contexts([2500], 1, 80, DTYPES[0], block_size)
    q = randn(1, 3, 80, dtype=DTYPES[0])
    assert_near(paged_decode_triton(q, *contexts, splits=4), paged_decode_torch(q, *contexts))
