"""Speculation never changes a text: equality with speculation off is the test, whatever drafts are.

The proposers here are adversaries: they know the right answer, or the wrong one, or propose what no
model says.
"""

import json
import random
import re
import shutil
import tracemalloc
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigen import LLM, SamplingParams
from minigen.engine.dispatcher import SharedSteps
from minigen.errors import MinigenError, OptionError, PartError
from minigen.outputs import RequestOutput
from minigen.sequence import Sequence, num_matching
from minigen.server.app import create_service
from minigen.server.metrics import MetricsPage, metrics_router, metrics_watcher
from minigen.server.models import ModelHost
from minigen.speculative.ngram import NgramIndex, NgramProposer
from minigen.speculative.pace import MeasuredPace, StepTimes, rising
from minigen.speculative.predicted import PredictedFirst
from minigen.speculative.suffix import SuffixProposer
from minigen.trace.chrome import chrome_trace
from minigen.trace.events import EventKind
from minigen.trace.timeline import Timeline
from tests.serving import is_empty, load_tiny, serving
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

TOKENS = 24
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40 + each for each in range(30)], [9], [5, 6, 7, 8, 9, 5, 6]]
Answers = dict[tuple[tuple[int, ...], int], list[int]]  # by prompt and choice


class Knowing:
    """Knows the right answers, and spoils each draft with the probability `wrong`."""

    def __init__(self, answers: Answers, wrong: float = 0.0, seed: int = 0):
        self.answers, self.wrong = answers, wrong
        self.random = random.Random(seed)
        self.ended: list[Sequence] = []

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        return [self._propose(*each) for each in zip(sequences, counts, strict=True)]

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        known = self.answers.get((sequence.prompt_ids, sequence.choice), [])
        first = len(sequence.output_ids)
        if known[:first] != sequence.output_ids:
            return []
        right = known[first : first + count]
        return [
            (each + 1) % TINY_VOCAB if self.random.random() < self.wrong else each for each in right
        ]

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence)


class Always:
    """Proposes the same tokens for every sequence, more than it is asked for."""

    def __init__(self, *token_ids: int):
        self.token_ids = token_ids

    def propose(self, sequences: Any, counts: Any) -> Any:
        return [list(self.token_ids) * 40 for _ in sequences]

    def end(self, sequence: Sequence) -> None:
        pass


class Chance(Always):
    """Proposes random tokens, and sometimes none."""

    def propose(self, sequences: Any, counts: Any) -> Any:
        return [
            [random.randrange(TINY_VOCAB) for _ in range(random.randint(0, count))]
            for count in counts
        ]


def params_of(**more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, **more)
        for seed, temperature in enumerate((0.0, 1.0, 0.7, 1.0))
    ]


def answers_of(outputs: list[RequestOutput]) -> Answers:
    return {
        (output.prompt_token_ids, choice.index): choice.token_ids
        for output in outputs
        for choice in output.choices
    }


def load(directory: Path, weights: str = "float32", **options: Any) -> LLM:
    return LLM.load(directory, weights=weights, **options)


def speculating(directory: Path, proposer: Any, most: int = 5, **options: Any) -> LLM:
    config = {"num_speculative_tokens": most, "adaptive": False}
    return load(directory, proposer=proposer, speculative_config=config, **options)


@pytest.fixture(scope="module")
def plain(tiny_directory: Path) -> LLM:
    return load(tiny_directory)


@pytest.fixture(scope="module")
def known(plain: LLM) -> Answers:
    return answers_of(plain.generate(PROMPTS, params_of(ignore_eos=True)))


PROPOSERS: dict[str, Any] = {
    "right": Knowing,
    "half": lambda answers: Knowing(answers, 0.5),
    "wrong": lambda answers: Knowing(answers, 1.0),
    "chance": lambda answers: Chance(),
    "end tokens": lambda answers: Always(2),
    "out of vocabulary": lambda answers: Always(TINY_VOCAB, -1, 2**40),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "few blocks": {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 4},
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "plain") for name in PROPOSERS),
        *((name, engine) for name in ("half", "chance") for engine in [*ENGINES][1:]),
    ],
)
def test_a_text_is_the_same_with_any_proposer(
    tiny_directory: Path, known: Answers, name: str, engine: str
) -> None:
    llm = speculating(tiny_directory, PROPOSERS[name](known), **ENGINES[engine])
    with llm.record() as recorder:
        outputs = llm.generate(PROMPTS, params_of(ignore_eos=True))
    assert answers_of(outputs) == known
    assert is_empty(llm)
    assert llm.engine.speculator is not None
    counts = llm.engine.speculator.counts
    verified = [each.counts for each in recorder.events if each.kind is EventKind.VERIFIED]
    assert sum(each["drafted"] for each in verified) == counts.drafted
    assert sum(each["accepted"] for each in verified) == counts.accepted == sum(counts.accepted_at)
    timeline = Timeline().replay(recorder.events)
    assert timeline.requests == timeline.strangers == {}, "no event follows an end"
    if engine == "few blocks":
        assert any(each.kind is EventKind.PREEMPTED for each in recorder.events)
    else:
        assert timeline.work.tokens_recomputed == 0
    if name == "right":
        assert counts.accepted == counts.drafted > 0
    elif name in ("wrong", "end tokens"):
        assert counts.drafted > counts.accepted == 0
    elif name == "out of vocabulary":
        assert counts.drafted == 0
    elif name == "half":
        assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("engine", ENGINES)
def test_events_say_what_was_computed_when_drafts_are_wrong(
    tiny_directory: Path, known: Answers, engine: str
) -> None:
    llm = speculating(tiny_directory, PROPOSERS["half"](known), **ENGINES[engine])
    compared = 0

    def compare(_: object) -> None:
        nonlocal compared
        for request in timeline.running:
            compared += 1
            assert request.num_computed == llm.engine.live[request.sequence_id].num_computed

    timeline = Timeline(on_step=compare)
    with llm.trace.subscribed(timeline):
        llm.generate(PROMPTS, params_of(ignore_eos=True))
    assert compared > TOKENS


def test_a_step_with_drafts_is_drawn_as_a_decode(tiny_directory: Path, known: Answers) -> None:
    llm = speculating(tiny_directory, PROPOSERS["wrong"](known), enable_prefix_caching=False)
    with llm.record() as recorder:
        llm.generate(PROMPTS[:1], params_of(ignore_eos=True)[:1])
    drawn = [each["name"] for each in chrome_trace(recorder.events)["traceEvents"]]
    assert drawn.count("decode") == TOKENS - 1
    assert "recompute" not in drawn


def test_no_draft_follows_the_end_of_an_answer(tiny_directory: Path, plain: LLM) -> None:
    asked = SamplingParams(temperature=1, seed=1, max_tokens=TOKENS, stop_token_ids=[7])
    llm = speculating(tiny_directory, Always(5, 7, 5))
    output = llm.generate(PROMPTS[:1], asked)
    assert answers_of(output) == answers_of(plain.generate(PROMPTS[:1], asked))
    counts = llm.engine.speculator.counts if llm.engine.speculator else None
    assert counts is not None
    assert counts.drafted == counts.drafts > 0


def test_right_drafts_save_steps(tiny_directory: Path, known: Answers) -> None:
    llm = speculating(tiny_directory, Knowing(known), most=5)
    with llm.record() as recorder:
        llm.generate(PROMPTS[1:2], params_of(ignore_eos=True)[1:2])
    steps = sum(each.kind is EventKind.STEP for each in recorder.events)
    assert steps == 1 + -(-(TOKENS - 1) // 6)  # the prompt's gives one token, the others six


@pytest.mark.model
def test_compiled_steps_give_the_same_text(default_model_path: Path) -> None:
    prompts = ["one two three one two three one two", "def add(a, b):\n    return a + b\n\ndef "]
    asked = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
        for temperature in (0.0, 0.9)
    ]
    options: dict[str, Any] = {"weights": "int4", "num_blocks": 64}
    expected = answers_of(LLM.load(default_model_path, **options).generate(prompts, asked))
    for proposer in (Knowing(expected, 0.3), NgramProposer(1, 3)):
        llm = speculating(default_model_path, proposer, **options)
        assert llm.describe()["runner"].startswith("a whole step compiled")
        assert answers_of(llm.generate(prompts, asked)) == expected
        assert llm.engine.speculator is not None
        assert llm.engine.speculator.counts.accepted > 0


def test_ranks_give_the_same_text(tiny_directory: Path, known: Answers) -> None:
    llm = speculating(tiny_directory, Knowing(known, 0.3), tensor_parallel_size=2)
    try:
        assert answers_of(llm.generate(PROMPTS, params_of(ignore_eos=True))) == known
    finally:
        llm.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "bias": {"logit_bias": {7: 3.0, 8: -3.0}},
    "least tokens": {"min_tokens": 10},
    "stop tokens": {"stop_token_ids": list(range(0, TINY_VOCAB, 5))},
    "stop strings": {"stop": ["a", "e", "0"]},
    "stop strings kept": {"stop": ["a", "e", "0"], "include_stop_str_in_output": True},
    "log probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "several answers": {"n": 3},
    "short": {"stop": ["zzz"], "n": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_an_answer_is_the_same_in_all_it_has(
    tiny_directory: Path, plain: LLM, name: str, wrong: float
) -> None:
    settings = SETTINGS[name]
    own = "ignore_eos" if "stop" not in name and name != "least tokens" else ""
    asked = params_of(**settings, **({own: True} if own else {}))
    # Drafts know the answers without stops, so that some go beyond the end of an answer.
    free = {key: value for key, value in settings.items() if not key.startswith(("stop", "incl"))}
    unstopped = answers_of(plain.generate(PROMPTS, params_of(**free, ignore_eos=True)))
    expected = plain.generate(PROMPTS, asked)
    for choice in (each for output in expected for each in output.choices):
        assert choice.finish_reason in ("stop", "length")

    llm = speculating(tiny_directory, Knowing(unstopped, wrong), block_size=4)
    found = llm.generate(PROMPTS, asked)
    for ours, theirs in zip(found, expected, strict=True):
        for own_choice, choice in zip(ours.choices, theirs.choices, strict=True):
            assert own_choice.token_ids == choice.token_ids
            assert own_choice.text == choice.text
            assert own_choice.finish_reason == choice.finish_reason
            assert len(own_choice.logprobs or ()) == len(choice.logprobs or ())
            for one, other in zip(own_choice.logprobs or (), choice.logprobs or (), strict=True):
                assert one.keys() == other.keys()
                for token_id in one:
                    assert one[token_id].rank == other[token_id].rank
                    assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-4)
        assert len(ours.prompt_logprobs or ()) == len(theirs.prompt_logprobs or ())
    assert is_empty(llm)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.counts.accepted > 0


FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("proposer", ["grammar", "chance", "right", "end tokens"])
def test_a_grammar_rolls_back(tiny_directory: Path, plain: LLM, proposer: str) -> None:
    asked = [
        SamplingParams(
            temperature=1, seed=seed, max_tokens=60, n=2, structured_outputs={"json": FORM}
        )
        for seed in range(4)
    ]
    expected = answers_of(plain.generate(PROMPTS, asked))
    if proposer == "grammar":
        config = {"method": "grammar", "adaptive": False}
        llm = load(tiny_directory, speculative_config=config)
    else:
        llm = speculating(tiny_directory, PROPOSERS[proposer](expected))
    outputs = llm.generate(PROMPTS, asked)
    assert answers_of(outputs) == expected
    for output in outputs:
        for choice in output.choices:
            if choice.finish_reason == "stop":
                assert set(json.loads(choice.text)) == {"name", "age"}
    assert llm.engine.speculator is not None
    if proposer in ("grammar", "right"):
        assert llm.engine.speculator.counts.accepted > 0


def test_a_processor_that_cannot_roll_back_gets_no_drafts(
    tiny_directory: Path, known: Answers
) -> None:
    class Counting:
        def __init__(self, params: SamplingParams, prompt_ids: tuple[int, ...]):
            self.accepted: list[int] = []

        def __call__(self, logits: Any, output_ids: SequenceOf[int]) -> Any:
            assert list(output_ids) == self.accepted
            return logits

        def accept(self, token_id: int) -> None:
            self.accepted.append(token_id)

    class RollsBack(Counting):
        def roll_back(self, count: int) -> None:
            del self.accepted[len(self.accepted) - count :]

    for processor, drafts in ((Counting, False), (RollsBack, True)):
        llm = speculating(tiny_directory, Knowing(known, 0.3), logits_processor=processor)
        assert answers_of(llm.generate(PROMPTS, params_of(ignore_eos=True))) == known
        assert llm.engine.speculator is not None
        assert (llm.engine.speculator.counts.drafted > 0) == drafts


def test_an_aborted_answer_leaves_nothing(tiny_directory: Path, known: Answers) -> None:
    knowing = Knowing(known)
    llm = speculating(tiny_directory, knowing, block_size=4)
    stream = llm.stream(PROMPTS[1], params_of(ignore_eos=True)[1])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert is_empty(llm)
    assert len(knowing.ended) == 1


def test_only_right_tokens_reach_the_prefix_cache(tiny_directory: Path, known: Answers) -> None:
    llm = speculating(tiny_directory, Knowing(known, 0.4), block_size=4)
    answers = answers_of(llm.generate(PROMPTS, params_of(ignore_eos=True)))
    for (prompt, _), answer in answers.items():
        text = [*prompt, *answer]
        after = llm.generate([text], SamplingParams(temperature=0, max_tokens=4))[0]
        fresh = load(tiny_directory).generate([text], SamplingParams(temperature=0, max_tokens=4))
        assert after.token_ids == fresh[0].token_ids


def draft_models(tiny_directory: Path) -> dict[str, dict[str, Any]]:
    return {
        "itself": {"model": str(tiny_directory)},
        "fewer layers": {"num_layers": 1},
    }


@pytest.mark.parametrize("which", ["itself", "fewer layers"])
@pytest.mark.parametrize("engine", ["plain", "small chunks", "few blocks"])
def test_a_draft_model_follows(
    tiny_directory: Path, known: Answers, which: str, engine: str
) -> None:
    config = {
        "method": "draft_model",
        "weights": "float32",
        "adaptive": False,
        "num_speculative_tokens": 3,
        **draft_models(tiny_directory)[which],
    }
    llm = load(tiny_directory, speculative_config=config, **ENGINES[engine])
    assert answers_of(llm.generate(PROMPTS, params_of(ignore_eos=True))) == known
    speculator: Any = llm.engine.speculator
    if which == "itself":  # the same model draws the same tokens with the same random numbers
        assert speculator.counts.accepted == speculator.counts.drafted > 0
    else:
        assert speculator.counts.drafted > 0
    manager = speculator.proposer.proposer.proposer.manager
    assert manager.num_available == manager.allocator.num_blocks


@pytest.mark.parametrize("context", [12, 20])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_draft_model_may_have_a_shorter_context(
    tmp_path: Path, context: int, weights: str
) -> None:
    """One of less than a prompt, and one that is no multiple of a block's 16 tokens."""
    sizes = {"vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    save_model(tmp_path / "long", "llama", **sizes)
    save_tokenizer(tmp_path / "long")
    short = shutil.copytree(tmp_path / "long", tmp_path / "short")
    path = short / "config.json"
    changed = json.loads(path.read_text("utf-8")) | {"max_position_embeddings": context}
    path.write_text(json.dumps(changed), "utf-8")
    config = {"method": "draft_model", "model": str(short), "weights": weights}
    config |= {"adaptive": False, "num_speculative_tokens": 3}
    expected = load(tmp_path / "long", weights).generate(PROMPTS, params_of(ignore_eos=True))
    llm = load(tmp_path / "long", weights, speculative_config=config)
    found = llm.generate(PROMPTS, params_of(ignore_eos=True))
    assert answers_of(found) == answers_of(expected)
    counts = llm.engine.speculator.counts if llm.engine.speculator else None
    assert counts is not None
    assert counts.accepted == counts.drafted > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_lookups_give_the_same_text(
    tiny_directory: Path, plain: LLM, method: str, adaptive: bool
) -> None:
    asked = [SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)] * len(PROMPTS)
    expected = answers_of(plain.generate(PROMPTS, asked))
    config = {"method": method, "adaptive": adaptive, "prompt_lookup_min": 1}
    llm = load(tiny_directory, speculative_config=config)
    for _ in range(2):
        assert answers_of(llm.generate(PROMPTS, asked)) == expected
    assert llm.engine.speculator is not None
    if not adaptive:
        assert llm.engine.speculator.counts.accepted > 0


def sequence(token_ids: SequenceOf[int], salt: str | None = None, output: int = 0) -> Sequence:
    split = len(token_ids) - output
    return Sequence(
        0,
        tuple(token_ids[:split]),
        SamplingParams(),
        0,
        100,
        frozenset(),
        cache_salt=salt,
        output_ids=list(token_ids[split:]),
    )


def test_an_index_finds_the_latest_place_of_the_longest_run() -> None:
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 4, 9, 2, 3, 5, 3])
    assert index.find([1, 2, 3]) == 3  # longest first, although 2 3 came again
    assert index.find([7, 2, 3]) == 7
    assert index.find([8]) is None
    assert index.following(3, 3) == [4, 9, 2]
    assert index.following(7, 5) == [5, 3, 5, 3, 5]  # the end of the text, again and again


def test_an_index_agrees_with_a_search_through_the_text() -> None:
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(200)]
    index = NgramIndex(1, 4)
    for end in range(1, len(text)):
        index.extend(text[len(index.token_ids) : end])
        places = [
            (length, place)
            for length in range(1, 5)
            for place in range(length, end)
            if text[place - length : place] == text[end - length : end]
        ]
        expected = max(places)[1] if places else None
        assert index.find(text[:end]) == expected


def test_a_salt_keeps_answers_apart() -> None:
    proposer = SuffixProposer(2, 4)
    done = sequence([1, 2, 3, 4, 5, 6], "mine", output=4)
    done.finish_reason = "stop"
    proposer.end(done)
    assert proposer.propose([sequence([9, 3, 4], "mine")], [2]) == [[5, 6]]
    assert proposer.propose([sequence([9, 3, 4], "other")], [2]) == [[]]
    assert proposer.propose([sequence([9, 3, 4])], [2]) == [[]]
    aborted = sequence([1, 2, 7, 7, 8], None, output=3)
    aborted.finish_reason = "abort"
    proposer.end(aborted)
    assert proposer.propose([sequence([9, 7, 7])], [2]) == [[]]


def test_finished_answers_are_bounded() -> None:
    proposer = SuffixProposer(2, 4, most_tokens=50)
    for salt in range(20):
        done = sequence([1, 2, 3, *range(10, 20)], str(salt), output=10)
        done.finish_reason = "stop"
        proposer.end(done)
    known = [proposer.propose([sequence([9, 11, 12], str(salt))], [1])[0] for salt in range(20)]
    assert known == [[]] * 17 + [[13]] * 3


def test_the_latest_answers_stay_when_older_ones_of_the_same_salt_are_forgotten() -> None:
    proposer, start = SuffixProposer(2, 4, most_tokens=100), 0
    for start in range(0, 2000, 100):
        done = sequence([1, 2, 3, 4, *range(start, start + 21)], output=21)
        done.finish_reason = "stop"
        proposer.end(done)
        for earlier in range(max(start - 100, 0), start + 100, 100):
            drafts = proposer.propose([sequence([9, earlier + 5, earlier + 6])], [2])
            assert drafts == [[earlier + 7, earlier + 8]]
    assert proposer.propose([sequence([9, start - 995, start - 994])], [2]) == [[]]


def test_long_runs_take_no_more_memory_than_short_ones() -> None:
    rng, sizes = random.Random(0), []
    text = [rng.randrange(50_000) for _ in range(2000)]
    for longest in (2, 64):
        index = NgramIndex(2, longest)
        tracemalloc.start()
        index.extend(text)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize(
    ("drafts", "sampled", "right"),
    [
        ([], [4], 0),
        ([4], [4, 5], 1),
        ([4, 6], [4, 5, 6], 1),
        ([1], [2, 1], 0),
        ([1, 2], [1], 1),
        ([1, 2], [3], 0),
    ],
)
def test_drafts_are_right_up_to_the_first_wrong_one(
    drafts: list[int], sampled: list[int], right: int
) -> None:
    assert num_matching(drafts, sampled) == right


def test_times_between_measured_ones_lie_on_a_line() -> None:
    times = StepTimes()
    times.learn(1, 1.0)
    assert times(1) == 1.0
    assert times(3) > times(2) > 1.0
    times.learn(5, 3.0)
    assert times(3) == pytest.approx(2.0)
    for _ in range(4):
        times.learn(5, 3.0)
    times.learn(5, 8.0)  # the newest of many counts for a fifth
    assert times(5) == pytest.approx(4.0)


def test_more_rows_never_take_less_time_by_noise() -> None:
    times = StepTimes()
    for rows, seconds in {1: 1.0, 2: 9.0, 3: 1.5, 4: 1.5, 9: 6.0}.items():
        times.learn(rows, seconds)
    assert [times(rows) for rows in (1, 2, 3, 4, 9)] == [1.0, 4.0, 4.0, 4.0, 6.0]
    for _ in range(4):  # one slow step is outvoted
        times.learn(3, 1.5)
    assert times(3) == pytest.approx((9.0 + 5 * 1.5 + 1.5) / 7)


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 5)), max_size=9))
def test_times_rise_and_keep_their_sum(measured: list[tuple[float, int]]) -> None:
    found = rising(measured)
    assert found == sorted(found)
    weights = [weight for _, weight in measured]
    kept = sum(value * weight for value, weight in zip(found, weights, strict=True))
    assert kept == pytest.approx(sum(value * weight for value, weight in measured))


def paced(
    share: float, cost: float, batch: int = 1, tokens: int = 512, slow: int = 0
) -> tuple[float, int]:
    """Return the time of answers of `tokens` tokens, with steps that take 1 + cost per row more.

    Drafts are right by chance. The clock shows three times as much for the first `slow` tokens, as
    on a machine that does something else. Also return the number of drafts.
    """
    rng, pace = random.Random(1), MeasuredPace()
    sequences = [sequence([1, 2]) for _ in range(batch)]
    done, spent, drafted = [0] * batch, 0.0, 0
    while min(done) < tokens:
        counts = pace.choose(sequences, 8)
        rows = batch + sum(counts)
        seconds = 1 + cost * (rows - 1)
        spent += seconds
        shown, before = seconds * (3 if done[0] < slow else 1), sum(done)
        for index, count in enumerate(counts):
            right = 0
            while right < count and rng.random() < share:
                right += 1
            drafted += count
            done[index] += right + 1
            pace.learn_right(sequences[index], count, right, right + 1)
        pace.learn_step(batch, rows, sum(done) - before, shown)
    return spent, drafted


def test_drafts_that_are_right_are_asked_for() -> None:
    spent, _ = paced(share=0.95, cost=0.05)
    assert 512 / spent > 3.0


def test_a_run_of_bad_luck_does_not_end_drafts_that_pay() -> None:
    spent, _ = paced(share=0.8, cost=0.36, tokens=4096)
    best = max((1 - 0.8 ** (k + 1)) / (1 - 0.8) / (1 + 0.36 * k) for k in range(9))
    assert 4096 / spent > 0.9 * best


@pytest.mark.parametrize("slow", [0, 3, 15, 40])
@pytest.mark.parametrize("cost", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_drafts_that_fail_cost_at_most_three_percent(batch: int, cost: float, slow: int) -> None:
    spent, drafted = paced(share=0.0, cost=cost, batch=batch, slow=slow)
    without = 512 * (1 + cost * (batch - 1))
    assert without < spent <= 1.03 * without
    assert drafted > 0  # it did try


def test_a_batch_whose_steps_are_long_gets_no_drafts() -> None:
    _, alone = paced(share=0.6, cost=0.2)
    _, together = paced(share=0.6, cost=0.2, batch=32)
    assert alone > 50
    assert together / 32 < 0.2 * alone


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "speculative_config is no JSON"),
    "a list": ("[1]", "must be a JSON object"),
    "unknown": ({"methods": "ngram"}, "has no setting 'methods'"),
    "unknown method": ({"method": "eagle"}, "method must be one of"),
    "no method": ({"num_speculative_tokens": 3}, "needs a method, or a proposer"),
    "too many": ({"method": "ngram", "num_speculative_tokens": 0}, "a whole number from 1"),
    "backwards": (
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
        "prompt_lookup_min 5 must be at most prompt_lookup_max 2",
    ),
    "no draft": ({"method": "draft_model"}, "needs a model"),
    "too deep": ({"method": "draft_model", "num_layers": 99}, "num_layers of speculative_config"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_is_wrong_is_named(tiny_directory: Path, name: str) -> None:
    setting, message = WRONG[name]
    with pytest.raises(OptionError, match=message):
        load(tiny_directory, speculative_config=setting)


def test_other_schedulers_verify_no_drafts(tiny_directory: Path) -> None:
    with pytest.raises(OptionError, match="speculation needs the scheduler 'continuous'"):
        load(tiny_directory, speculative_config={"method": "ngram"}, scheduler="static")

    class Own:
        def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
            pass

        add = schedule = commit = abort = lambda self, *_: None

    with pytest.raises(MinigenError, match="verifies no drafts"):
        load(tiny_directory, speculative_config={"method": "ngram"}, scheduler=Own)


BROKEN: dict[str, tuple[Any, str]] = {
    "too few": (lambda sequences, counts: [], "returned 0 lists for 1 sequences"),
    "no lists": (lambda sequences, counts: [7 for _ in sequences], "a list with a list"),
    "no tokens": (lambda sequences, counts: [["x"] for _ in sequences], "returned 'x' as a token"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_proposer_that_breaks_its_contract_is_named(
    tiny_directory: Path, known: Answers, name: str
) -> None:
    propose, message = BROKEN[name]
    broken = SimpleNamespace(propose=propose, end=lambda sequence: None)
    llm = speculating(tiny_directory, broken)
    with pytest.raises(PartError, match=message):
        llm.generate(PROMPTS[:1], params_of()[:1])
    assert is_empty(llm)
    own: Any = llm.engine.speculator
    own.proposer.proposer.proposer = Knowing(known)
    again = llm.generate(PROMPTS, params_of(ignore_eos=True))
    assert answers_of(again) == known


def test_a_predicted_answer_needs_fewer_steps(tiny_directory: Path, plain: LLM) -> None:
    asked = SamplingParams(temperature=1, seed=3, max_tokens=80, ignore_eos=True)
    expected = answers_of(plain.generate(PROMPTS[1:2], asked))
    (answer,) = expected.values()
    edited = [*answer[:30], 9, 9, *answer[34:]]
    llm = load(tiny_directory)
    for predicted, most_steps in ((answer, 40), (edited, 50), ([9] * 80, 80), ([], 80)):
        states = llm.process_requests([PROMPTS[1]], asked, predicted_ids=predicted)
        with llm.record() as recorder:
            for _ in SharedSteps(llm.engine).run(states):
                pass
        steps = sum(each.kind is EventKind.STEP for each in recorder.events)
        assert states[0].choice.token_ids == answer
        assert steps <= most_steps
        assert (states[0].sequence.num_accepted > 40) == (most_steps < 80)


def test_a_server_takes_predictions_and_counts_them(tiny_directory: Path) -> None:
    shown = MetricsPage()
    models = {"tiny": partial(load_tiny, tiny_directory)}
    host = ModelHost(models, watchers=[metrics_watcher(shown)])
    with serving(host, create_service(host, routers=[metrics_router(shown)])) as url:
        letters = {"regex": "[a-z]{60}"}  # so that the text has the tokens of the answer
        messages = [{"role": "user", "content": "ab"}]
        body = {"messages": messages, "seed": 1, "max_tokens": 60, "structured_outputs": letters}
        first = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        text = first["choices"][0]["message"]["content"]
        assert "completion_tokens_details" not in first["usage"]
        body["prediction"] = {"type": "content", "content": [{"type": "text", "text": text}]}
        again = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        details = again["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 10
        page = httpx.get(f"{url}/metrics").text
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        counts = {name: metric(page, f"minigen:spec_decode_{name}_total") for name in names}
        assert counts["num_accepted_tokens"] == details["accepted_prediction_tokens"]
        at = re.findall(r'accepted_tokens_per_pos_total{.*position="(\d+)"} (\d+)', page)
        assert sum(int(count) for _, count in at) == counts["num_accepted_tokens"]
        wrong = httpx.post(f"{url}/v1/chat/completions", json=body | {"prediction": "text"})
        assert wrong.status_code == 400
        assert "prediction" in wrong.json()["error"]["message"]
        for part in ({"type": "image_url"}, 1, {"type": "text", "text": 5}):
            asked = {"prediction": {"type": "content", "content": [part]}}
            refused = httpx.post(f"{url}/v1/chat/completions", json=body | asked)
            assert refused.status_code == 400
            assert "The prediction has content that is not" in refused.json()["error"]["message"]


def test_a_prediction_is_as_long_as_the_context_at_most_and_indexed_once(
    tiny_directory: Path,
) -> None:
    llm = load_tiny(tiny_directory)
    most, params = llm.config.max_positions, SamplingParams(n=3, max_tokens=4)
    answers = llm.process_requests([[5, 6]], params, predicted_ids=[7] * (most + 100))
    proposer = PredictedFirst(NgramProposer(1, 2))
    sequences = [each.sequence for each in answers]
    assert [len(each.predicted_ids) for each in sequences] == [most] * 3
    for each in sequences:
        each.output_ids.append(7)
    proposer.propose(sequences, [1] * 3)
    assert len({id(proposer._indexes[each]) for each in sequences}) == 1
    for each in sequences:
        proposer.end(each)
    assert not proposer._indexes


def metric(page: str, name: str) -> int:
    found = re.search(rf"(?m)^{name}{{.*}} (\d+)", page)
    assert found is not None, name
    return int(float(found[1]))
