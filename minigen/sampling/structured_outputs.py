"""What a request asks of an answer's form: a JSON schema, a regex, a list of choices, a grammar.

The names are vLLM's (`structured_outputs`). Sources: JSON Schema 2020-12, Core and Validation;
OpenAI's guide to structured outputs, for `strict`; llama.cpp's grammars/README.md, for GBNF.
"""

import json as json_text
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigen.errors import ParamsError
from minigen.fields import FLAG, Values, check, option

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MOST_CHARACTERS = 256 * 1024  # of one schema, regex, list of choices or grammar
MOST_DEPTH = 64  # of a schema
ONE_BLANK = r"(\n[ ]{0,16}| )"  # between JSON's tokens: a blank, or a line break and an indentation

# The keywords of JSON Schema, drafts 4 to 2020-12, and those that OpenAPI adds.
KEYWORDS = frozenset(
    "$schema $id id $anchor $dynamicAnchor $vocabulary $comment $defs definitions $ref $dynamicRef "
    "$recursiveRef $recursiveAnchor title description default examples example deprecated readOnly "
    "writeOnly nullable discriminator type enum const allOf anyOf oneOf not if then else "
    "dependentSchemas dependentRequired dependencies properties patternProperties "
    "additionalProperties propertyNames unevaluatedProperties minProperties maxProperties required "
    "items prefixItems additionalItems contains minContains maxContains unevaluatedItems minItems "
    "maxItems uniqueItems minLength maxLength pattern format contentEncoding contentMediaType "
    "contentSchema multipleOf minimum maximum exclusiveMinimum exclusiveMaximum".split()
)
# Keywords whose value is a schema per name, and those whose value holds no schemas.
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
VALUES = {"enum", "const", "default", "examples", "example", "required", "dependentRequired"}


def _are_choices(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and len(value) > 0 and all(isinstance(each, str) and each for each in value)


def _is_schema(value: object) -> bool:
    return isinstance(value, str | Mapping) or hasattr(value, "model_json_schema")


_TEXT = Values("text that is not empty", lambda value: isinstance(value, str) and value != "")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have: exactly one of the first five fields is given.

    `strict` refuses keywords that JSON Schema does not know; else they are ignored, as the standard
    says. Raises `ParamsError`.

    >>> StructuredOutputsParams(choice=["yes", "no"]).kind
    'choice'
    """

    json: str | Mapping[str, Any] | type | None = option(
        None,
        "The answer is JSON that is valid by this schema.",
        Values("a JSON schema: a dict, its text, or a pydantic model", _is_schema),
    )
    regex: str | None = option(None, "The answer as a whole matches this regex.", _TEXT)
    choice: Sequence[str] | None = option(
        None,
        "The answer is one of these texts.",
        Values("a list of texts, and none may be empty", _are_choices),
    )
    grammar: str | None = option(
        None, "The answer is derived by this grammar, in Lark's form or in llama.cpp's GBNF.", _TEXT
    )
    json_object: bool = option(False, "The answer is a JSON object.", FLAG)
    strict: bool = option(False, "Refuse keywords that are none of JSON Schema's.", FLAG)
    whitespace_pattern: str | None = option(
        None,
        "A regex for the blanks between the tokens of JSON; one blank, or a line break and an "
        "indentation, if absent, so that no model writes blanks for ever.",
        _TEXT,
    )
    disable_any_whitespace: bool = option(False, "No blanks between the tokens of JSON.", FLAG)

    def __post_init__(self) -> None:
        check(self, ParamsError)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{len(given)} were given: {', '.join(given)}" if given else "none was given"
            raise ParamsError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; {found}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _checked_schema(self.json, self.strict))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(self.source) > MOST_CHARACTERS:
            raise ParamsError(
                f"structured_outputs.{self.kind} has {len(self.source):,} characters, but the "
                f"limit is {MOST_CHARACTERS:,}."
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The schema, regex, choices (as a JSON list) or grammar as one text."""
        if self.json_object:
            return '{"type": "object"}'
        found = getattr(self, self.kind)
        return found if isinstance(found, str) else json_text.dumps(found)

    @property
    def blanks(self) -> str | None:
        """The regex for blanks between the tokens of JSON; None if there are none."""
        return None if self.disable_any_whitespace else self.whitespace_pattern or ONE_BLANK


def structured_outputs_of(value: Any) -> StructuredOutputsParams:
    """Return the parameters that a mapping gives, as in `{"regex": "[0-9]+"}`.

    Raises `ParamsError` for a name that there is not, or for a wrong value.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    unknown = sorted(map(str, value.keys() - StructuredOutputsParams.__dataclass_fields__.keys()))
    if unknown:
        known = ", ".join(StructuredOutputsParams.__dataclass_fields__)
        raise ParamsError(f"structured_outputs has no {unknown[0]!r}; it takes {known}.")
    return StructuredOutputsParams(**value)


def _checked_schema(schema: Any, strict: bool) -> str:
    """Return a schema as JSON text, with its properties in their order."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        if isinstance(schema, str):
            if len(schema) > MOST_CHARACTERS:
                return schema  # refused by its length
            schema = json_text.loads(schema)
        text = json_text.dumps(schema, allow_nan=False)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        raise ParamsError(f"structured_outputs.json is not JSON: {error}.") from None
    if not isinstance(schema, Mapping | bool):
        raise ParamsError(
            f"structured_outputs.json must be a schema, an object, not {reprlib.repr(schema)}."
        )
    for each in _schemas(schema):
        _check_keywords(each, strict)
    return text


def _too_deep() -> ParamsError:
    return ParamsError(
        f"structured_outputs.json is nested more than {MOST_DEPTH} schemas deep, which is the "
        "limit."
    )


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas inside of it. Raises `ParamsError` if they are too deep."""
    level = [schema]
    for _ in range(MOST_DEPTH):
        level = [each for each in level if isinstance(each, Mapping)]
        yield from level
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise _too_deep()


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in VALUES:
            continue
        if keyword in NAMED or keyword == "dependencies":
            yield from value.values() if isinstance(value, Mapping) else ()
        elif isinstance(value, Mapping):
            yield value
        elif isinstance(value, list):
            yield from value


def _check_keywords(schema: Mapping[str, Any], strict: bool) -> None:
    unknown = sorted(set(schema) - KEYWORDS)
    if strict and unknown:
        raise ParamsError(
            f"structured_outputs.json has the keyword {unknown[0][:100]!r}, which JSON Schema does "
            "not know: leave it out, or leave out strict."
        )
    target = schema.get("$ref", "#")
    if isinstance(target, str) and not target.startswith("#"):
        raise ParamsError(
            f"structured_outputs.json refers to {target[:100]!r}, and nothing outside of the "
            "schema is ever read: copy it into $defs, and refer to '#/$defs/...'."
        )
