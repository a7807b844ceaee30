"""The engine: an answer is the same however it was batched, chunked, shared, preempted or forked.

The oracle is the dense cache, one sequence at a time. Where the oracle's two likeliest tokens are
within 1e-4 of each other, a different answer is a tie, and is counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.engine.model_runner import PagedRunner
from minigen.errors import CapacityError, OptionError, ParamsError, RequestError
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.transformer import build_transformer, dense_linear
from minigen.sampling.sampler import BatchSampler
from minigen.sequence import SampledToken, ScheduledChunk, Sequence
from minigen.trace.events import EventKind, Recorder
from minigen_course.ch17_dense_cache.reference import DenseRunner
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

TIE = 1e-4
NUM_TOKENS = 11
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
SHORT = ["as so", "as so on", "as so far", "q", "zz", "as so it is", "as soon", "other"]

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(seed=3, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)

MIXED = [GREEDY, SEEDED] * 4  # side by side in every batch

# Each engine does something to its sequences that the oracle never does.
ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "chunks of one token beside decodes": {"max_num_seqs": 3, "max_num_batched_tokens": 3},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of one": {"block_size": 1, "max_num_seqs": 3},
    "blocks of five": {"block_size": 5, "max_num_batched_tokens": 50},
    "preempted": {"num_blocks": 17, "block_size": 2, "max_num_seqs": 8},
    "preempted in chunks": {
        **{"num_blocks": 17, "block_size": 2, "max_num_seqs": 6},
        **{"max_num_batched_tokens": 11, "enable_prefix_caching": False},
    },
    "static batches": {"scheduler": "static", "max_num_seqs": 3},
    "dynamic batches": {"scheduler": "dynamic", "max_num_seqs": 3, "max_num_batched_tokens": 30},
}


@dataclass
class Tally:
    """The number of tokens compared with the oracle's, and how differences are excused."""

    num_tokens: int = 0
    num_ties: int = 0  # positions where the oracle's two likeliest were nearly equal
    num_diverged: int = 0  # answers that chose the other token there


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """One tally for all tests; printed at the end of the session."""
    tally = Tally()
    yield tally
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\n{tally.num_tokens} tokens compared with the oracle's, {tally.num_ties} ties, "
            f"{tally.num_diverged} answers diverged at one"
        )


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral-window"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(path, request.param, vocab_size=TINY_VOCAB)
    save_tokenizer(path)
    return path


class Oracle:
    """One sequence at a time over the dense cache; records where its choice was a tie.

    It caches its answers, because many engines get the same requests.
    """

    def __init__(self, directory: Path, tally: Tally):
        checkpoint = open_checkpoint(directory)
        self.config, self.tally = checkpoint.config, tally
        model = build_transformer(
            self.config, checkpoint.tensors, torch.float32, dense_linear(torch.float32)
        )
        self.runner = DenseRunner(model, self.config.kv_heads, self.config.sliding_windows)
        self.sampler = BatchSampler()
        self.known: dict[object, tuple[list[int], set[int]]] = {}

    def answer(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, choice: int = 0
    ) -> tuple[list[int], set[int]]:
        """Return the tokens, and the positions where the two likeliest were tied."""
        key = prompt_ids, repr(params), choice
        if key not in self.known:
            self.known[key] = self._compute(prompt_ids, params, choice)
        return self.known[key]

    def check(
        self, ours: list[int], prompt_ids: tuple[int, ...], params: SamplingParams, choice: int = 0
    ) -> None:
        """Check that our answer is the oracle's, or diverges from it at a tie."""
        expected, ties = self.answer(prompt_ids, params, choice)
        self.tally.num_tokens += len(ours)
        self.tally.num_ties += len(ties)
        if ours == expected:
            return
        assert len(ours) == len(expected)
        parting = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b)
        assert params.greedy, f"seeded answers diverge at token {parting}"
        assert parting in ties, f"answers diverge at token {parting}, where there is no tie"
        self.tally.num_diverged += 1

    def _compute(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, choice: int
    ) -> tuple[list[int], set[int]]:
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


@pytest.fixture(scope="module")
def oracle(directory: Path, tally: Tally) -> Oracle:
    return Oracle(directory, tally)


def prompts_for(engine: str) -> list[str]:
    """Return several short prompts for a small pool, so that preempted ones soon run again."""
    return SHORT if engine.startswith("preempted") else PROMPTS


def manager_of(llm: LLM) -> BlockManager:
    return llm.engine.runner.manager  # type: ignore[attr-defined,no-any-return]


def is_whole(llm: LLM) -> bool:
    manager = manager_of(llm)
    everything = manager.allocator.num_blocks  # type: ignore[attr-defined]
    return not llm.engine.live and not manager.rows and manager.num_available == everything


def sequences_of(llm: LLM, prompts: list[str], params: SamplingParams) -> list[Sequence]:
    return [answer.sequence for answer in llm._requests.process(prompts, params)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_answer_equals_the_oracles(directory: Path, oracle: Oracle, engine: str) -> None:
    llm = LLM.load(directory, weights="float32", **ENGINES[engine])
    with llm.record() as recorder:
        outputs = llm.generate(prompts_for(engine), MIXED, progress=False)
        if engine == "as it comes":  # once more, with a warm prefix cache
            outputs += llm.generate(PROMPTS, MIXED, progress=False)
    for output, params in zip(outputs, MIXED * (len(outputs) // len(MIXED)), strict=True):
        oracle.check(output.token_ids, output.prompt_token_ids, params)
    assert is_whole(llm)
    happened = Counter(event.kind for event in recorder.events)
    preempted = Counter(
        event.sequence_id for event in recorder.events if event.kind is EventKind.PREEMPTED
    )
    if engine.startswith("preempted"):
        assert max(preempted.values()) >= 2, "some sequence was preempted repeatedly"
    else:
        assert not preempted
    caching = ENGINES[engine].get("enable_prefix_caching", True)
    assert (happened[EventKind.PREFIX_HIT] > 0) == caching


@pytest.mark.parametrize("engine", ["small chunks", "preempted"])
def test_forked_answers_are_those_of_sequences_that_were_never_forked(
    directory: Path, oracle: Oracle, engine: str
) -> None:
    llm = LLM.load(directory, weights="float32", **ENGINES[engine])
    params = SamplingParams(seed=9, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    with llm.record() as recorder:
        outputs = llm.generate(prompts_for(engine)[:3], params, progress=False)
    for output in outputs:
        for choice in output.choices:
            oracle.check(choice.token_ids, output.prompt_token_ids, params, choice.index)
    happened = Counter(event.kind for event in recorder.events)
    assert happened[EventKind.FORKED] == 6
    assert happened[EventKind.BLOCK_COPIED] > 0
    assert is_whole(llm)


@pytest.mark.parametrize("scheduler", ["continuous", "static", "dynamic"])
def test_more_answers_than_running_slots_are_computed_one_by_one(
    directory: Path, oracle: Oracle, scheduler: str
) -> None:
    llm = LLM.load(directory, weights="float32", max_num_seqs=2, scheduler=scheduler)
    params = SamplingParams(seed=9, n=3, max_tokens=5, ignore_eos=True)
    output = llm.generate("abc", params)
    for choice in output.choices:
        oracle.check(choice.token_ids, output.prompt_token_ids, params, choice.index)


def test_aborted_neighbours_change_nothing(directory: Path, oracle: Oracle) -> None:
    llm = LLM.load(directory, weights="float32", num_blocks=60, block_size=4, max_num_seqs=8)
    pair = [PROMPTS[1], PROMPTS[3]]
    kept = llm.stream_deltas(pair, [GREEDY, SEEDED])
    given_up = [llm.stream_deltas([prompt], GREEDY) for prompt in PROMPTS[4:]]
    taken: dict[int, list[int]] = {0: [], 1: []}
    for step, delta in enumerate(kept):
        taken[delta.prompt].append(delta.token_id)
        if step % 3 == 0 and given_up:
            stream = given_up.pop()
            next(stream)
            stream.close()
    assert not given_up
    for index, params in enumerate([GREEDY, SEEDED]):
        oracle.check(taken[index], tuple(llm.tokenizer.encode(pair[index])), params)
    assert is_whole(llm)


class FailingRunner:
    """A runner that fails in chosen steps."""

    def __init__(self, runner: Any, *failing: int):
        self.runner, self.manager = runner, runner.manager
        self.failing, self.num_steps = failing, 0

    def logits(self, chunks: list[ScheduledChunk]) -> Float[Tensor, "samples vocab"]:
        self.num_steps += 1
        if self.num_steps in self.failing:
            raise ArithmeticError(f"step {self.num_steps} failed")
        return self.runner.logits(chunks)


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_an_error_in_a_step_costs_only_that_steps_sequences(
    tiny_directory: Path, scheduler: str
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=2, scheduler=scheduler)
    expected = llm.generate("c", GREEDY).token_ids
    doomed = sequences_of(llm, ["a", "b", "c"], GREEDY)
    llm.engine.runner = FailingRunner(llm.engine.runner, 3)
    for sequence in doomed:
        llm.engine.add(sequence)
    with llm.record() as recorder:
        llm.engine.step()
        llm.engine.step()
        with pytest.raises(ArithmeticError, match="step 3 failed") as raised:
            llm.engine.step()
    assert [sequence.finish_reason for sequence in doomed] == ["error", "error", None]
    assert [sequence.error for sequence in doomed] == [raised.value, raised.value, None]
    assert [len(sequence.output_ids) for sequence in doomed] == [2, 2, 0]
    assert not manager_of(llm).rows
    ended = [event.sequence_id for event in recorder.events if event.kind is EventKind.FAILED]
    assert ended == [sequence.sequence_id for sequence in doomed[:2]]
    while llm.engine.has_work():
        llm.engine.step()
    assert doomed[2].output_ids == expected
    assert is_whole(llm)


def test_an_error_before_the_fork_costs_the_whole_family(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    family = sequences_of(llm, ["a"], SamplingParams(seed=1, n=3, max_tokens=3))
    llm.engine.runner = FailingRunner(llm.engine.runner, 1)
    llm.engine.add(family[0])
    with pytest.raises(ArithmeticError):
        llm.engine.step()
    assert [sequence.finish_reason for sequence in family] == ["error"] * 3
    assert is_whole(llm)


def test_two_streams_in_turn_both_raise_what_their_step_raised(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    expected = llm.generate("later", GREEDY).token_ids
    llm.engine.runner = FailingRunner(llm.engine.runner, 4)
    one, other = (llm.stream_deltas([prompt], GREEDY) for prompt in ("abc", "xyz"))
    heard: dict[int, Exception] = {}
    for _ in range(NUM_TOKENS):
        for number, stream in enumerate((one, other)):
            if number not in heard:
                try:
                    next(stream)
                except ArithmeticError as error:
                    heard[number] = error
    assert heard[0] is heard[1]
    assert str(heard[0]) == "step 4 failed"
    assert llm.generate("later", GREEDY).token_ids == expected
    assert is_whole(llm)


def test_a_schedulers_error_is_raised_though_another_streams_error_is_pending(
    tiny_directory: Path,
) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    llm.engine.runner = FailingRunner(llm.engine.runner, 2)
    one, other = (llm.stream_deltas([prompt], GREEDY) for prompt in ("abc", "xyz"))
    next(one)
    with pytest.raises(ArithmeticError):
        list(other)  # and `one` has not raised it yet
    llm.engine.scheduler = BrokenScheduler()
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate("abc", GREEDY)
    with pytest.raises(ArithmeticError):
        next(one)


class Collecting(FailingRunner):
    """A runner during whose second step Python collects an unreferenced stream."""

    forgotten: Any

    def logits(self, chunks: list[ScheduledChunk]) -> Float[Tensor, "samples vocab"]:
        if self.num_steps == 1:
            self.forgotten.close()
        return super().logits(chunks)


def test_a_stream_collected_during_a_step_does_not_affect_others(
    tiny_directory: Path,
) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    expected = llm.generate("abc", GREEDY).token_ids
    runner = Collecting(llm.engine.runner)
    llm.engine.runner, runner.forgotten = runner, llm.stream_deltas(["xyz"], GREEDY)
    next(runner.forgotten)
    assert llm.generate("abc", GREEDY).token_ids == expected
    assert is_whole(llm)
    assert not llm._steps.dispatcher._subscriptions


class BrokenScheduler:
    """Accepts every sequence and fails to schedule."""

    def add(self, sequence: Sequence) -> None:
        pass

    def abort(self, sequence: Sequence) -> None:
        pass

    def schedule(self) -> list[ScheduledChunk]:
        raise RuntimeError("this scheduler is broken")

    def commit(self, chunks: Any, tokens: Any) -> list[tuple[Sequence, SampledToken]]:
        raise AssertionError("nothing was scheduled")


def test_an_abort_of_an_unknown_id_and_an_id_in_use_are_refused(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    sequence, twin = sequences_of(llm, ["abc", "xyz"], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="No request with id"):
        llm.engine.abort(sequence.sequence_id)
    llm.engine.add(sequence)
    twin.sequence_id = sequence.sequence_id
    with pytest.raises(RequestError, match="give each live sequence its own id"):
        llm.engine.add(twin)
    assert llm.engine.live == {sequence.sequence_id: sequence}
    llm.engine.step()
    assert sequence.finish_reason is not None
    for end in (llm.engine.abort, llm.engine.finish):
        with pytest.raises(RequestError, match="No request with id"):
            end(sequence.sequence_id)
    first, second = sequences_of(llm, ["abc"], SamplingParams(max_tokens=1, n=2))
    second.sequence_id = first.sequence_id
    with pytest.raises(RequestError, match="give each live sequence its own id"):
        llm.engine.add(first)
    assert is_whole(llm)


def test_the_answers_of_one_request_are_whole_when_they_are_built(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=3)
    three, four = (
        [
            each.sequence
            for each in llm.process_requests(
                ["abc"], SamplingParams(n=n), priority=7, cache_salt="mine"
            )
        ]
        for n in (3, 4)
    )
    assert [each.siblings for each in three] == [tuple(three[1:]), (), ()]
    assert [each.siblings for each in four] == [()] * 4, "more than run at once"
    ids = [each.sequence_id for each in three + four]
    assert ids == sorted(set(ids))
    assert [each.choice for each in three + four] == [0, 1, 2, 0, 1, 2, 3]
    assert {(each.priority, each.cache_salt) for each in three + four} == {(7, "mine")}
    assert len({each.seed for each in three}) == 1


def test_a_lower_priority_is_answered_first(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    usual = llm.stream_deltas(["abc", "xyz"], params, priority=5)
    assert next(usual).prompt == 0
    with llm.record() as recorder:
        llm.generate("urgent", params, priority=-1)
        rest = [delta.prompt for delta in usual]
    assert rest == [0, 0, 1, 1, 1]
    started = [event.sequence_id for event in recorder.events if event.kind is EventKind.SCHEDULED]
    ran = list(dict.fromkeys(started))
    first, second, urgent = sorted(ran)
    assert ran == [first, urgent, second], "though it came last"


def test_only_requests_with_the_same_cache_salt_share_a_prefix(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=1)
    hits = []
    for salt in ["mine", "yours", "mine", None]:
        with llm.record() as recorder:
            llm.generate(SHARED, params, cache_salt=salt)
        hits.append(any(event.kind is EventKind.PREFIX_HIT for event in recorder.events))
    assert hits == [False, False, True, False]


@pytest.mark.parametrize(
    "wrong",
    [{"priority": 0.5}, {"priority": True}, {"priority": "1"}, {"cache_salt": 3}],
    ids=str,
)
def test_a_wrong_priority_or_cache_salt_is_refused_by_name(
    tiny_llm: LLM, wrong: dict[str, Any]
) -> None:
    (name,) = wrong
    with pytest.raises(ParamsError, match=name):
        tiny_llm.generate("abc", **wrong)
    with pytest.raises(ParamsError, match=name):
        tiny_llm.stream_deltas(["abc"], **wrong)


def test_an_answer_that_a_stop_string_ends_is_reported_as_finished(tiny_llm: LLM) -> None:
    text = tiny_llm.generate("abc", GREEDY).text
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=text[2:4])
    with tiny_llm.record() as recorder:
        output = tiny_llm.generate("abc", params)
    assert output.choices[0].finish_reason == "stop"
    assert len(output.token_ids) < NUM_TOKENS
    kinds = Counter(event.kind for event in recorder.events)
    (finished,) = [each for each in recorder.events if each.kind is EventKind.FINISHED]
    assert finished.counts["stopped"] == 1
    assert kinds[EventKind.ABORTED] == kinds[EventKind.PREEMPTED] == 0


def test_steps_are_packed_into_the_same_buffers(tiny_llm: LLM) -> None:
    runner, scheduler = tiny_llm.engine.runner, tiny_llm.engine.scheduler
    assert isinstance(runner, PagedRunner)
    for sequence in sequences_of(tiny_llm, ["abcde", "xyz"], GREEDY):
        tiny_llm.engine.add(sequence)
    prompts = runner.packer.pack(scheduler.schedule())
    assert len(prompts.token_ids) == 10, "each with a first token in front"
    places = [value.ctypes.data for value in prompts]
    assert len(set(places)) == 7
    tiny_llm.engine.step()
    decodes = runner.packer.pack(scheduler.schedule())
    assert len(decodes.token_ids) == 2
    again = [value.ctypes.data for value in decodes]
    assert again == places


def test_sequences_that_were_added_directly_move_on_beside_answers(tiny_llm: LLM) -> None:
    expected = tiny_llm.generate("abc", GREEDY).token_ids
    (own,) = sequences_of(tiny_llm, ["abc"], GREEDY)
    tiny_llm.engine.add(own)
    tiny_llm.engine.step()  # and the cell has been interrupted
    assert tiny_llm.generate("abc", GREEDY).token_ids == expected
    assert own.output_ids == expected
    assert is_whole(tiny_llm)


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
        ({"kv_cache_memory": 100}, "holds no block"),
        ({"kv_cache_memory": 10**6, "num_blocks": 5}, "one of them"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "at least max_num_seqs"),
        ({"prefix_cache": 1}, "prefix_cache"),
    ],
)
def test_an_impossible_pool_is_refused_at_the_start(
    tiny_directory: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        LLM.load(tiny_directory, **options)


def test_kv_memory_bounds_the_pool(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", kv_cache_memory=200_000)
    pool = llm.engine.runner.pool.kv  # type: ignore[attr-defined]
    one_block = pool.nbytes // pool.shape[2]
    assert 200_000 - one_block < pool.nbytes - one_block <= 200_000


def test_a_trace_records_the_life_of_each_sequence_only_while_subscribed(
    tiny_directory: Path,
) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    recorder = Recorder(capacity=50)
    llm.engine.trace.subscribe(recorder)
    llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    kinds = [event.kind for event in recorder.events]
    assert kinds[0] == EventKind.QUEUED
    assert kinds.count(EventKind.NEW_TOKEN) == kinds.count(EventKind.STEP) == 3
    (finished,) = [each for each in recorder.events if each.kind is EventKind.FINISHED]
    assert finished.counts == {"output_tokens": 3, "stopped": 0}
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


def test_almost_no_answer_diverged_from_the_oracles_even_at_a_tie(tally: Tally) -> None:
    assert tally.num_diverged <= max(1, tally.num_tokens // 10_000)
