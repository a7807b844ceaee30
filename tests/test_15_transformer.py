"""The forward pass gives the same logits as transformers, for every family and feature."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
from minigen_course.ch17_dense_cache.reference import DenseCache, attend_dense
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
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
    )
    theirs = LlamaForCausalLM(sizes).eval()
    weights = {name: stored.dequantize() for name, stored in checkpoint.tensors.items()}
    missing = theirs.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # which is the embedding
    assert missing.unexpected_keys == []

    ours = build_transformer(config, checkpoint.tensors, torch.float32, dense_linear(torch.float32))
    ids = torch.tensor(checkpoint.tokenizer().encode("The capital of France is Paris, and its"))
    attend = attend_packed([len(ids)], config.sliding_windows)
    logits = ours.logits(ours(ids, torch.arange(len(ids)), attend))
    torch.testing.assert_close(logits, theirs(ids.unsqueeze(0)).logits[0], atol=1e-3, rtol=0)
