"""Checks of chapter 17: a KV cache, a runner of only new tokens, and predictions of time."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.ch17_dense_cache.estimates import (
    compute_bound_batch,
    prefill_seconds,
    step_seconds,
)
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal
from minigen_course.lab.cost_model import MACHINES, SHAPES, Machine, ModelShape
from minigen_course.lab.small_model import KV_HEADS, RecordingModel, recording_model

CacheClass = type[Any]  # a learner's class need not inherit from the course's
RunnerClass = type[Any]
Estimate = Callable[..., Any]

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


WINDOW = 3


def _expect_window(
    found: tuple[Tensor, Tensor], stored: list[tuple[Tensor, Tensor]], window: int
) -> None:
    """Expect the last tokens' keys in any order, each beside its value."""
    last = list(enumerate(stored))[-window:]
    keys, values = found
    wanted = f"{len(last)} tokens, after {len(stored)} with a window of {window}"
    expect(len(keys) == len(last), f"store returned {len(keys)} keys; it should return {wanted}.")
    expect(len(values) == len(last), f"store returned {len(values)} values; it should be {wanted}.")
    for token, (k, v) in last:
        same = [row for row, key in enumerate(keys) if torch.allclose(key.float(), k[0])]
        expect(same, f"the key of token {token} is missing; store should return the last {wanted}.")
        expect(
            any(torch.allclose(values[row].float(), v[0]) for row in same),
            f"beside the key of token {token} there should be its value.",
        )


def _fill_window(part: CacheClass, count: int, window: int = WINDOW) -> None:
    cache, stored = part(1, window, 3, 4, torch.float32), []
    for token in range(count):
        stored.append(_new(1, token))
        _expect_window(_store(cache, 0, *stored[-1]), stored, window)
        cache.advance()


def a_window_fills_up(part: CacheClass) -> None:
    """three tokens in a window of three:"""
    _fill_window(part, 3)


def the_oldest_token_leaves(part: CacheClass) -> None:
    """eight tokens in a window of three, and four in a window of one:"""
    _fill_window(part, 8)
    _fill_window(part, 4, window=1)


def every_layer_has_its_own_window(part: CacheClass) -> None:
    """two layers store in turn, in bfloat16, and the tensors change afterwards:"""
    cache = part(2, WINDOW, 3, 4, torch.bfloat16)
    stored: tuple[list[Any], list[Any]] = ([], [])
    for token in range(5):
        for layer_id in (0, 1):
            k, v = _new(1, 10 * layer_id + token)
            stored[layer_id].append((k.bfloat16().float(), v.bfloat16().float()))
            found = _store(cache, layer_id, k, v)
            expect(
                found[0].dtype == torch.bfloat16,
                f"keys are {found[0].dtype}; they should be bfloat16.",
            )
            k.zero_()
            v.zero_()
            _expect_window(found, stored[layer_id], WINDOW)
        cache.advance()


def tokens_of_a_window_are_counted_by_advance(part: CacheClass) -> None:
    """without advance, the next store replaces the token:"""
    cache, first, again = part(1, WINDOW, 3, 4, torch.float32), _new(1, 1), _new(1, 2)
    _store(cache, 0, *first)
    cache.advance()
    _store(cache, 0, *_new(1, 3))
    _expect_window(_store(cache, 0, *again), [first, again], WINDOW)


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


NEAR = 0.05  # of a batch that was worked out on paper
EXACT = 1e-6
H100, L4, RTX_4090 = (MACHINES[name] for name in ("H100 SXM", "L4", "RTX 4090"))
LAPTOP = Machine("a laptop", 50e9, 500e9)


def _expect_batch(part: Estimate, context: int) -> None:
    right, found = compute_bound_batch(context), part(context)
    name = f"the batch for a context of {context:,}"
    if right is None:
        why = "a sequence's keys and values take longer to read than its arithmetic takes"
        expect(found is None, f"{name} is {found!r}; it should be None: {why}.")
        return
    expect(found is not None, f"{name} is None; it should be a number: large batches reach it.")
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    expect(is_number, f"{name} is {found!r}; it should be a number or None.")
    near = abs(found - right) <= NEAR * right
    expect(near, f"{name} is {found:,.4g}; it should be within 5 % of {right:,}.")


def weights_alone_decide_at_a_short_context(part: Estimate) -> None:
    """a context of one token, where the KV cache hardly counts:"""
    _expect_batch(part, 1)


def keys_and_values_count(part: Estimate) -> None:
    """a context of 100 tokens:"""
    _expect_batch(part, 100)


def no_batch_helps_at_a_long_context(part: Estimate) -> None:
    """contexts of 1,000 and 8,000 tokens:"""
    _expect_batch(part, 1000)
    _expect_batch(part, 8000)


def _sizes(shape: ModelShape) -> dict[str, float]:
    names = ("layers", "q_heads", "kv_heads", "head_dim")
    return {"weights": shape.multiplied} | {name: getattr(shape, name) for name in names}


def _limits(machine: Machine) -> dict[str, float]:
    return {"bandwidth": machine.bandwidth, "peak": machine.flops}


def _expect_seconds(
    found: Any, right: float, case: str, slips: Mapping[str, Callable[[], float]]
) -> None:
    """Raise `Wrong` unless a time is right; name the slip that gives the same number."""
    expect(
        isinstance(found, int | float) and not isinstance(found, bool),
        f"{case}: returned {found!r}; it should be a number of seconds.",
    )
    if math.isclose(found, right, rel_tol=EXACT):
        return
    same = [name for name, slip in slips.items() if math.isclose(found, slip(), rel_tol=1e-9)]
    why = f" You get this number if {same[0]}." if same else ""
    raise Wrong(f"{case}: {1e3 * found:,.4g} ms; it should be {1e3 * right:,.4g} ms.{why}")


def _predict(part: Estimate, model: str, machine: Machine, **more: float) -> None:
    given = _sizes(SHAPES[model]) | _limits(machine) | more
    bits, kv_bits = given.get("weight_bits", 16), given.get("kv_bits", 16)
    batch, overhead = given["batch"], given.get("overhead", 0.0)

    def without(**changed: float) -> float:
        return step_seconds(**(given | changed))  # type: ignore[arg-type]

    slips = {
        "bits are taken for bytes": lambda: without(weight_bits=8 * bits, kv_bits=8 * kv_bits),
        "the weights are read once for each sequence": lambda: without(weight_bits=batch * bits),
        "only keys are counted, and no values": lambda: without(kv_bits=kv_bits / 2),
        "the KV cache is counted by query heads": lambda: without(
            kv_bits=kv_bits * given["q_heads"] / given["kv_heads"]
        ),
        "the KV cache of one sequence only is read": lambda: without(kv_bits=kv_bits / batch),
        "the KV cache is forgotten": lambda: without(kv_bits=0),
        "both times are added, instead of taking the longer one": lambda: (
            without(peak=math.inf) + without(bandwidth=math.inf) - overhead
        ),
        "the overhead is forgotten": lambda: without(overhead=0),
        "a weight costs one FLOP": lambda: without(peak=2 * given["peak"]),
        "the shorter of both times is taken": lambda: min(
            without(peak=math.inf), without(bandwidth=math.inf)
        ),
        "milliseconds are returned": lambda: 1e3 * without(),
    }
    context = int(given["context"])
    case = f"{model} on {machine.name}, batch {int(batch)}, context {context:,}"
    _expect_seconds(part(**given), without(), case, slips)


def one_sequence_waits_for_memory(part: Estimate) -> None:
    """Llama-3-70B in 8 bits on an H100, one sequence:"""
    _predict(part, "Llama-3-70B", H100, batch=1, context=1000, weight_bits=8)


def a_batch_shares_the_weights(part: Estimate) -> None:
    """Llama-3-8B in 16 bits on an L4, 32 sequences with long contexts:"""
    _predict(part, "Llama-3-8B", L4, batch=32, context=4000)


def arithmetic_limits_a_large_batch(part: Estimate) -> None:
    """Llama-3-8B on an H100, 1,000 sequences with short contexts:"""
    _predict(part, "Llama-3-8B", H100, batch=1000, context=64)


def formats_differ(part: Estimate) -> None:
    """Llama-2-7B with 4.5-bit weights and an 8-bit KV cache on an RTX 4090:"""
    _predict(part, "Llama-2-7B", RTX_4090, batch=4, context=2000, weight_bits=4.5, kv_bits=8)


def the_overhead_is_added_at_the_end(part: Estimate) -> None:
    """SmolLM2-135M in float32 on a laptop, with 40 ms of overhead:"""
    _predict(
        part,
        "SmolLM2-135M",
        LAPTOP,
        **{"batch": 1, "context": 500, "weight_bits": 32, "kv_bits": 32, "overhead": 0.04},
    )


def _prefill(part: Estimate, model: str, machine: Machine, **more: float) -> None:
    shape = SHAPES[model]
    head = {"head": shape.vocab * shape.hidden}
    given = _sizes(shape) | _limits(machine) | head | more
    tokens = int(given["prompt_tokens"])

    def without(**changed: float) -> float:
        return prefill_seconds(**(given | changed))  # type: ignore[arg-type]

    def flops(pairs: float, head_tokens: int) -> float:
        linear = 2 * (given["weights"] - given["head"]) * tokens + 2 * given["head"] * head_tokens
        scores = 4 * given["layers"] * given["q_heads"] * given["head_dim"] * pairs
        return (linear + scores) / given["peak"] + given.get("overhead", 0.0)

    slips = {
        "every token looks at all tokens": lambda: flops(tokens**2, 1),
        "a token does not look at itself": lambda: flops(tokens * (tokens - 1) / 2, 1),
        "the head is multiplied with every token": lambda: flops(tokens * (tokens + 1) / 2, tokens),
        "the head is left out": lambda: flops(tokens * (tokens + 1) / 2, 0),
        "attention is left out": lambda: flops(0, 1),
        "bits are taken for bytes": lambda: without(
            weight_bits=8 * given.get("weight_bits", 16), kv_bits=8 * given.get("kv_bits", 16)
        ),
        "milliseconds are returned": lambda: 1e3 * without(),
    }
    case = f"{model} on {machine.name}, a prompt of {tokens:,} tokens"
    _expect_seconds(part(**given), without(), case, slips)


def a_long_prompt_waits_for_arithmetic(part: Estimate) -> None:
    """Llama-3-8B on an H100, a prompt of 8,000 tokens:"""
    _prefill(part, "Llama-3-8B", H100, prompt_tokens=8000)


def a_short_prompt_waits_for_memory(part: Estimate) -> None:
    """Llama-3-70B in 8 bits on an H100, a prompt of 40 tokens:"""
    _prefill(part, "Llama-3-70B", H100, prompt_tokens=40, weight_bits=8)


def keys_and_values_of_a_prompt_count(part: Estimate) -> None:
    """Llama-2-7B in 4.5 bits on a card with little bandwidth, a prompt of 2,000 tokens:"""
    slow = Machine("a card with little bandwidth", 1e9, 1e15)
    _prefill(part, "Llama-2-7B", slow, prompt_tokens=2000, weight_bits=4.5, kv_bits=8)
    _prefill(part, "Llama-2-7B", slow, prompt_tokens=2000)


def a_prompt_has_an_overhead_too(part: Estimate) -> None:
    """SmolLM2-135M in float32 on a laptop, one token, with 40 ms of overhead:"""
    more = {"prompt_tokens": 1, "weight_bits": 32, "kv_bits": 32, "overhead": 0.04}
    _prefill(part, "SmolLM2-135M", LAPTOP, **more)


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
    "WindowCache": (
        a_window_fills_up,
        the_oldest_token_leaves,
        every_layer_has_its_own_window,
        tokens_of_a_window_are_counted_by_advance,
    ),
    "DenseRunner": (
        prefill_gives_the_first_token,
        every_token_is_computed_once,
        sequences_do_not_see_each_other,
        what_is_released_is_forgotten,
    ),
    "compute_bound_batch": (
        weights_alone_decide_at_a_short_context,
        keys_and_values_count,
        no_batch_helps_at_a_long_context,
    ),
    "step_seconds": (
        one_sequence_waits_for_memory,
        a_batch_shares_the_weights,
        arithmetic_limits_a_large_batch,
        formats_differ,
        the_overhead_is_added_at_the_end,
    ),
    "prefill_seconds": (
        a_long_prompt_waits_for_arithmetic,
        a_short_prompt_waits_for_memory,
        keys_and_values_of_a_prompt_count,
        a_prompt_has_an_overhead_too,
    ),
}
