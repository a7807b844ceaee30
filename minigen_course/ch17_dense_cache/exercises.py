"""Checks of chapter 17: a KV cache, and a runner that computes only new tokens."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal
from minigen_course.lab.small_model import KV_HEADS, RecordingModel, recording_model

CacheClass = type[Any]  # a learner's class need not inherit from the package's
RunnerClass = type[Any]

AXES = ("token", "head", "dimension")
LOGITS = ("sequence", "token")
WINDOWS = (None, 4, None)


def _new(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, 3, 4, generator=generator)
    return k, v


def _cache(part: CacheClass, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    return part(layers, 12, 3, 4, dtype)


def _store(cache: Any, layer_id: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found = cache.store(layer_id, k, v)
    expect(found is not None, "store returned None; return all keys and values of the layer.")
    expect_equal(len(found), 2, "the length of what store returns (keys and values)")
    return found[0], found[1]


def _expect_stored(found: tuple[Tensor, Tensor], parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    keys, values = zip(*parts, strict=True)
    expect_close(found[0], torch.cat(keys), "the keys that store returns", AXES)
    expect_close(found[1], torch.cat(values), "the values that store returns", AXES)


def what_is_stored_comes_back(part: CacheClass) -> None:
    """three tokens in an empty cache:"""
    k, v = _new(3, 1)
    _expect_stored(_store(_cache(part), 0, k, v), [(k, v)])


def new_tokens_stand_behind_the_old(part: CacheClass) -> None:
    """three tokens, then one, then two:"""
    cache, stored = _cache(part, layers=1), []
    for seed, num_tokens in enumerate((3, 1, 2)):
        stored.append(_new(num_tokens, seed))
        _expect_stored(_store(cache, 0, *stored[-1]), stored)
        cache.advance(num_tokens)
        expect_equal(cache.num_tokens, (3, 4, 6)[seed], "num_tokens after advance")


def it_can_be_filled_to_its_last_place(part: CacheClass) -> None:
    """twelve tokens in a cache for twelve:"""
    cache, stored = _cache(part, layers=1), [_new(11, 1), _new(1, 2)]
    _store(cache, 0, *stored[0])
    cache.advance(11)
    _expect_stored(_store(cache, 0, *stored[1]), stored)


def every_layer_has_its_own(part: CacheClass) -> None:
    """two layers store in turn:"""
    cache = _cache(part)
    stored: tuple[list[Any], list[Any]] = ([], [])
    for step, num_tokens in enumerate((2, 1)):
        for layer_id in (0, 1):
            stored[layer_id].append(_new(num_tokens, 10 * layer_id + step))
            _expect_stored(_store(cache, layer_id, *stored[layer_id][-1]), stored[layer_id])
        cache.advance(num_tokens)


def tokens_stay_once_they_are_counted(part: CacheClass) -> None:
    """without advance, the next store writes to the same positions:"""
    cache = _cache(part)
    expect_equal(cache.num_tokens, 0, "num_tokens of a new cache")
    _store(cache, 0, *_new(2, 1))
    expect_equal(cache.num_tokens, 0, "num_tokens after store, before advance")
    again = _new(3, 2)
    _expect_stored(_store(cache, 0, *again), [again])


def the_cache_stores_a_copy_in_its_own_dtype(part: CacheClass) -> None:
    """a bfloat16 cache that stores float32 tensors, which change afterwards:"""
    cache = _cache(part, dtype=torch.bfloat16)
    k, v = _new(2, 1)
    before = k.bfloat16().float(), v.bfloat16().float()
    _store(cache, 0, k, v)
    cache.advance(2)
    k.zero_()
    v.zero_()
    new_k, new_v = _new(1, 2)
    more = new_k.bfloat16().float(), new_v.bfloat16().float()
    found = _store(cache, 0, *more)
    expect(found[0].dtype == torch.bfloat16, f"keys are {found[0].dtype}; they should be bfloat16.")
    _expect_stored(found, [before, more])


def caches_share_nothing(part: CacheClass) -> None:
    """two caches of two sequences:"""
    first, second = _cache(part), _cache(part)
    stored, other = _new(2, 1), _new(2, 2)
    _store(first, 0, *stored)
    first.advance(2)
    expect_equal(second.num_tokens, 0, "num_tokens of the other cache")
    _expect_stored(_store(second, 0, *other), [other])
    more = _new(1, 3)
    _expect_stored(_store(first, 0, *more), [stored, more])


def _runner(part: RunnerClass) -> tuple[Any, RecordingModel]:
    model = recording_model(WINDOWS)
    return part(model, KV_HEADS, WINDOWS), model


def _sequence(sequence_id: int, *prompt_ids: int) -> Sequence:
    return Sequence(sequence_id, prompt_ids, SamplingParams(temperature=0.0), 0, 7, frozenset())


def _step(runner: Any, model: RecordingModel, sequences: list[Sequence]) -> None:
    """Run one step as the engine does, and expect the logits of the whole texts."""
    found = runner.logits(sequences)
    if len(sequences) == 1:
        _expect_run(model, sequences[0])
    right = torch.stack([model.whole(list(each.token_ids)) for each in sequences])
    expect_close(found, right, "the logits of the next tokens", LOGITS, tolerance=1e-3)
    for sequence, row in zip(sequences, right, strict=True):
        sequence.num_computed = len(sequence)
        sequence.append(int(row.argmax()))


def _expect_run(model: RecordingModel, sequence: Sequence) -> None:
    """Expect the model to run the sequence's new tokens, once and at their positions."""
    done, tokens = sequence.num_computed, [each for ids, _ in model.steps for each in ids]
    if done and tokens == [*sequence.token_ids[:done], *sequence.token_ids[done - 1 :]]:
        raise Wrong(
            f"token {done - 1} of the text was run again in the next step; it should be run "
            "once, because its logits have already given the next token."
        )
    expect_equal(model.steps[-1][0], sequence.token_ids[done:], "the tokens of this step")
    expect_equal(model.steps[-1][1], list(range(done, len(sequence))), "the tokens' positions")
    expect_equal(tokens, sequence.token_ids, "the tokens of all steps so far")


def prefill_gives_the_first_token(part: RunnerClass) -> None:
    """the first step, which runs the prompt and returns its last token's logits:"""
    runner, model = _runner(part)
    _step(runner, model, [_sequence(1, 5, 3, 8, 2)])
    expect_equal(len(model.steps), 1, "the number of runs of the model")


def every_token_is_computed_once(part: RunnerClass) -> None:
    """each further step, which runs the one new token at its own position:"""
    runner, model = _runner(part)
    sequence = _sequence(1, 5, 3, 8, 2)
    for _ in range(4):
        _step(runner, model, [sequence])


def sequences_do_not_see_each_other(part: RunnerClass) -> None:
    """three sequences together, one of which arrives later:"""
    runner, model = _runner(part)
    running = [_sequence(1, 5, 3, 8, 2, 9, 9), _sequence(2, 7)]
    for step in range(4):
        if step == 1:
            running.insert(1, _sequence(3, 1, 2, 3))
        _step(runner, model, running)


def what_is_released_is_forgotten(part: RunnerClass) -> None:
    """a sequence ends, and another one gets its id:"""
    runner, model = _runner(part)
    first, other = _sequence(1, 5, 3, 8), _sequence(2, 4, 11, 6)
    _step(runner, model, [first, other])
    runner.release(first)
    runner.release(_sequence(9, 1))  # never run
    _step(runner, model, [other, _sequence(1, 6)])


CHECKS = {
    "DenseCache": (
        what_is_stored_comes_back,
        new_tokens_stand_behind_the_old,
        it_can_be_filled_to_its_last_place,
        every_layer_has_its_own,
        tokens_stay_once_they_are_counted,
        the_cache_stores_a_copy_in_its_own_dtype,
        caches_share_nothing,
    ),
    "DenseRunner": (
        prefill_gives_the_first_token,
        every_token_is_computed_once,
        sequences_do_not_see_each_other,
        what_is_released_is_forgotten,
    ),
}
