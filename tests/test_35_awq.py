"""AWQ and SmoothQuant: factors move difficulty between inputs and weights, and keep products."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.safetensors import StoredTensor, read_safetensors
from minigen.errors import OptionError, WeightsError
from minigen.model.attention import attend_packed
from minigen.model.transformer import build_transformer, dense_linear
from minigen.protocols import Linear
from minigen.quantization.awq import (
    ScaledMatrices,
    awq,
    channel_factors,
    fold_into_rows,
    fold_layer,
    rows_of_values,
    shared_by_heads,
)
from minigen.quantization.calibration import InputStatistics, SharedInput, calibrate
from minigen.quantization.grid import Grid, round_to_nearest
from minigen.quantization.smoothquant import int8_linear, round_rows_to_int8, smoothing_factors
from tests.tiny import save_model


def outlier_inputs(seed: int, tokens: int = 100, columns: int = 48) -> torch.Tensor:
    """Return inputs of which a few channels are 30 times as large as the others."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, :3] *= 30
    return x


def statistics_of(x: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1])
    for part in x.split(17):
        statistics.add(part)
    return statistics


def matrices(seed: int, *rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(n, 48, generator=generator) for i, n in enumerate(rows)}


def test_statistics_are_those_of_all_tokens() -> None:
    x = outlier_inputs(0)
    statistics = statistics_of(x)
    torch.testing.assert_close(statistics.hessian, x.T @ x, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(statistics.mean_abs, x.abs().mean(0))
    torch.testing.assert_close(statistics.max_abs, x.abs().amax(0))
    torch.testing.assert_close(statistics.mean_square, x.square().mean(0))
    change = torch.randn(5, 48)
    expected = (x @ change.T).square().sum(1).mean()
    assert statistics.output_error(change) == pytest.approx(float(expected), rel=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([-1, 8, 24]), st.booleans())
def test_awq_is_never_worse_than_rounding_on_its_calibration(seed, bits, size, symmetric) -> None:
    x, weights, grid = outlier_inputs(seed), matrices(seed, 5, 3), Grid(bits, size, symmetric)
    for clips in (False, True):
        found = awq(weights, statistics_of(x), grid, steps=5, clip_search=clips)
        errors = {"awq": 0.0, "nearest": 0.0}
        for name, weight in weights.items():
            rounded = round_to_nearest(weight, grid).dequantize()
            errors["nearest"] += float((x @ (rounded - weight).T).square().sum(1).mean())
            errors["awq"] += float((x @ (found.dequantize(name) - weight).T).square().sum(1).mean())
        assert errors["awq"] <= errors["nearest"] * (1 + 1e-5)
        assert found.error == pytest.approx(errors["awq"], rel=1e-3)
        assert found.nearest_error == pytest.approx(errors["nearest"], rel=1e-3)


def test_awq_halves_the_error_where_few_channels_are_large() -> None:
    found = awq(matrices(1, 16), statistics_of(outlier_inputs(1)), Grid(3, -1, False))
    assert found.alpha > 0
    assert found.error < found.nearest_error / 2


def test_equal_channels_have_equal_factors() -> None:
    torch.testing.assert_close(channel_factors(torch.full((8,), 3.0), 0.7), torch.ones(8))
    factors = channel_factors(torch.tensor([0.0, 1.0, 100.0]), 0.5)
    assert float(factors.max() * factors.min()) == pytest.approx(1)
    assert torch.isfinite(factors).all()


@pytest.mark.parametrize("variant", ["llama-biases", "llama-mqa", "qwen3"])
def test_a_folded_layer_computes_what_the_factors_ask(variant: str, tmp_path: Path) -> None:
    """Two models are equal: one divides each input by its factors, in the other norms and rows do.

    In the first, the weights are W s rounded, over s. In the second, they are W s rounded.
    """
    save_model(tmp_path, variant)
    config, tensors = read_config_of(tmp_path), read_safetensors(tmp_path)
    found: list[ScaledMatrices] = []

    def quantize(shared: SharedInput) -> dict[str, torch.Tensor]:
        magnitudes = shared.statistics.mean_abs
        if any("o_proj" in name for name in shared.weights):
            magnitudes = shared_by_heads(magnitudes, config.q_heads, config.kv_heads)
        scaled = awq(
            shared.weights, shared.statistics, Grid(3, -1, True), magnitudes=magnitudes, steps=4
        )
        found.append(scaled)
        return {name: scaled.dequantize(name) for name in scaled.matrices}

    calibrate(config, tensors, [torch.arange(20, 60)], quantize)
    assert any(each.alpha > 0 for each in found)
    plain = {name: each.dequantize() for name, each in tensors.items()}
    folded = dict(plain)
    for layer_id in range(config.num_layers):
        own = found[4 * layer_id : 4 * layer_id + 4]
        plain |= {name: each.dequantize(name) for each in own for name in each.matrices}
        prefix = f"model.layers.{layer_id}."
        vectors = {n: e for n, e in folded.items() if n.startswith(prefix) and e.ndim == 1}
        layer = fold_layer(own, vectors, config.q_heads, config.kv_heads)
        folded |= layer.vectors
        folded |= {name: each.dequantize() for name, each in layer.matrices.items()}
    logits = []
    for weights in (plain, folded):
        stored = {name: float32_tensor(name, each) for name, each in weights.items()}
        model = build_transformer(config, stored, torch.float32, dense_linear(torch.float32))
        ids = torch.arange(30, 50)
        attend = attend_packed([20], config.sliding_windows)
        logits.append(model.logits(model(ids, torch.arange(20), attend)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def float32_tensor(name: str, values: torch.Tensor) -> StoredTensor:
    rows = (
        values.contiguous().view(torch.uint8).reshape(values.shape[0] if values.ndim > 1 else 1, -1)
    )
    return StoredTensor(name, "F32", tuple(values.shape), rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_factor_of_a_whole_row_moves_no_code(seed, symmetric) -> None:
    """So a matrix can be quantized before the factors of the layer after it are known."""
    (weight,) = matrices(seed, 6).values()
    factors = 2.0 ** torch.randint(-3, 4, (6,), generator=torch.Generator().manual_seed(seed))
    grid = Grid(3, 16, symmetric)
    folded = fold_into_rows(round_to_nearest(weight, grid), factors)
    expected = round_to_nearest(weight / factors.unsqueeze(-1), grid)
    assert torch.equal(folded.codes, expected.codes)
    torch.testing.assert_close(folded.scales, expected.scales)


def test_heads_that_share_values_share_factors() -> None:
    q_heads, kv_heads, head_dim = 6, 2, 4
    channels = torch.rand(q_heads * head_dim)
    shared = shared_by_heads(channels, q_heads, kv_heads)
    values = torch.rand(3, kv_heads, head_dim)  # what attention mixes; a mixture keeps the factors
    by_query_head = values.repeat_interleave(q_heads // kv_heads, dim=1).flatten(1)
    divided = values.flatten(1) / rows_of_values(shared, q_heads, kv_heads)
    again = divided.unflatten(1, (kv_heads, -1)).repeat_interleave(q_heads // kv_heads, dim=1)
    torch.testing.assert_close(again.flatten(1), by_query_head / shared)
    assert shared.mean() == pytest.approx(float(channels.mean()), rel=1e-5)


def test_int8_rows_are_within_half_a_step() -> None:
    rows = torch.randn(7, 33)
    rows[3] = 0
    codes, scales = round_rows_to_int8(rows)
    assert ((codes * scales - rows).abs() <= scales / 2 * (1 + 1e-6)).all()
    assert codes.abs().amax(-1).tolist() == [127] * 3 + [0] + [127] * 3
    with pytest.raises(WeightsError, match="not finite"):
        round_rows_to_int8(torch.tensor([[torch.inf]]))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_changes_no_product(alpha) -> None:
    x, weights = outlier_inputs(3), matrices(3, 6, 4)
    factors = smoothing_factors(x.abs().amax(0), weights, alpha)
    for weight in weights.values():
        torch.testing.assert_close(
            (x / factors) @ (weight * factors).T, x @ weight.T, rtol=1e-3, atol=1e-3
        )
    if alpha == 1:
        torch.testing.assert_close((x / factors).abs().amax(0), torch.ones(48))


def test_smoothing_shrinks_the_error_of_w8a8() -> None:
    x, weights = outlier_inputs(4), matrices(4, 16)
    errors = {}
    for alpha in (None, 0.5):
        factors = (
            torch.ones(48) if alpha is None else smoothing_factors(x.abs().amax(0), weights, alpha)
        )
        linear = int8_linear(weights["w0"], factors, torch.ones(16), (10, 6))
        assert isinstance(linear, Linear)
        assert linear.parts == (10, 6)
        errors[alpha] = float((linear(x) - x @ weights["w0"].T - 1).norm())
    assert errors[0.5] < errors[None] / 2


def test_an_alpha_outside_0_to_1_is_refused() -> None:
    with pytest.raises(OptionError, match="from 0 to 1, not 2"):
        smoothing_factors(torch.ones(48), matrices(0, 2), 2)
