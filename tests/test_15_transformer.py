"""The forward pass gives the same logits as transformers, for every family and feature."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import check_tensors, read_safetensors
from minigen.model.attention import attend_packed
from minigen.model.transformer import (
    Transformer,
    build_transformer,
    dense_linear,
    expected_tensors,
)
from minigen_course.ch15_transformer.lesson import (
    TinyModel,
    perplexities_without_layers,
    stored_logits,
    tiny_model,
)
from minigen_course.ch15_transformer.reference import prompt_flops, token_flops
from minigen_course.ch17_dense_cache.reference import DenseCache, attend_dense
from minigen_course.lab.cost_model import SHAPES, config_of, prefill_step
from minigen_course.lab.inspect_model import (
    load_model,
    log_probabilities,
    perplexity,
    transformer_of,
)
from tests.golden.make_logits import transformers_logits
from tests.tiny import VARIANTS, save_model

PROMPT_LENGTH, NUM_STEPS = 19, 6  # longer than every sliding window of the variants


def load(directory: Path) -> tuple[ModelConfig, Transformer]:
    config = read_config_of(directory)
    tensors = read_safetensors(directory)
    check_tensors(tensors, expected_tensors(config), str(directory))
    return config, build_transformer(config, tensors, torch.float32, dense_linear(torch.float32))


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 211, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_those_of_transformers_in_prefill_and_step_by_step(
    variant: str, tmp_path: Path
) -> None:
    theirs = save_model(tmp_path, variant)
    config, ours = load(tmp_path)
    ids = random_ids(PROMPT_LENGTH + NUM_STEPS)
    expected = theirs(ids.unsqueeze(0)).logits[0]

    whole = ours.logits(
        ours(ids, torch.arange(len(ids)), attend_packed([len(ids)], config.sliding_windows))
    )
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)

    cache = DenseCache(config.num_layers, len(ids), config.kv_heads, config.head_dim, torch.float32)
    bounds = [0, *range(PROMPT_LENGTH, len(ids) + 1)]
    for start, end in pairwise(bounds):
        attend = attend_dense([cache], [end - start], config.sliding_windows)
        hidden = ours(ids[start:end], torch.arange(start, end), attend)
        cache.advance(end - start)
        torch.testing.assert_close(ours.logits(hidden), expected[start:end], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_the_comparison_is_sharp_enough_to_see_a_wrong_window_or_frequency(tmp_path: Path) -> None:
    theirs = save_model(tmp_path, "mistral-window")
    config, ours = load(tmp_path)
    ids = random_ids(PROMPT_LENGTH)
    expected = theirs(ids.unsqueeze(0)).logits[0]
    wider = [window and window + 1 for window in config.sliding_windows]
    logits = ours.logits(ours(ids, torch.arange(len(ids)), attend_packed([len(ids)], wider)))
    assert (logits - expected).abs().max() > 1e-2


@torch.inference_mode()
def test_sequences_packed_together_do_not_see_each_other(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    config, ours = load(tmp_path)
    lengths = [5, 1, 12]
    parts = random_ids(sum(lengths)).split(lengths)
    windows = config.sliding_windows
    together = ours(
        torch.cat(parts),
        torch.cat([torch.arange(length) for length in lengths]),
        attend_packed(lengths, windows),
    ).split(lengths)
    for part, rows in zip(parts, together, strict=True):
        alone = ours(part, torch.arange(len(part)), attend_packed([len(part)], windows))
        torch.testing.assert_close(rows, alone, atol=1e-5, rtol=0)


def test_expected_tensors_are_the_ones_that_transformers_saves(tmp_path: Path) -> None:
    for variant in VARIANTS:
        directory = tmp_path / variant
        save_model(directory, variant)
        saved = {name: each.shape for name, each in read_safetensors(directory).items()}
        assert expected_tensors(read_config_of(directory)) == saved


@pytest.mark.model
@torch.inference_mode()
def test_the_default_models_logits_equal_those_of_transformers(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    config = checkpoint.config
    ours = build_transformer(config, checkpoint.tensors, torch.float32, dense_linear(torch.float32))
    ids = checkpoint.tokenizer().encode("The capital of France is Paris, and its")
    attend = attend_packed([len(ids)], config.sliding_windows)
    logits = ours.logits(ours(torch.tensor(ids), torch.arange(len(ids)), attend))
    theirs = transformers_logits(checkpoint, ids)
    torch.testing.assert_close(logits, theirs, atol=1e-3, rtol=0)


@pytest.mark.model
def test_the_stored_logits_are_those_of_the_installed_transformers(
    default_model_path: Path,
) -> None:
    checkpoint, stored = open_checkpoint(default_model_path), stored_logits()
    assert checkpoint.tokenizer().encode(stored.prompt) == stored.token_ids
    assert stored.difference(transformers_logits(checkpoint, stored.token_ids)) < 1e-3
    assert stored.logits.shape == (len(stored.token_ids), 128)


def test_a_tiny_model_is_whole_and_other_weights_change_its_logits() -> None:
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        tiny, ids = tiny_model(family), [3, 1, 4]
        assert set(tiny.weights) == set(expected_tensors(tiny.config))
        right = tiny.logits(ids)
        assert right.shape == (3, tiny.config.vocab_size)
        for name, weight in tiny.weights.items():
            changed = TinyModel(tiny.config, {**tiny.weights, name: weight * 1.5 + 0.1})
            assert not torch.allclose(changed.logits(ids), right), name


@pytest.mark.model
def test_a_model_without_a_layer_is_another_model() -> None:
    llm = load_model(weights="float32")
    ids = llm.tokenizer.encode("The old lighthouse keeper lost his lamp.")
    whole = perplexity(log_probabilities(llm, ids))
    found = perplexities_without_layers(llm, ids)
    assert len(found) == llm.config.num_layers
    assert found[0] > 100 * whole
    assert whole / 2 < found[4] < 2 * whole
    model = transformer_of(llm)
    shorter = replace(model, layers=model.layers[:4] + model.layers[5:])
    attend = attend_packed([len(ids)], llm.config.sliding_windows)
    with torch.inference_mode():
        hidden = shorter(torch.tensor(ids), torch.arange(len(ids)), attend)
        logs = shorter.logits(hidden[:-1]).log_softmax(-1)
    expected = perplexity(logs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    assert found[4] == pytest.approx(expected, rel=1e-4)


def test_flops_are_those_of_the_cost_model_and_of_a_prefill_step() -> None:
    for name, shape in SHAPES.items():
        for context in (1, 1000):
            assert token_flops(config_of(name), context) == shape.flops(context)
        assert prompt_flops(config_of(name), 300) == prefill_step(shape, 300, 16).flops
