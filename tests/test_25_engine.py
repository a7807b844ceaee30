"""The engine: an answer is the same however it was batched, chunked, shared, preempted or forked.

The oracle is the dense cache, one sequence at a time. Where the oracle's two likeliest tokens are
within 1e-4 of each other a difference would be a tie, and is counted.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.cache.dense import DenseRunner
from minigen.checkpoint import open_checkpoint
from minigen.errors import CapacityError, OptionError
from minigen.model.transformer import build_transformer, dense_linear
from minigen.sampling import BatchSampler
from minigen.sequence import Sequence
from minigen.trace import EventKind, Recorder
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

TIE = 1e-4
NUM_TOKENS = 18
SHARED = "one long beginning that many of the prompts have in common, "
PROMPTS = [
    "a",
    SHARED + "first",
    SHARED + "second",
    "something else altogether",
    SHARED,
    SHARED + "first and more of it",
    "x" * 33,
    "zz",
]

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(seed=3, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)

# Each is an engine that does something to its sequences that the oracle never does.
ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "one at a time": {"max_sequences": 1},
    "small chunks": {"max_sequences": 4, "max_batch_tokens": 7},
    "chunks of one token beside decodes": {"max_sequences": 3, "max_batch_tokens": 3},
    "no prefix cache": {"prefix_cache": False},
    "blocks of one": {"block_size": 1},
    "blocks of five": {"block_size": 5, "max_batch_tokens": 50},
    "preempted": {"num_blocks": 40, "block_size": 4, "max_sequences": 8},
    "preempted in chunks": {
        **{"num_blocks": 30, "block_size": 4, "max_sequences": 6},
        **{"max_batch_tokens": 11, "prefix_cache": False},
    },
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral-window"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(path, request.param, vocab_size=TINY_VOCAB)
    save_tokenizer(path)
    return path


class Oracle:
    """One sequence at a time over the dense cache; remembers where its choice was a tie."""

    def __init__(self, directory: Path):
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        model = build_transformer(
            self.config, checkpoint.tensors, torch.float32, dense_linear(torch.float32)
        )
        self.runner = DenseRunner(model, self.config.kv_heads, self.config.sliding_windows)
        self.sampler = BatchSampler()

    def answer(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, choice: int = 0
    ) -> tuple[list[int], set[int]]:
        """The tokens, and the places where the two likeliest were tied."""
        assert params.max_tokens is not None
        sequence = Sequence(
            1, prompt_ids, params, params.seed or 0, params.max_tokens, frozenset(), choice
        )
        ties = set()
        while sequence.finish_reason is None:
            logits = self.runner.logits([sequence])
            best, second = logits[0].topk(2).values
            if best - second < TIE:
                ties.add(len(sequence.output_ids))
            (token,) = self.sampler(logits, [sequence])
            sequence.num_computed = len(sequence)
            sequence.append(token.token_id)
        self.runner.release(sequence)
        return sequence.output_ids, ties


def assert_same(ours: list[int], oracle: tuple[list[int], set[int]], greedy: bool) -> None:
    expected, ties = oracle
    if ours == expected:
        return
    parting = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b)
    assert greedy, f"seeded answers part at token {parting}"
    assert parting in ties, f"answers part at token {parting}, where there is no tie"


def is_whole(llm: LLM) -> bool:
    manager = llm.engine.scheduler.manager  # type: ignore[attr-defined]
    return not manager.rows and manager.num_available == manager.allocator.num_blocks


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_answer_is_the_oracles(directory: Path, engine: str, params: SamplingParams) -> None:
    oracle = Oracle(directory)
    llm = LLM.load(directory, weights="float32", **ENGINES[engine])
    recorder = Recorder()
    llm.engine.trace.subscribe(recorder)
    for _ in range(2):  # the second time the prefix cache is warm
        for output in llm.generate(PROMPTS, params):
            expected = oracle.answer(output.prompt_token_ids, params)
            assert_same(output.token_ids, expected, params.greedy)
    assert is_whole(llm)
    happened = Counter(event.kind for event in recorder.events)
    assert (happened[EventKind.PREEMPTED] > 0) == engine.startswith("preempted")
    caching = ENGINES[engine].get("prefix_cache", True)
    assert (happened[EventKind.PREFIX_HIT] > 0) == caching


@pytest.mark.parametrize("engine", ["as it comes", "small chunks", "preempted"])
def test_forked_answers_are_those_of_sequences_that_were_never_forked(
    directory: Path, engine: str
) -> None:
    oracle = Oracle(directory)
    llm = LLM.load(directory, weights="float32", **ENGINES[engine])
    recorder = Recorder()
    llm.engine.trace.subscribe(recorder)
    params = SamplingParams(seed=9, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    for output in llm.generate(PROMPTS[:3], params):
        for choice in output.choices:
            expected = oracle.answer(output.prompt_token_ids, params, choice.index)
            assert_same(choice.token_ids, expected, greedy=False)
    happened = Counter(event.kind for event in recorder.events)
    assert happened[EventKind.FORKED] == 6
    assert happened[EventKind.BLOCK_COPIED] > 0
    assert is_whole(llm)


def test_more_answers_than_seats_are_computed_one_by_one(directory: Path) -> None:
    oracle = Oracle(directory)
    llm = LLM.load(directory, weights="float32", max_sequences=2)
    params = SamplingParams(seed=9, n=5, max_tokens=6, ignore_eos=True)
    output = llm.generate("abc", params)
    for choice in output.choices:
        expected = oracle.answer(output.prompt_token_ids, params, choice.index)
        assert_same(choice.token_ids, expected, greedy=False)


def test_neighbours_that_are_given_up_change_nothing(directory: Path) -> None:
    oracle = Oracle(directory)
    llm = LLM.load(directory, weights="float32", num_blocks=60, block_size=4, max_sequences=8)
    kept = llm.stream_deltas([PROMPTS[1], PROMPTS[3]], GREEDY)
    given_up = [llm.stream_deltas([prompt], GREEDY) for prompt in PROMPTS[4:]]
    taken: dict[int, list[int]] = {0: [], 1: []}
    for step, delta in enumerate(kept):
        taken[delta.prompt].append(delta.token_id)
        if step % 5 == 0 and given_up:
            stream = given_up.pop()
            next(stream)
            stream.close()
    for prompt, token_ids in zip((PROMPTS[1], PROMPTS[3]), taken.values(), strict=True):
        prompt_ids = tuple(llm.tokenizer.encode(prompt))
        assert_same(token_ids, oracle.answer(prompt_ids, GREEDY), greedy=True)
    assert is_whole(llm)


def test_an_error_in_a_step_costs_only_that_steps_sequences(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_sequences=2)
    expected = llm.generate("c", GREEDY).token_ids
    doomed = [
        sequence
        for prompt in ("a", "b", "c")
        for sequence in [llm._requests.answers([prompt], GREEDY)[0].sequence]
    ]
    for sequence in doomed:
        llm.engine.add(sequence)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "logits", lambda chunks: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    assert [sequence.finish_reason for sequence in doomed] == ["abort", "abort", None]
    while llm.engine.has_work():
        llm.engine.step()
    assert doomed[2].output_ids == expected
    assert is_whole(llm)


def test_a_request_that_the_pool_can_never_hold_is_refused_with_the_numbers(
    tiny_directory: Path,
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", num_blocks=4, block_size=8)
    with pytest.raises(CapacityError, match=r"20 tokens and an answer of 13 .* 32 tokens"):
        llm.generate([5] * 20, SamplingParams(max_tokens=13))
    fits = llm.generate([5] * 20, SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(fits.token_ids) == 12
    unlimited = llm.generate([5] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(unlimited.token_ids) == 12
    with pytest.raises(CapacityError):
        llm.generate([5] * 32, SamplingParams(max_tokens=None))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": -1}, "block_size"),
        ({"kv_memory": 100}, "holds no block"),
        ({"kv_memory": 10**6, "num_blocks": 5}, "one of them"),
        ({"max_batch_tokens": 4, "max_sequences": 8}, "at least max_sequences"),
        ({"prefix_cache": 1}, "prefix_cache"),
    ],
)
def test_an_impossible_pool_is_refused_at_the_start(
    tiny_directory: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        LLM.load(tiny_directory, **options)


def test_kv_memory_bounds_the_pool(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", kv_memory=200_000)
    pool = llm.engine.runner.pool.kv  # type: ignore[attr-defined]
    one_block = pool.nbytes // pool.shape[2]
    assert 200_000 - one_block < pool.nbytes - one_block <= 200_000


def test_a_trace_tells_the_life_of_each_sequence_and_nothing_unasked(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    recorder = Recorder(capacity=50)
    llm.engine.trace.subscribe(recorder)
    llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    kinds = [event.kind for event in recorder.events]
    assert kinds[0] == EventKind.QUEUED
    assert kinds.count(EventKind.NEW_TOKEN) == kinds.count(EventKind.STEP) == 3
    assert EventKind.FINISHED in kinds
    times = [event.time_ns for event in recorder.events]
    assert times == sorted(times)
    llm.engine.trace.unsubscribe(recorder)
    llm.generate("abc", GREEDY)
    assert [event.kind for event in recorder.events] == kinds
    small = Recorder(capacity=4)
    llm.engine.trace.subscribe(small)
    llm.generate("abc", GREEDY)
    assert len(small.events) == 4
    assert small.num_dropped > 0
