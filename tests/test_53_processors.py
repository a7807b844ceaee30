"""Logits processors and structured outputs in the engine: what they forbid never appears.

The witnesses are Python's `re` and `json`, `jsonschema`, and models of random weights, which know
nothing of form.
"""

import json
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.engine.dispatcher import Dispatcher
from minigen.errors import GrammarError, MinigenError, OptionError, ParamsError, PartError
from minigen.sampling.grammar import MOST_CACHED, GrammarProcessor, LLGuidanceBackend
from minigen.sampling.grammar_compiler import first_line
from minigen.sampling.processors import LogitsProcessor
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer
from tests.tiny import TINY_VOCAB

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON)),
    "compact": (
        {"json": PERSON, "disable_any_whitespace": True},
        lambda text: re.fullmatch(r"\S+", re.sub(r'"[^"]*"', "", text)) and json.loads(text),
    ),
    "regex": ({"regex": "[0-9]{3}-[a-z]{2}"}, lambda text: text_matches("[0-9]{3}-[a-z]{2}", text)),
    "choice": ({"choice": ["yes", "no", "a.b"]}, lambda text: ["yes", "no", "a.b"].index(text)),
    "gbnf": (
        {"grammar": 'root ::= "<" root ">" | "x"'},
        lambda text: text_matches("(<*)x(>*)", text) and nested(text),
    ),
    "lark": (
        {"grammar": 'start: "a" start | "b"'},
        lambda text: text_matches("a*b", text),
    ),
}


def text_matches(pattern: str, text: str) -> bool:
    assert re.fullmatch(pattern, text), text
    return True


def nested(text: str) -> None:
    assert text.count("<") == text.count(">")


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 100, **more})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_that_ends_by_itself_has_its_form(tiny_llm: LLM, name: str, n: int) -> None:
    form, check = FORMS[name]
    ended = 0
    for seed in range(6):
        output = tiny_llm.generate("ab", sampled(seed=seed, n=n, structured_outputs=form))
        for choice in output.choices:
            if choice.finish_reason == "stop":
                check(choice.text)
                ended += 1
    assert ended > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": {3: 1e6, 70: -1e6}},
        {"logprobs": 3},
        {"prompt_logprobs": 1},
        {"temperature": 1e6},
    ],
    ids=str,
)
def test_no_setting_of_the_sampler_lets_a_forbidden_token_through(
    tiny_llm: LLM, settings: dict[str, Any]
) -> None:
    form = {"regex": "[0-9]{3}-[a-z]{2}"}
    output = tiny_llm.generate("ab", sampled(structured_outputs=form, **settings))
    assert output.finish_reason == "stop"
    text_matches("[0-9]{3}-[a-z]{2}", output.text)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_compiled_step_obeys_it(default_model_path: Path, temperature: float) -> None:
    """In int4 on a machine with the compiled step; in torch elsewhere."""
    llm = LLM.load(default_model_path)
    form = {"json": PERSON}
    params = sampled(temperature=temperature, max_tokens=60, structured_outputs=form, n=3)
    output = llm.generate(llm.chat_prompt([{"role": "user", "content": "A person?"}]), params)
    ended = [each.text for each in output.choices if each.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), PERSON)


def test_answers_with_a_form_leave_the_others_in_the_batch_unchanged(tiny_llm: LLM) -> None:
    free = sampled(max_tokens=12, ignore_eos=True)
    alone = tiny_llm.generate("ab", free).token_ids
    form = sampled(structured_outputs={"regex": "[0-9]{20}"})
    mixed = tiny_llm.generate(["xyz", "ab", "q"], [form, free, form])
    assert mixed[1].token_ids == alone
    assert mixed[0].text.isdigit()


def test_a_form_survives_preemption(tiny_directory: Path) -> None:
    small = LLM.load(tiny_directory, weights="float32", max_num_seqs=4, block_size=4, num_blocks=14)
    large = LLM.load(tiny_directory, weights="float32", max_num_seqs=4, block_size=4)
    params = [
        sampled(seed=seed, max_tokens=40, structured_outputs={"regex": "[0-9]{30}"})
        for seed in range(4)
    ]
    with small.count_work() as counters:
        few = small.generate(["abcd"] * 4, params, progress=False)
    assert counters.preemptions > 0
    many = large.generate(["abcd"] * 4, params, progress=False)
    assert [each.text for each in few] == [each.text for each in many]
    assert all(re.fullmatch("[0-9]{30}", each.text) for each in few)


def test_a_finished_answer_holds_no_grammar(tiny_llm: LLM) -> None:
    for end in ("finish", "abort"):
        answers = tiny_llm.process_requests(
            ["ab"], [sampled(structured_outputs={"regex": "[0-9]{50}"})]
        )
        sequence = answers[0].sequence
        assert sequence.processors
        tiny_llm.engine.add(sequence)
        tiny_llm.engine.step()
        getattr(tiny_llm.engine, end)(sequence.sequence_id)
        assert sequence.processors == ()


# What users' own processors may do


class NoLetter(LogitsProcessor):
    """Bans tokens, by their ids."""

    def __init__(self, ids: Any):
        self.ids = ids

    def __call__(self, logits: torch.Tensor, output_ids: Any) -> torch.Tensor:
        logits[self.ids] = -math.inf
        return logits


def test_a_processor_of_ones_own(tiny_directory: Path) -> None:
    banned = list(range(3, TINY_VOCAB - 5))
    llm = LLM.load(
        tiny_directory,
        weights="float32",
        logits_processor=lambda params, prompt_ids: NoLetter(banned),
    )
    assert "logits processor" in llm.describe()
    output = llm.generate("ab", sampled(max_tokens=20, ignore_eos=True))
    assert output.token_ids
    assert not set(output.token_ids) & set(banned)


def test_a_plain_function_is_a_processor(tiny_directory: Path) -> None:
    seen = []

    def own(params: SamplingParams, prompt_ids: Any) -> Any:
        def only_five(logits: torch.Tensor, output_ids: Any) -> torch.Tensor:
            seen.append((len(prompt_ids), tuple(output_ids)))
            return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([5]), 0.0)

        return only_five if params.temperature == 0 else None

    llm = LLM.load(tiny_directory, weights="float32", logits_processor=own)
    output = llm.generate("ab", SamplingParams(temperature=0, max_tokens=3))
    assert output.token_ids == [5, 5, 5]
    assert [each[1] for each in seen] == [(), (5,), (5, 5)]
    assert llm.generate("ab", sampled(max_tokens=3)).token_ids != [5, 5, 5]


class Counts:
    """Keeps state: how often it was called, and what it accepted."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.prepared = 0
        self.threads: set[str] = set()

    def __call__(self, logits: torch.Tensor, output_ids: Any) -> torch.Tensor:
        assert list(output_ids) == self.accepted
        assert self.prepared == len(self.accepted) + 1
        return logits

    def prepare(self) -> None:
        self.prepared += 1
        self.threads.add(threading.current_thread().name)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def roll_back(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]


def test_state_follows_each_answer_and_forks_with_n(tiny_directory: Path) -> None:
    made: list[Counts] = []

    def own(params: Any, prompt_ids: Any) -> Counts:
        made.append(Counts())
        return made[-1]

    llm = LLM.load(tiny_directory, weights="float32", logits_processor=own)
    output = llm.generate("ab", sampled(n=3, max_tokens=6, ignore_eos=True))
    assert len(made) == 1  # the other two are copies
    assert made[0].accepted == output.choices[0].token_ids[:-1]
    assert all("minigen-processors" in each for each in made[0].threads)


FAULTS: dict[str, tuple[Any, str]] = {
    "shape": (lambda logits, output_ids: logits[:-1], "must return [300]"),
    "nothing": (lambda logits, output_ids: None, "returned None"),
    "NaN": (lambda logits, output_ids: logits * math.nan, "at least one token"),
    "none left": (lambda logits, output_ids: logits * 0 - math.inf, "at least one token"),
    "infinity": (lambda logits, output_ids: logits + math.inf, "at least one token"),
    "raises": (lambda logits, output_ids: 1 / 0, "division by zero"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_processor_that_fails_ends_only_its_own_answer(tiny_directory: Path, name: str) -> None:
    broken, words = FAULTS[name]

    def own(params: SamplingParams, prompt_ids: Any) -> Any:
        return broken if params.temperature == 0.5 else None

    llm = LLM.load(tiny_directory, weights="float32", logits_processor=own)
    free = sampled(max_tokens=8, ignore_eos=True)
    alone = llm.generate("ab", free).token_ids
    with pytest.raises((PartError, ZeroDivisionError)) as caught:
        llm.generate(["q"], sampled(temperature=0.5, max_tokens=8), progress=False)
    assert words in str(caught.value)
    other: list[list[int]] = []
    started = threading.Event()

    def runs_beside() -> None:
        started.set()
        other.append(llm.generate("ab", free).token_ids)

    thread = threading.Thread(target=runs_beside)
    thread.start()
    started.wait()
    with pytest.raises((PartError, ZeroDivisionError)):
        llm.generate(["q"], sampled(temperature=0.5, max_tokens=8), progress=False)
    thread.join()
    assert other == [alone]
    assert not llm.engine.live
    assert llm.kv_usage == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits_processor": 3}, "called with (params, prompt_ids)"),
        ({"logits_processor": lambda params: None}, "called with (params, prompt_ids)"),
        ({"logits_processor": "no_file.py:Name"}, "no_file.py"),
        ({"grammar_backend": "outlines"}, "one of llguidance"),
    ],
)
def test_a_part_of_no_use_is_refused_at_once(
    tiny_directory: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        LLM.load(tiny_directory, weights="float32", **options)


class OnlyAs:
    """A grammar backend of one's own: the letter a, at most as often as the regex is long."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Any):
        self.letter, self.vocab_size, self.ends = tokenizer.encode("a")[-1], vocab_size, end_ids

    def compile(self, params: StructuredOutputsParams) -> Any:
        return As(self, len(params.source))


class As:
    def __init__(self, backend: OnlyAs, left: int):
        self.backend, self.left = backend, left

    def allowed(self) -> np.ndarray:
        mask = np.zeros(self.backend.vocab_size, bool)
        mask[self.backend.letter if self.left else list(self.backend.ends)] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.left -= 1

    def roll_back(self, count: int) -> None:
        self.left += count

    def fork(self) -> "As":
        return As(self.backend, self.left)


def test_a_grammar_backend_of_ones_own(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", grammar_backend=OnlyAs)
    assert llm.describe()["grammar"] == "OnlyAs"
    output = llm.generate("q", sampled(structured_outputs={"regex": "12345"}, n=2))
    assert [each.text for each in output.choices] == ["aaaaa", "aaaaa"]


def test_a_mask_of_the_wrong_form_names_the_matcher(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", grammar_backend=OnlyAs)
    for wrong in (np.ones(3, bool), np.ones(TINY_VOCAB), None):
        monkeypatch.setattr(As, "allowed", lambda self, wrong=wrong: wrong)
        with pytest.raises(PartError, match=r"As\.allowed returned"):
            llm.generate("q", sampled(structured_outputs={"regex": "12345"}))


# Forms that cannot be used

CIRCLE = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "none was given"),
    "two": ({"regex": "a", "choice": ["b"]}, "2 were given: regex, choice"),
    "unknown name": ({"guided_json": {}}, "has no 'guided_json'; it takes json"),
    "no JSON": ({"json": "{"}, "is not JSON"),
    "a list": ({"json": "[1]"}, "must be a schema, an object, not [1]"),
    "no schema": ({"json": 3}, "must be a JSON schema"),
    "remote": ({"json": {"$ref": "http://example.com/x"}}, "nothing outside of the schema"),
    "a file": ({"json": {"items": {"$ref": "file:///etc/passwd"}}}, "nothing outside"),
    "no keyword": ({"json": {"typ": "string"}, "strict": True}, "'typ'"),
    "not": ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
    "type": ({"json": {"type": "thing"}}, "Invalid type: thing"),
    "itself": ({"json": {"$ref": "#"}}, "cannot be used: a $ref leads back to itself."),
    "circle": ({"json": CIRCLE}, "cannot be used: a $ref leads back to itself."),
    "rule": ({"grammar": "root ::= root"}, "cannot be used: no token can come next."),
    "false": ({"json": {"enum": []}}, "Unsatisfiable"),
    "empty": ({"choice": []}, "a list of texts, and none may be empty"),
    "regex": ({"regex": "(a"}, "regex cannot be used"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "grammar": ({"grammar": 'root ::= "a'}, "grammar cannot be used"),
    "undefined": ({"grammar": "root ::= other"}, "grammar cannot be used"),
    "deep": ({"json": "[" * 100_000}, "64 schemas deep"),
    "long": ({"regex": "a" * 300_000}, "has 300,000 characters"),
    "flag": ({"json_object": 1}, "True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_cannot_be_used_is_refused_in_a_sentence(tiny_llm: LLM, name: str) -> None:
    form, words = REFUSED[name]
    with pytest.raises(ParamsError) as caught:
        tiny_llm.process_requests(["ab"], [sampled(structured_outputs=form)])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 450
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lexer error: too many expressions <non-verbose/>", "lexer error: too many expressions"),
        ("NoExtensionBias\n<non-verbose/>", "no token can come next"),
        ("at 3(4): a\n  3 | x\nb.", "a b"),
        ("the regex <non-verbose/> is wrong", "the regex <non-verbose/> is wrong"),
        ("a" * 400, "a" * 300),
    ],
)
def test_an_error_of_the_library_becomes_one_plain_line(text: str, line: str) -> None:
    assert first_line(text) == line


@pytest.mark.parametrize("setting", [{"min_tokens": 1}, {"ignore_eos": True}], ids=str)
def test_a_form_decides_where_an_answer_ends(setting: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match=f"{next(iter(setting))} cannot be combined"):
        SamplingParams(structured_outputs={"regex": "a"}, **setting)


def test_the_schema_is_not_strict_by_default() -> None:
    form = StructuredOutputsParams(json={"type": "string", "x-order": 3})
    assert json.loads(form.source)["x-order"] == 3


def test_a_schema_may_be_a_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        x: int

    form = StructuredOutputsParams(json=Point)
    assert json.loads(form.source)["properties"]["x"]["type"] == "integer"


# The matcher


@pytest.fixture
def backend(tiny_llm: LLM) -> LLGuidanceBackend:
    return LLGuidanceBackend(tiny_llm.tokenizer, tiny_llm.config.vocab_size, {2})


def test_going_back_undoes_what_was_accepted(backend: LLGuidanceBackend) -> None:
    matcher = backend.compile(StructuredOutputsParams(json=PERSON))
    rng, masks, taken = np.random.default_rng(3), [matcher.allowed()], []
    for _ in range(40):
        taken.append(int(rng.choice(np.flatnonzero(masks[-1]))))
        if taken[-1] == 2:
            taken.pop()
            break
        matcher.accept(taken[-1])
        masks.append(matcher.allowed())
    for count in (1, 3, len(taken) - 4):
        matcher.roll_back(count)
        del masks[len(masks) - count :]
        assert (matcher.allowed() == masks[-1]).all()


def test_a_fork_goes_its_own_way(backend: LLGuidanceBackend) -> None:
    first = backend.compile(StructuredOutputsParams(regex="a[xy]|b"))
    second = first.fork()
    a, b = (backend._compiler.vocabulary.tokenize_str(each)[0] for each in "ab")
    first.accept(a)
    second.accept(b)
    assert not (first.allowed() == second.allowed()).all()
    assert np.flatnonzero(second.allowed()).tolist() == [2]  # only the end is left


def test_the_end_is_allowed_exactly_where_the_text_matches(backend: LLGuidanceBackend) -> None:
    pattern = "(a|b)*a"
    matcher = backend.compile(StructuredOutputsParams(regex=pattern))
    rng, text, ends = np.random.default_rng(1), "", 0
    for _ in range(60):
        mask = matcher.allowed()
        matches = re.fullmatch(pattern, text) is not None
        assert mask[2] == matches
        ends += matches
        others = np.flatnonzero(mask[3:]) + 3
        if len(others) == 0:
            break
        token = int(rng.choice(others))
        text += backend._compiler.vocabulary.decode_str([token])
        matcher.accept(token)
    assert 10 < ends < 50


def test_special_tokens_are_never_allowed_as_text(
    backend: LLGuidanceBackend, tiny_llm: LLM
) -> None:
    mask = backend.compile(StructuredOutputsParams(regex="(?s:.)*")).allowed()
    assert {i for i in tiny_llm.tokenizer.special_ids if mask[i]} <= {2}


def test_a_token_that_is_not_allowed_raises(backend: LLGuidanceBackend) -> None:
    matcher = backend.compile(StructuredOutputsParams(regex="[0-9]+"))
    with pytest.raises(GrammarError):
        matcher.accept(backend._compiler.vocabulary.tokenize_str("x")[0])


def test_an_ambiguous_grammar_ends_before_its_masks_take_long(backend: LLGuidanceBackend) -> None:
    """The items of a mask grow with each token; a step of all sequences waits for them."""
    ambiguous = 'start: s\ns: s s s | s s | "a" | "b" |\n'
    matcher = backend.compile(StructuredOutputsParams(grammar=ambiguous))
    (a,) = backend._compiler.vocabulary.tokenize_str("a")

    def follow(count: int) -> None:
        for _ in range(count):
            matcher.allowed()
            matcher.accept(a)

    with pytest.raises(GrammarError, match="items"):
        follow(100)  # it ends at 57; by the library's own limits, at 397


def test_expressions_of_a_language_stay_below_the_limits(backend: LLGuidanceBackend) -> None:
    sums = 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n'
    matcher = backend.compile(StructuredOutputsParams(grammar=sums))
    for token in backend._compiler.vocabulary.tokenize_str("+".join(map(str, range(80)))):
        assert matcher.allowed()[token]
        matcher.accept(token)


def test_the_cache_of_grammars_is_bounded(backend: LLGuidanceBackend) -> None:
    for number in range(3 * MOST_CACHED):
        backend.compile(StructuredOutputsParams(regex=f"a{{{number + 1}}}"))
    assert len(backend._compiled) == MOST_CACHED
    long = [f"{'b' * 50_000}{number}" for number in range(24)]
    for source in long:
        backend.compile(StructuredOutputsParams(choice=[source]))
    assert sum(len(key[1]) for key in backend._compiled) <= 2**20


def test_an_empty_mask_is_an_error() -> None:
    class Nothing(As):
        def __init__(self) -> None:
            pass

        def allowed(self) -> np.ndarray:
            return np.zeros(4, bool)

    processor = GrammarProcessor(Nothing())
    with pytest.raises(GrammarError, match="allows no token after the 2 tokens"):
        processor(torch.zeros(4), [1, 2])


@pytest.mark.parametrize(
    ("allowed", "asked", "message"),
    [
        ("b", {"structured_outputs": {"regex": "[ac]+"}}, r"no token after its 0 tokens\."),
        (
            "",
            {"min_tokens": 1},
            r"no token after its 0 tokens, except ends that min_tokens forbids\.",
        ),
    ],
)
def test_processors_that_leave_no_token_together_end_only_their_own_answer(
    tiny_directory: Path, allowed: str, asked: dict[str, Any], message: str
) -> None:
    tokenizer = Tokenizer.from_directory(tiny_directory)
    kept = tokenizer.encode(allowed, add_special_tokens=False) or [*tokenizer.eos_token_ids]

    def only(logits: torch.Tensor, output_ids: Any) -> torch.Tensor:
        left = torch.full_like(logits, -math.inf)
        left[kept] = logits[kept]
        return left

    def own(params: SamplingParams, prompt_ids: Any) -> Any:
        return only if params.temperature == 0.5 else None

    llm = LLM.load(tiny_directory, weights="float32", logits_processor=own)
    free = sampled(max_tokens=4, ignore_eos=True)
    requests = [
        llm.process_requests(["ab"], free),
        llm.process_requests(["ab"], sampled(temperature=0.5, max_tokens=4, **asked)),
    ]
    events: list[list[Any]] = [[], []]
    dispatcher = Dispatcher(llm.engine)
    for request, received in zip(requests, events, strict=True):
        dispatcher.submit(request, received.append)
        dispatcher.step()
    while llm.engine.has_work():
        dispatcher.step()
    assert [each.token_id for each in events[0]] == llm.generate("ab", free).token_ids
    (error,) = events[1]
    assert isinstance(error, GrammarError)
    assert re.search(message, str(error))


def test_a_missing_library_is_named(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MinigenError, match="pip install llguidance"):
        tiny_llm.generate("ab", sampled(structured_outputs={"regex": "a"}))
