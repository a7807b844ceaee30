"""A closed schema accepts nothing that the original refuses, and no property that is undeclared."""

from typing import Any

import jsonschema
import pytest

from minigen.sampling.closed_schemas import closed

INNER = {"type": "object", "properties": {"b": {"type": "integer"}}}


def is_valid(value: object, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INNER, {"b": 1}, {"b": 1, "c": 2}),
        ({"properties": {"a": INNER}}, {"a": {"b": 1}}, {"a": {"c": 1}}),
        ({"type": "array", "items": INNER}, [{"b": 1}], [{"c": 1}]),
        ({"anyOf": [INNER, {"type": "null"}]}, {"b": 1}, {"c": 1}),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": INNER}},
            {"a": {"b": 1}},
            {"a": {"c": 1}},
        ),
    ],
)
def test_undeclared_properties_are_left_out_at_every_depth(
    schema: Any, good: object, bad: object
) -> None:
    assert is_valid(good, closed(schema))
    assert is_valid(bad, schema)
    assert not is_valid(bad, closed(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {**INNER, "additionalProperties": True},
        {**INNER, "additionalProperties": {"type": "string"}},
        {**INNER, "patternProperties": {"^x": {}}},
        {**INNER, "minProperties": 3},
        {**INNER, "required": ["c"]},
        {"allOf": [INNER, {"properties": {"c": {}}, "required": ["c"]}]},
        {**INNER, "anyOf": [{"required": ["c"]}, {"properties": {"d": {}}}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"c": {}}}], "$defs": {"x": INNER}},
        {"oneOf": [INNER, {"properties": {"b": {}, "c": {}}, "required": ["b", "c"]}]},
        {"type": "object"},
        {"enum": [{"properties": {}}]},
    ],
)
def test_what_says_or_needs_more_properties_stays_open(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_callers_schema_is_not_changed() -> None:
    schema = {"properties": {"a": dict(INNER)}}
    closed(schema)
    assert schema == {"properties": {"a": INNER}}
