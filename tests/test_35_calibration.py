"""Calibration sees what transformers' layers see, and goes on with what was quantized."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.safetensors import StoredTensor, read_safetensors
from minigen.errors import OptionError
from minigen.quantization.calibration import SharedInput, calibrate, collect, replaced_linear
from tests.tiny import save_model

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 211, (length,), generator=generator) for length in (13, 1, 9)]


def inputs_by_transformers(model: Any, replaced: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return each linear layer's inputs over all windows, with some weights replaced."""
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(LINEARS):
            weight = f"{name}.weight"
            if weight in replaced:
                module.weight.data = replaced[weight]
            module.register_forward_pre_hook(
                lambda _, args, weight=weight: seen.setdefault(weight, []).append(
                    args[0].flatten(0, -2)
                )
            )
    with torch.no_grad():
        for window in windows():
            model(window.unsqueeze(0))
    return {name: torch.cat(parts) for name, parts in seen.items()}


def load(directory: Path) -> tuple[Any, dict[str, StoredTensor]]:
    return read_config_of(directory), read_safetensors(directory)


def counted(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the rows that the Hessian has: for Q, K and V, a window's first one as the others."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return x
    parts = x.split([len(window) for window in windows()])
    return torch.cat(
        [torch.cat([part[:1].expand(max(len(part) - 2, 0), -1), part]) for part in parts]
    )


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen3", "mistral-window", "qwen2"])
def test_the_inputs_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = inputs_by_transformers(save_model(tmp_path, variant), {})
    config, tensors = load(tmp_path)
    ticks: list[tuple[int, int]] = []
    found = collect(config, tensors, windows(), lambda *tick: ticks.append(tick))
    assert set(found) == set(theirs)
    for name, x in theirs.items():
        rows = counted(name, x)
        torch.testing.assert_close(found[name].hessian, rows.T @ rows, rtol=1e-3, atol=1e-3)
        assert found[name].weight == len(rows)
        torch.testing.assert_close(found[name].mean_abs, x.abs().mean(0), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found[name].max_abs, x.abs().amax(0), rtol=1e-3, atol=1e-4)
        assert found[name].num_tokens == 23
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def halved(shared: SharedInput) -> dict[str, torch.Tensor]:
    return {name: weight / 2 for name, weight in shared.weights.items()}


@pytest.mark.parametrize("sequential", [True, False])
def test_later_layers_see_the_quantized_ones_only_if_asked(
    sequential: bool, tmp_path: Path
) -> None:
    model = save_model(tmp_path, "llama")
    config, tensors = load(tmp_path)
    found: dict[str, torch.Tensor] = {}
    changed: dict[str, torch.Tensor] = {}

    def quantize(shared: SharedInput) -> dict[str, torch.Tensor]:
        found.update(dict.fromkeys(shared.weights, shared.statistics.hessian))
        result = halved(shared) if shared.layer_id == 0 else {}
        changed.update(result)
        return result

    calibrate(config, tensors, windows(), quantize, sequential=sequential)
    assert len(changed) == 7
    theirs = inputs_by_transformers(model, changed if sequential else {})
    for name, x in theirs.items():
        if ".layers.0." not in name:  # a layer's own inputs come from its original weights
            rows = counted(name, x)
            torch.testing.assert_close(found[name], rows.T @ rows, rtol=1e-3, atol=1e-3)


def test_matrices_of_one_input_come_together_with_their_own_weights(tmp_path: Path) -> None:
    save_model(tmp_path, "llama-biases")
    config, tensors = load(tmp_path)
    asked: list[list[str]] = []

    def quantize(shared: SharedInput) -> dict[str, torch.Tensor]:
        asked.append([name.split(".", 3)[3].removesuffix(".weight") for name in shared.weights])
        for name, weight in shared.weights.items():
            torch.testing.assert_close(weight, tensors[name].dequantize())
        return {}

    calibrate(config, tensors, windows(), quantize)
    assert asked[:4] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    assert len(asked) == 4 * 3


def test_layers_before_the_first_run_but_are_not_recorded(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config, tensors = load(tmp_path)
    found: dict[str, torch.Tensor] = {}

    def keep(shared: SharedInput) -> dict[str, torch.Tensor]:
        found.update(dict.fromkeys(shared.weights, shared.statistics.hessian))
        return {}

    calibrate(config, tensors, windows(), keep, first_layer=2)
    assert {name.split(".")[2] for name in found} == {"2"}
    last, found = found, {}
    calibrate(config, tensors, windows(), keep)
    assert all(torch.equal(hessian, found[name]) for name, hessian in last.items())


def test_replaced_weights_are_used_and_others_kept(tmp_path: Path) -> None:
    save_model(tmp_path, "llama-biases")
    _, tensors = load(tmp_path)
    names = [f"model.layers.0.mlp.{each}_proj" for each in ("gate", "up")]
    stored = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names]
    new = torch.ones(stored[1].shape)
    linear = replaced_linear({stored[1].name: new})(stored, biases)
    x = torch.randn(2, 48)
    gate, up = linear(x).split(linear.parts, dim=-1)
    torch.testing.assert_close(
        gate, x @ stored[0].dequantize().T + biases[0].dequantize(), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(up, x @ new.T + biases[1].dequantize(), rtol=1e-4, atol=1e-4)


def test_no_text_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config, tensors = load(tmp_path)
    for none in ([], [torch.zeros(0, dtype=torch.int64)]):
        with pytest.raises(OptionError, match="at least one window with at least one token"):
            collect(config, tensors, none)
