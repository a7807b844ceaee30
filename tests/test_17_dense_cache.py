"""The dense cache avoids recomputation, and never changes the result."""

import weakref
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import read_safetensors
from minigen.model.attention import attend_packed
from minigen.model.transformer import Transformer, build_transformer, dense_linear
from minigen.protocols import Attend
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.ch17_dense_cache.reference import DenseCache, DenseRunner, attend_dense
from tests.tiny import save_model

VARIANTS = ["llama", "mistral-window", "qwen2-window"]  # no window, windows, some of each
VOCAB = 211


@dataclass(frozen=True)
class RecordingTransformer(Transformer):
    """The same model, which also records every token and position that it computes."""

    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.steps.append((token_ids.tolist(), positions.tolist()))
        return Transformer.__call__(self, token_ids, positions, attend)

    @property
    def num_computed(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.steps)


Model = tuple[ModelConfig, Transformer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    def load(directory: Path, variant: str) -> Model:
        save_model(directory, variant)
        config = read_config_of(directory)
        tensors = read_safetensors(directory)
        model = build_transformer(config, tensors, torch.float32, dense_linear(torch.float32))
        return config, model

    return {variant: load(tmp_path_factory.mktemp(variant), variant) for variant in VARIANTS}


@pytest.fixture
def recording(models: dict[str, Model]) -> tuple[DenseRunner, RecordingTransformer]:
    config, model = models["mistral-window"]
    parts = {each.name: getattr(model, each.name) for each in fields(model)}
    recorder = RecordingTransformer(**parts)
    return DenseRunner(recorder, config.kv_heads, config.sliding_windows), recorder


def random_ids(num_tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def make_sequence(sequence_id: int, num_prompt: int, max_output: int = 8) -> Sequence:
    prompt_ids = tuple(random_ids(num_prompt, seed=sequence_id).tolist())
    params = SamplingParams(temperature=0.0)
    return Sequence(sequence_id, prompt_ids, params, 0, max_output, frozenset())


def advance(sequence: Sequence, token_id: int) -> None:
    """Update the sequence as the engine does after a step."""
    sequence.num_computed = len(sequence)
    sequence.append(token_id)


def whole(model: Model, ids: Tensor) -> Tensor:
    """Return logits of all positions, computed at once and without a cache."""
    config, transformer = model
    attend = attend_packed([len(ids)], config.sliding_windows)
    return transformer.logits(transformer(ids, torch.arange(len(ids)), attend))


def in_chunks(model: Model, ids: Tensor, lengths: list[int]) -> Tensor:
    """Return logits of all positions, computed chunk by chunk over one cache."""
    config, transformer = model
    cache = DenseCache(config.num_layers, len(ids), config.kv_heads, config.head_dim, torch.float32)
    rows = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        attend = attend_dense([cache], [end - start], config.sliding_windows)
        rows.append(
            transformer.logits(transformer(ids[start:end], torch.arange(start, end), attend))
        )
        cache.advance(end - start)
    assert cache.num_tokens == len(ids)
    return torch.cat(rows)


def test_new_tokens_are_stored_after_the_earlier_ones_of_their_layer() -> None:
    cache = DenseCache(layers=2, max_tokens=6, kv_heads=3, head_dim=4, dtype=torch.float32)
    k, v = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    k_below, v_below = k + 10, v + 10
    cache.store(0, k_below[:2], v_below[:2])
    cache.store(1, k[:2], v[:2])
    cache.advance(2)
    keys, values = cache.store(1, k[2:], v[2:])
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    keys, values = cache.store(0, k_below[2:], v_below[2:])
    assert torch.equal(keys, k_below)
    assert torch.equal(values, v_below)


def test_tokens_are_stored_only_once_they_are_counted() -> None:
    cache = DenseCache(layers=1, max_tokens=4, kv_heads=1, head_dim=2, dtype=torch.float32)
    ones = torch.ones(2, 1, 2)
    cache.store(0, ones, ones)
    assert cache.num_tokens == 0
    keys, _ = cache.store(0, 2 * ones, 2 * ones)  # the same two again
    assert torch.equal(keys, 2 * ones)
    cache.advance(2)
    assert cache.num_tokens == 2
    keys, _ = cache.store(0, 3 * ones, 3 * ones)
    assert keys[:, 0, 0].tolist() == [2, 2, 3, 3]


def test_the_cache_stores_a_copy_in_its_own_dtype() -> None:
    cache = DenseCache(layers=1, max_tokens=2, kv_heads=1, head_dim=2, dtype=torch.bfloat16)
    k = torch.ones(2, 1, 2)
    keys, _ = cache.store(0, k, k)
    k.zero_()
    assert keys.dtype == torch.bfloat16
    assert keys.sum() == 4


def test_a_token_beyond_the_last_slot_is_never_dropped_silently() -> None:
    cache = DenseCache(layers=1, max_tokens=2, kv_heads=1, head_dim=2, dtype=torch.float32)
    cache.store(0, torch.ones(2, 1, 2), torch.ones(2, 1, 2))
    cache.advance(2)
    with pytest.raises(AssertionError, match="longer than its cache"):
        cache.store(0, torch.ones(1, 1, 2), torch.ones(1, 1, 2))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_prompt_at_once_and_token_by_token_give_the_same_logits(
    variant: str, models: dict[str, Model]
) -> None:
    ids = random_ids(23)
    at_once = in_chunks(models[variant], ids, [23])
    torch.testing.assert_close(at_once, whole(models[variant], ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        in_chunks(models[variant], ids, [1] * 23), at_once, atol=1e-4, rtol=0
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_prompt_in_any_chunks_gives_the_same_logits(
    variant: str, lengths: list[int], models: dict[str, Model]
) -> None:
    ids = random_ids(sum(lengths))
    chunked = in_chunks(models[variant], ids, lengths)
    torch.testing.assert_close(chunked, whole(models[variant], ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_run_together_get_the_logits_that_each_gets_alone(
    variant: str, models: dict[str, Model]
) -> None:
    config, model = models[variant]
    runner = DenseRunner(model, config.kv_heads, config.sliding_windows)
    running = [make_sequence(1, 5), make_sequence(2, 1), make_sequence(3, 14)]
    for step in range(6):
        if step == 2:  # one arrives while the others are in the middle of their answers
            running.insert(1, make_sequence(4, 9))
        if step == 4:
            runner.release(running.pop(0))
        logits = runner.logits(running)
        assert logits.shape == (len(running), VOCAB)
        for sequence, row in zip(running, logits, strict=True):
            ids = torch.tensor([*sequence.prompt_ids, *sequence.output_ids])
            torch.testing.assert_close(row, whole((config, model), ids)[-1], atol=1e-4, rtol=0)
            advance(sequence, int(row.argmax()))


def test_every_token_is_computed_once_at_its_own_position(
    recording: tuple[DenseRunner, RecordingTransformer],
) -> None:
    runner, model = recording
    sequence = make_sequence(1, 6)
    for _ in range(5):
        logits = runner.logits([sequence])
        assert runner.caches[1].num_tokens == len(sequence)
        advance(sequence, int(logits[0].argmax()))
    assert model.steps == [
        (list(sequence.prompt_ids), [0, 1, 2, 3, 4, 5]),
        *(([token_id], [6 + step]) for step, token_id in enumerate(sequence.output_ids[:-1])),
    ]


def test_a_cache_has_slots_for_the_longest_answer_and_no_more(
    recording: tuple[DenseRunner, RecordingTransformer],
) -> None:
    runner, model = recording
    runner.logits([make_sequence(1, 6, max_output=5)])
    assert runner.caches[1].kv.shape == (2, 3, 11, 2, model.head_dim)


def test_release_frees_the_keys_and_values_of_that_sequence_alone(
    recording: tuple[DenseRunner, RecordingTransformer],
) -> None:
    runner, _ = recording
    first, second = make_sequence(1, 5), make_sequence(2, 4)
    runner.logits([first, second])
    freed, kept = weakref.ref(runner.caches[1].kv), weakref.ref(runner.caches[2].kv)
    runner.release(first)
    assert list(runner.caches) == [2]
    assert freed() is None
    assert kept() is not None


def test_a_sequence_that_was_never_run_can_be_released(
    recording: tuple[DenseRunner, RecordingTransformer],
) -> None:
    runner, _ = recording
    runner.release(make_sequence(1, 5))
    assert runner.caches == {}
