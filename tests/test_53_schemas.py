"""Structured outputs over seeded schemas and hostile forms, judged by the jsonschema library."""

import gc
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.hostile import HOSTILE
from benchmarks.schemas import as_text, keywords, schema_of
from benchmarks.witness import failure
from minigen import LLM, SamplingParams
from minigen.errors import GrammarError, ParamsError
from minigen.sampling.grammar import LLGuidanceBackend
from minigen.sampling.grammar_compiler import Vocabulary
from minigen.sampling.grammar_trial import GrammarTrial
from minigen.sampling.json_schemas import enforceable
from minigen.sampling.structured_outputs import StructuredOutputsParams
from tests.serving import load_tiny, save_tiny

END = 2
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_tiny(save_tiny(tmp_path_factory.mktemp("tiny"), context=2048))


@pytest.fixture(scope="module")
def backend(llm: LLM) -> LLGuidanceBackend:
    return LLGuidanceBackend(llm.tokenizer, llm.config.vocab_size, {END})


def compiled(backend: LLGuidanceBackend, schema: Any) -> Any:
    form = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
    return backend.compile(form)


def accepts(backend: LLGuidanceBackend, schema: Any, text: str) -> bool:
    """Return whether a text without blanks is an answer of the schema, byte by byte."""
    matcher = compiled(backend, schema)
    ids = {backend._compiler.vocabulary.decode_bytes([i]): i for i in range(3, 259)}
    try:
        for byte in text.encode():
            matcher.accept(ids[bytes([byte])])
    except GrammarError:
        return False
    return bool(matcher.allowed()[END])


def check_answers(llm: LLM, backend: LLGuidanceBackend, seeds: range, max_tokens: int) -> None:
    """Answer schemas with random weights; all answers that end by themselves must be valid."""
    schemas = {seed: schema_of(seed) for seed in seeds}
    for seed in seeds:
        try:
            compiled(backend, schemas[seed])
        except ParamsError:
            del schemas[seed]
    assert len(schemas) >= 0.95 * len(seeds)
    params = [
        SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs={"json": schema})
        for seed, schema in schemas.items()
    ]
    outputs = llm.generate(["ab"] * len(schemas), params, progress=False)
    ended = 0
    for (seed, schema), output in zip(schemas.items(), outputs, strict=True):
        if output.finish_reason == "stop":
            ended += 1
            assert failure(schema, output.text) is None, (seed, output.text)
    assert ended > 0


def test_answers_of_random_weights_are_valid(llm: LLM, backend: LLGuidanceBackend) -> None:
    check_answers(llm, backend, range(30), max_tokens=120)


@pytest.mark.long
def test_answers_to_a_thousand_schemas_are_valid(llm: LLM, backend: LLGuidanceBackend) -> None:
    check_answers(llm, backend, range(1000), max_tokens=500)


def test_random_walks_through_grammars_are_valid(backend: LLGuidanceBackend) -> None:
    """They end more often than a model's answers, since they prefer to close what is open."""
    rng, ended = random.Random(4), 0
    tokens = [backend._compiler.vocabulary.decode_bytes([i]) for i in range(259)]
    closing = [i for i in range(3, 259) if tokens[i] in b'"]},:']
    for seed in range(2000, 2060):
        schema = schema_of(seed)
        try:
            matcher = compiled(backend, schema)
        except ParamsError:
            continue
        text = b""
        for _ in range(600):
            mask = matcher.allowed()
            if mask[END]:
                ended += 1
                assert failure(schema, text.decode()) is None, (seed, text)
                break
            often = [i for i in closing if mask[i]]
            found = often if often and rng.random() < 0.4 else np.flatnonzero(mask).tolist()
            token_id = rng.choice(found)
            matcher.accept(token_id)
            text += tokens[token_id]
    assert ended > 40


# The generator


def test_the_generator_repeats_itself_and_has_most_keywords() -> None:
    assert schema_of(17) == schema_of(17)
    used = set().union(*(keywords(schema_of(seed)) for seed in range(1000)))
    wanted = "properties required enum const anyOf oneOf allOf not if then $ref $defs items "
    wanted += "prefixItems minItems maxItems uniqueItems contains pattern minLength maxLength "
    wanted += "minimum maximum exclusiveMinimum multipleOf additionalProperties patternProperties "
    wanted += "unevaluatedProperties dependentRequired propertyNames minProperties"
    assert set(wanted.split()) <= used


# Instances that are valid must be accepted

EXAMPLES = {
    "date-time": "2024-02-29T23:59:59.5+01:00",
    "date": "2024-02-29",
    "time": "08:30:00Z",
    "email": "ada@example.org",
    "uri": "https://example.org/a?b=c#d",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "a-b.example.org",
    "duration": "P1DT2H",
    r"^[A-Z]{2,3}-\d{4}$": "AB-0199",
    r"^\+?[0-9]{7,12}$": "+4930123456",
    r"^[a-z][a-z0-9_]{0,15}$": "a_1",
    r"^#[0-9a-fA-F]{6}$": "#00ffAA",
    r"^(?:[01]\d|2[0-3]):[0-5]\d$": "23:59",
    r"^\w+(\s\w+){0,3}$": "one two",
    r"^v\d+\.\d+\.\d+$": "v1.20.3",
}


class Unsupported(Exception):
    """The schema has a keyword of which no instance is drawn here."""


def instance(schema: Any, rng: random.Random, defs: Any, depth: int = 0) -> Any:
    """Return a random value that is likely to be valid, with properties in the schema's order."""
    if "$ref" in schema:
        return instance(defs[schema["$ref"].rpartition("/")[2]], rng, defs, depth + 1)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return instance(rng.choice(schema[keyword]), rng, defs, depth)
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", [])
        return {
            name: instance(each, rng, defs, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or rng.random() < (0.6 if depth < 4 else 0)
        }
    if kind == "array":
        if "prefixItems" in schema:
            return [instance(each, rng, defs, depth + 1) for each in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), 3) if depth < 4 else least
        items = schema.get("items", INTEGER)
        return [
            instance(items, rng, defs, depth + 1)
            for _ in range(rng.randint(least, max(least, most)))
        ]
    if kind == "string":
        if "format" in schema or "pattern" in schema:
            wanted = schema.get("format", schema.get("pattern"))
            if wanted not in EXAMPLES:
                raise Unsupported
            return EXAMPLES[wanted]
        least = schema.get("minLength", 0)
        letters = 'abc XYZ 09 é ß 中 😀 \\ " / \n \t { } [ ]'
        length = rng.randint(least, schema.get("maxLength", least + 9))
        return "".join(rng.choice(letters) for _ in range(length))
    if kind in ("integer", "number"):
        step = schema.get("multipleOf", 1)
        low = schema.get("minimum", schema.get("exclusiveMinimum", -50) + 1)
        if step not in (1, 2, 5, 10):
            raise Unsupported
        number = -(-low // step) * step + step * rng.randint(0, 3)
        return int(number) if float(number).is_integer() else number
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    raise Unsupported


def drawn() -> Iterator[tuple[int, Any, str]]:
    rng = random.Random(8)
    for seed in range(3000, 3080):
        schema = schema_of(seed)
        for _ in range(3):
            try:
                value = instance(schema, rng, schema.get("$defs", {}))
            except Unsupported:
                continue
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            if failure(schema, text) is None:
                yield seed, schema, text


def test_valid_instances_in_the_order_of_the_schema_are_accepted(
    backend: LLGuidanceBackend,
) -> None:
    tried = 0
    for seed, schema, text in drawn():
        try:
            found = accepts(backend, schema, text)
        except ParamsError:
            continue  # refused, by the name of a keyword
        assert found, (seed, as_text(schema), text)
        tried += 1
    assert tried > 120


# What llguidance would not have enforced, or refused for nothing

OBJECT = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": TEXT}
ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "its own switches": ({"x-guidance": {"item_separator": ";"}, "items": INTEGER}, ["[1,2]"], []),
    "a name in other letters": (OBJECT, ['{"a":1,"b":"x"}'], ['{"a":1,"\\u0061":"x"}']),
    "sets in classes": ({**TEXT, "pattern": "^[[a]]$"}, ['"[]"', '"a]"'], ['"a"']),
    "intersections": ({**TEXT, "pattern": "^[a&&b]$"}, ['"a"', '"&"'], ['"c"']),
    "differences": (
        {**TEXT, "pattern": "^[+--][--0]$"},
        ['"+."', '",0"', '"--"'],
        ['".-"', '"+,"'],
    ),
    "digits": ({**TEXT, "pattern": r"^\d[\d]$"}, ['"12"'], ['"1٣"', '"٣1"']),
    "words": ({**TEXT, "pattern": r"^\w$"}, ['"a"', '"_"'], ['"é"']),
    "spaces": ({**TEXT, "pattern": r"^\s$"}, ['" "', '"\u00a0"'], ['"a"', '"\u0085"']),
    "no spaces": (
        {**TEXT, "pattern": r"^[^\s@]+@\S+$"},
        ['"a@b"', '"é@\u0085"'],
        ['"a\u2003b@c"', '"a@b\u00a0"', '"a@\ufeff"'],
    ),
    "neither digits nor words": (
        {**TEXT, "pattern": r"^\D\W[^\D]$"},
        ['"aé1"'],
        ['"aé٣"', '"aa1"'],
    ),
    "hyphens beside classes": (
        {**TEXT, "pattern": r"^[\w-a][+-\d]$"},
        ['"-+"', '"z-"', '"_9"'],
        ['"`1"', '"a/"'],
    ),
    "dot": ({**TEXT, "pattern": "^.$"}, ['"é"'], ['"\u2028"', '"\\r"']),
    "names by pattern": (
        {"patternProperties": {r"^\d$": INTEGER}, "additionalProperties": False, "type": "object"},
        ['{"1":2}'],
        ['{"٣":2}'],
    ),
    "leap seconds": ({**TEXT, "format": "time"}, ['"08:30:59Z"'], ['"08:30:60Z"']),
    "and dates": ({"format": "date-time"}, ['"2024-01-01T08:30:59Z"'], ['"2024-01-01T08:30:60Z"']),
    "uniqueItems that forbids nothing": ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
    "one item is unique": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], []),
    "then without if": ({**TEXT, "then": {"maxLength": 1}}, ['"abc"'], ["1"]),
    "minContains alone": ({"type": "array", "minContains": 3}, ["[]"], ["1"]),
    "names are texts": ({**OBJECT, "propertyNames": TEXT}, ['{"a":1}'], []),
    "whole floats": ({**TEXT, "maxLength": 2.0}, ['"ab"'], ['"abc"']),
    "prefixItems and an old keyword": (
        {"type": "array", "prefixItems": [TEXT], "additionalItems": False},
        ['["a"]', '["a",1]'],
        ["[1]"],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
        ["[1]"],
        ["[1,2]"],
    ),
    "the bound of 64 bits": ({**INTEGER, "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
    "true": (True, ["1", "[]"], []),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_schema_means_what_the_standard_says(backend: LLGuidanceBackend, name: str) -> None:
    schema, valid, invalid = ENFORCED[name]
    for text in valid:
        assert accepts(backend, schema, text), text
    for text in invalid:
        assert not accepts(backend, schema, text), text


NOT_ENFORCED: dict[str, tuple[Any, str]] = {
    "repeated names": ({"type": "object", "minProperties": 2}, "minProperties"),
    "switched off": ({"x-guidance": {"lenient": True}, "not": TEXT}, "not"),
    "switched off for unique items": (
        {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
        "uniqueItems",
    ),
    "rounded": ({"const": 2**60 + 1}, "const has a number beyond 2**53"),
    "rounded inside": ({"enum": [{"a": [2**64]}]}, "enum has a number beyond 2**53"),
    "a rounded bound": ({**INTEGER, "minimum": 2**53 + 1}, "minimum has a number beyond 2**53"),
    "the number that crashes": ({"const": -(2**63)}, "const has a number beyond 2**53"),
    "control character": ({"const": "a\u0001"}, "const has a control character"),
    "never": (False, "Unsatisfiable"),
}


@pytest.mark.parametrize("name", NOT_ENFORCED)
def test_what_cannot_be_enforced_is_refused_by_name(backend: LLGuidanceBackend, name: str) -> None:
    schema, words = NOT_ENFORCED[name]
    with pytest.raises(ParamsError) as caught:
        compiled(backend, schema)
    assert words in str(caught.value)
    assert str(caught.value).count("cannot be used") == 1


def test_a_rewritten_schema_keeps_its_values_and_its_order() -> None:
    schema = {
        "properties": {"pattern": {"const": {"uniqueItems": False}}, "a": {"enum": [{"if": 1}]}},
        "required": ["pattern"],
    }
    assert json.dumps(enforceable(schema)) == json.dumps(schema)


# Hostile forms


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_or_harmless(backend: LLGuidanceBackend, name: str) -> None:
    refusal, rng = "", random.Random(2)
    try:
        matcher = backend.compile(StructuredOutputsParams(**HOSTILE[name]))
        for _ in range(20):
            token_id = rng.choice(np.flatnonzero(matcher.allowed()).tolist())
            if token_id == END:
                break
            matcher.accept(token_id)
    except ParamsError as error:
        refusal = str(error)
    assert len(refusal) < 450
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("least integer in Lark", "the library that compiles it fails on it"),
        ("3,000 references", "the library that compiles it fails on it"),
        ("50,000 stars", "seconds to compile"),
    ],
)
def test_a_form_that_ends_its_trial_is_refused_and_the_next_is_tried(
    backend: LLGuidanceBackend, name: str, words: str
) -> None:
    with pytest.raises(ParamsError, match=words):
        backend.compile(StructuredOutputsParams(**HOSTILE[name]))
    assert backend.compile(StructuredOutputsParams(regex=f"after {name}")).allowed().any()


def test_the_process_for_trials_ends_with_its_owner() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    trial = GrammarTrial(Vocabulary([*tokens, b"</s>"], [256], [256], None))
    trial.check(StructuredOutputsParams(regex="a"))
    process = trial._running._process  # type: ignore[union-attr]
    assert process.poll() is None
    del trial
    gc.collect()
    assert process.poll() is not None


def test_a_reference_into_a_value_is_refused() -> None:
    inner = {"type": "object", "minProperties": 3}
    schema = {"properties": {"a": {"$ref": "#/properties/b/default"}, "b": {"default": inner}}}
    with pytest.raises(ValueError, match="points into a value"):
        enforceable(schema)
    named = {"properties": {"a": {"$ref": "#/$defs/default"}}, "$defs": {"default": INTEGER}}
    assert enforceable(named) == named


def test_what_is_no_list_of_schemas_is_refused() -> None:
    with pytest.raises(ValueError, match="allOf"):
        enforceable({"properties": {"a": {"format": "time", "allOf": 5}}})


def test_a_chain_of_references_that_needs_a_deep_stack_is_refused(
    backend: LLGuidanceBackend,
) -> None:
    links: dict[str, Any] = {
        f"n{i}": {"type": "array", "items": {"$ref": f"#/$defs/n{i + 1}"}, "minItems": 1}
        for i in range(600)
    }
    schema = {"$ref": "#/$defs/n0", "$defs": {**links, "n600": INTEGER}}
    for _ in range(2):  # the second time without a trial
        with pytest.raises(ParamsError, match="cannot be used"):
            compiled(backend, schema)
