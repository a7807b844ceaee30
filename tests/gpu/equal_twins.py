"""Every kernel except attention equals its plain-torch twin, on shapes that fit no tile."""

import math

import pytest
import torch

from minigen.kernels.triton.elementwise import (
    rms_norm_torch,
    rms_norm_triton,
    rotary_store_torch,
    rotary_store_triton,
    silu_multiply_torch,
    silu_multiply_triton,
)
from minigen.kernels.triton.matvec import matvec_torch, matvec_triton
from minigen.kernels.triton.sampling import choose_torch, choose_triton
from minigen.model.layers import DenseLinear, rotary_frequencies, rotary_tables
from minigen_course.ch31_triton.gpu_kernels import (
    matmul_torch,
    matmul_triton,
    softmax_torch,
    softmax_triton,
)
from tests.gpu.contexts import DEVICE, DTYPES, HEADS, assert_near, randn

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_head = pytest.mark.parametrize(("head_dim", "dtype"), HEADS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@each_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 64), (5, 80), (3, 576), (2, 3000)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_equals_its_twin_and_leaves_the_sum(
    rows: int, hidden: int, has_residual: bool, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    residuals = [None, None]
    if has_residual:
        residual = randn(rows, hidden, dtype=dtype)
        residuals = [residual.clone(), residual.clone()]
    assert_near(
        rms_norm_triton(x, weight, 1e-5, residuals[0]),
        rms_norm_torch(x, weight, 1e-5, residuals[1]),
    )
    if has_residual:
        assert torch.equal(residuals[0], residuals[1])


@each_dtype
@pytest.mark.parametrize(("rows", "ffn"), [(1, 1), (3, 80), (2, 1024), (2, 1536), (1, 5000)])
def test_silu_times_up_equals_its_twin(rows: int, ffn: int, dtype: torch.dtype) -> None:
    gate_up = 3 * randn(rows, 2 * ffn, dtype=dtype)
    assert_near(silu_multiply_triton(gate_up), silu_multiply_torch(gate_up))


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 7), (2, 1000), (3, 4096)])
def test_a_softmax_equals_its_twin(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = 10 * randn(rows, columns, dtype=dtype)
    assert_near(softmax_triton(x), softmax_torch(x))


def test_a_softmax_of_large_numbers_is_finite() -> None:
    x = torch.tensor([[1e4, 1e4, -1e4]], device=DEVICE)
    assert_near(softmax_triton(x), torch.tensor([[0.5, 0.5, 0.0]], device=DEVICE))


@each_dtype
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 130, 65), (129, 16, 200), (300, 260, 64)])
def test_a_product_equals_its_twin(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    a, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / math.sqrt(k)
    assert_near(matmul_triton(a, b), matmul_torch(a, b))


@each_dtype
@pytest.mark.parametrize(
    "fused", ["", "norm bias", "norm gated", "residual", "norm bias gated residual"]
)
@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (130, 65), (24, 3000)])
def test_a_product_of_one_row_equals_its_twin(
    rows: int, columns: int, fused: str, dtype: torch.dtype
) -> None:
    x, weight = randn(1, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
    weight /= math.sqrt(columns)
    linear = DenseLinear(weight, randn(rows, dtype=dtype) if "bias" in fused else None, (rows,))
    num_results = rows // 2 if "gated" in fused else rows
    given = {
        "norm": (randn(columns, dtype=dtype), 1e-5) if "norm" in fused else None,
        "gated": "gated" in fused,
        "residual": randn(1, num_results, dtype=dtype) if "residual" in fused else None,
    }
    ours = matvec_triton(x, linear, **given)
    assert ours.shape == (1, num_results)
    assert_near(ours, matvec_torch(x, linear, **given))


@each_head
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_rotation_and_store_equal_their_twin(
    q_heads: int, kv_heads: int, has_norm: bool, head_dim: int, dtype: torch.dtype
) -> None:
    num_tokens, block_size = 3, 4
    frequencies = rotary_frequencies(head_dim, 1e4)
    tables = rotary_tables(frequencies, torch.arange(1000))
    tables = tuple(each.to(DEVICE).contiguous() for each in tables)
    qkv = randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if has_norm else None
    positions = torch.tensor([0, 7, 999], device=DEVICE)
    slots = torch.tensor([5, 4, 23], device=DEVICE)
    stored = []
    for rotate in (rotary_store_triton, rotary_store_torch):
        keys, values = torch.zeros(2, 6, block_size, kv_heads, head_dim, dtype=dtype, device=DEVICE)
        q = rotate(qkv, norms, 1e-6, tables, positions, slots, keys, values)
        stored.append((q, keys, values))
    for ours, expected in zip(*stored, strict=True):
        assert_near(ours, expected)


@pytest.mark.parametrize("vocab", [1, 211, 2048, 5000])
def test_greedy_and_drawn_tokens_equal_their_twins(vocab: int) -> None:
    logits = 3 * randn(4, vocab, dtype=torch.float32)
    temperatures = torch.tensor([0, 1, 0.3, 2], dtype=torch.float32, device=DEVICE)
    seeds = torch.tensor([1, 7, 2**32 - 1, 0], device=DEVICE)
    expected = choose_torch(logits, temperatures, seeds)
    assert choose_triton(logits, temperatures, seeds).tolist() == expected.tolist()
    assert expected[0] == logits[0].argmax()


def test_of_equally_likely_tokens_the_first_is_chosen() -> None:
    logits = torch.zeros(1, 3000, device=DEVICE)
    logits[0, [700, 2500]] = 5
    cold, seeds = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert choose_triton(logits, cold, seeds).tolist() == [700]
    assert choose_torch(logits, cold, seeds).tolist() == [700]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_rows_that_are_not_finite_give_no_token(broken: float) -> None:
    logits = torch.zeros(3, 50, device=DEVICE)
    logits[0, 30], logits[1] = broken, -math.inf
    cold, seeds = torch.zeros(3, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for choose in (choose_triton, choose_torch):
        assert choose(logits, cold, seeds).tolist() == [-1, -1, 0]


def test_tokens_are_drawn_with_the_probabilities_of_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_draws = 4000
    logits = probabilities.log().expand(num_draws, -1)
    drawn = choose_torch(logits, torch.ones(num_draws), torch.arange(num_draws) * 977)
    found = torch.bincount(drawn, minlength=4) / num_draws
    assert (found - probabilities).abs().max() < 0.03
