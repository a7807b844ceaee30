"""The small layers equal transformers' own, and have the properties that they are chosen for."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from minigen.checkpoint.model_config import RopeScaling
from minigen.model.layers import (
    DenseLinear,
    apply_rotary,
    apply_rotary_interleaved,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables(head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotary_tables(rotary_frequencies(head_dim, 1e4), positions)


def their_rotary(head_dim: int, rope: dict[str, object]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, max_position_embeddings=65536, rope_parameters=rope)
    )


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(eps: float, dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(96, eps=eps).to(dtype)
    theirs.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    # Small rows too, where eps matters as much as the mean square.
    x = (random_tensor(40, 96) * torch.logspace(-3, 3, 40).unsqueeze(-1)).to(dtype)
    ours = rms_norm(x, theirs.weight.detach(), eps)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs(x).detach(), atol=0, rtol=1e-6)


def test_rms_norm_gives_rows_of_root_mean_square_one_whatever_their_scale() -> None:
    x = random_tensor(5, 7, 64)
    normed = rms_norm(x, torch.ones(64), 0.0)
    torch.testing.assert_close(normed.square().mean(-1).sqrt(), torch.ones(5, 7))
    torch.testing.assert_close(rms_norm(1000 * x, torch.ones(64), 0.0), normed)


def test_rms_norm_of_bfloat16_is_the_float32_one_rounded_once() -> None:
    x, ones = random_tensor(30, 512).bfloat16(), torch.ones(512)
    wide = rms_norm(x.float(), ones, 1e-6)
    assert torch.equal(rms_norm(x, ones.bfloat16(), 1e-6), wide.bfloat16())


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_frequencies_are_those_of_transformers(head_dim: int, theta: float) -> None:
    theirs = their_rotary(head_dim, {"rope_type": "default", "rope_theta": theta})
    torch.testing.assert_close(
        rotary_frequencies(head_dim, theta), theirs.inv_freq, atol=0, rtol=1e-6
    )
    linear = {"rope_type": "linear", "rope_theta": theta, "factor": 4.0}
    torch.testing.assert_close(
        rotary_frequencies(head_dim, theta, linear_factor=4.0),
        their_rotary(head_dim, linear).inv_freq,
        atol=0,
        rtol=1e-6,
    )


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("original", [32, 8192])
def test_llama3_frequencies_are_those_of_transformers(head_dim: int, original: int) -> None:
    theirs = their_rotary(head_dim, LLAMA3 | {"original_max_position_embeddings": original})
    ours = rotary_frequencies(head_dim, 5e5, scaling=RopeScaling(8.0, 1.0, 4.0, original))
    torch.testing.assert_close(ours, theirs.inv_freq, atol=0, rtol=1e-5)


def test_llama3_scaling_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    plain = rotary_frequencies(128, 5e5)
    scaled = rotary_frequencies(128, 5e5, scaling=LLAMA3_SCALING)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    torch.testing.assert_close(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 2
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_half_split_rotation_is_that_of_transformers(head_dim: int) -> None:
    positions = torch.tensor([0, 1, 2, 500, 8191, 60000])
    theirs = their_rotary(head_dim, LLAMA3)
    q, k = random_tensor(6, 4, head_dim, seed=1), random_tensor(6, 2, head_dim, seed=2)
    their_cos, their_sin = theirs(q, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(q, k, their_cos[0], their_sin[0], unsqueeze_dim=1)

    cos, sin = rotary_tables(rotary_frequencies(head_dim, 5e5, scaling=LLAMA3_SCALING), positions)
    torch.testing.assert_close(cos, their_cos[0, :, : head_dim // 2], atol=1e-2, rtol=0)
    for x, rotated in zip((q, k), expected, strict=True):
        # At position 60000 a float32 angle is only accurate to a few thousandths.
        torch.testing.assert_close(apply_rotary(x, cos, sin)[:4], rotated[:4], atol=1e-4, rtol=0)
        torch.testing.assert_close(apply_rotary(x, cos, sin), rotated, atol=3e-2, rtol=0)


def test_interleaved_rotation_is_a_product_of_complex_numbers() -> None:
    x, positions = random_tensor(9, 3, 80), torch.arange(100, 109)
    cos, sin = tables(80, positions)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos, sin).unsqueeze(1)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(apply_rotary_interleaved(x, cos, sin), expected)


def test_the_pairings_are_one_rotation_under_a_permutation_of_the_head_and_differ_without_it() -> (
    None
):
    x = random_tensor(7, 2, 64)
    cos, sin = tables(64, torch.arange(3, 10))
    evens_first = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
    interleaved = apply_rotary_interleaved(x, cos, sin)
    assert torch.equal(apply_rotary(x[..., evens_first], cos, sin), interleaved[..., evens_first])
    assert (apply_rotary(x, cos, sin) - interleaved).abs().max() > 0.5


@pytest.mark.parametrize("rotate", [apply_rotary, apply_rotary_interleaved])
def test_rotation_keeps_lengths_and_leaves_position_zero_alone(rotate: Rotate) -> None:
    x = random_tensor(50, 4, 96)
    turned = rotate(x, *tables(96, torch.arange(50) * 37))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])
    assert (turned[1:] - x[1:]).abs().amax(dim=(1, 2)).min() > 0.1


@pytest.mark.parametrize("rotate", [apply_rotary, apply_rotary_interleaved])
def test_the_product_of_query_and_key_depends_on_their_distance_alone(rotate: Rotate) -> None:
    q, k = random_tensor(1, 1, 64, seed=1), random_tensor(1, 1, 64, seed=2)

    def product(query_at: int, key_at: int) -> Tensor:
        turned_q = rotate(q, *tables(64, torch.tensor([query_at])))
        return (turned_q * rotate(k, *tables(64, torch.tensor([key_at])))).sum()

    for distance in (0, 1, 17):
        for start in (1, 40, 900):
            torch.testing.assert_close(
                product(start + distance, start), product(distance, 0), atol=2e-3, rtol=0
            )
    assert (product(1, 0) - product(0, 0)).abs() > 0.1


@pytest.mark.parametrize("rotate", [apply_rotary, apply_rotary_interleaved])
def test_rotation_of_bfloat16_is_the_float32_one_rounded_once(rotate: Rotate) -> None:
    x = random_tensor(8, 2, 64).bfloat16()
    cos, sin = tables(64, torch.arange(8) * 100)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())


def test_swiglu_is_the_middle_of_transformers_feed_forward() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=40))
    x = random_tensor(6, 32)
    with torch.no_grad():
        ours = mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
        torch.testing.assert_close(ours, mlp(x))


def test_swiglu_lets_through_up_as_far_as_the_gate_is_open() -> None:
    gate = torch.tensor([[-1e4, 0.0, 1e4, 1.0]])
    passed = swiglu(gate, torch.full((1, 4), 3.0))
    torch.testing.assert_close(passed, torch.tensor([[0.0, 0.0, 3e4, 3 / (1 + math.exp(-1))]]))
    close = swiglu(gate.bfloat16(), torch.full((1, 4), 3.0).bfloat16())
    assert close.dtype == torch.bfloat16
    torch.testing.assert_close(close.float(), passed, atol=0, rtol=1e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_linear_is_a_product_with_the_transposed_weight(
    bias: bool, dtype: torch.dtype
) -> None:
    theirs = nn.Linear(20, 12, bias=bias, dtype=dtype).requires_grad_(False)
    ours = DenseLinear(theirs.weight, theirs.bias, (8, 4))
    x = random_tensor(5, 20).to(dtype)
    assert ours(x).dtype == dtype
    torch.testing.assert_close(ours(x), theirs(x))
    wide = x.float() @ theirs.weight.float().T + (theirs.bias.float() if bias else 0)
    torch.testing.assert_close(ours(x).float(), wide, atol=2e-2, rtol=2e-2)
