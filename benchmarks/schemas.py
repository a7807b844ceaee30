"""Seeded JSON schemas like those that people send for structured outputs, and prompts for them.

Most have the shape that pydantic, zod and OpenAPI tools write: objects with required properties,
enums, nullable values, arrays, `$defs`. One in `RARE_EVERY` has a keyword of `RARE` besides, each
with its weight. The weights are a judgement, so results are also reported by keyword.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = dict[str, Any]
RARE_EVERY = 6
NAMES = (
    "id name title status kind email url created_at price quantity tags address city country "
    "notes is_active score items owner parent unit color size language rating due"
).split()
WORDS = "red green blue small large open closed draft sent paid north south yes no high low".split()
# llguidance's formats, as often as they are used.
FORMATS = {"date-time": 5, "date": 4, "email": 4, "uri": 3, "uuid": 3, "time": 1, "ipv4": 1}
FORMATS |= {"ipv6": 1, "hostname": 1, "duration": 1}
PATTERNS = (
    r"^[A-Z]{2,3}-\d{4}$",
    r"^\+?[0-9]{7,12}$",
    r"^[a-z][a-z0-9_]{0,15}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(?:[01]\d|2[0-3]):[0-5]\d$",
    r"^\w+(\s\w+){0,3}$",
    r"^v\d+\.\d+\.\d+$",
)


def schema_of(seed: int) -> Schema:
    """Return the schema of this seed: the same on every machine."""
    return _Maker(random.Random(seed)).whole()


def keywords(schema: Any) -> set[str]:
    """Return the keywords that a schema uses, `format` and `type` with their values."""
    return set(_keywords(schema))


def _keywords(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        yield f"format: {value}" if keyword == "format" else keyword
        if keyword in ("properties", "patternProperties", "$defs"):
            inner = list(value.values())
        elif keyword in ("enum", "const", "default", "examples", "dependentRequired", "required"):
            inner = []
        else:
            inner = value if isinstance(value, list) else [value]
        for each in inner:
            yield from _keywords(each)


class _Maker:
    def __init__(self, rng: random.Random):
        self.rng = rng
        self.defs: dict[str, Schema] = {}
        self.unfinished: set[str] = set()

    def whole(self) -> Schema:
        """Return one schema, with its `$defs`."""
        rng = self.rng
        found = self.object(depth=0) if rng.random() < 0.93 else self.array(0)
        if rng.randrange(RARE_EVERY) == 0:
            makers, weights = zip(*RARE.items(), strict=True)
            rare = rng.choices(makers, weights)[0](self)
            if found["type"] == "array":
                found = rare
            else:
                found["properties"]["extra"] = rare
                found["required"] = [*found.get("required", []), "extra"]
        if self.defs:
            found["$defs"] = self.defs
        return found

    def value(self, depth: int) -> Schema:
        """Return a schema of any kind, simpler where it is deeper."""
        kinds: dict[Callable[[int], Schema], float] = {
            self.text: 34,
            self.whole_number: 14,
            self.number: 9,
            self.flag: 9,
            self.choice: 12,
            self.nullable: 8,
            self.array: 9 if depth < 3 else 0,
            self.object: 8 if depth < 3 else 0,
            self.reference: 5 if depth < 3 else 0,
            self.union: 3 if depth < 3 else 0,
            self.constant: 2,
        }
        found = self.rng.choices([*kinds], [*kinds.values()])[0](depth)
        if self.rng.random() < 0.15 and "$ref" not in found:
            found["description"] = "What " + self.rng.choice(NAMES) + " means here."
        if self.rng.random() < 0.08 and "$ref" not in found:
            found["title"] = self.rng.choice(NAMES).title()
        return found

    def text(self, _: int) -> Schema:
        draw, found = self.rng.random(), Schema(type="string")
        if draw < 0.12:
            found["format"] = self.rng.choices([*FORMATS], [*FORMATS.values()])[0]
        elif draw < 0.2:
            found["pattern"] = self.rng.choice(PATTERNS)
        elif draw < 0.45:
            least = self.rng.choice([0, 1, 1, 2, 3])
            found |= {"minLength": least, "maxLength": least + self.rng.choice([5, 10, 20, 40])}
        elif draw < 0.6:
            found["maxLength"] = self.rng.choice([8, 16, 32, 64])
        return found

    def whole_number(self, _: int) -> Schema:
        return self._bounded({"type": "integer"}, lambda: self.rng.choice([0, 1, -10, 5, 100]), 1)

    def number(self, _: int) -> Schema:
        return self._bounded({"type": "number"}, lambda: self.rng.choice([0, -1.5, 0.01, 10]), 0.5)

    def _bounded(self, found: Schema, least: Callable[[], float], unit: float) -> Schema:
        draw = self.rng.random()
        if draw < 0.35:
            low = least()
            found |= {"minimum": low, "maximum": low + unit * self.rng.choice([9, 100, 1000])}
        elif draw < 0.5:
            found["minimum"] = least()
        elif draw < 0.56:
            found["exclusiveMinimum"] = 0
        if self.rng.random() < 0.03:
            found["multipleOf"] = unit * self.rng.choice([2, 5, 10])
        return found

    def flag(self, _: int) -> Schema:
        return {"type": "boolean"}

    def choice(self, _: int) -> Schema:
        values: list[Any] = self.rng.sample(WORDS, self.rng.randint(2, 6))
        if self.rng.random() < 0.1:
            return {"enum": [*values, None]}
        return {"type": "string", "enum": values}

    def constant(self, _: int) -> Schema:
        return {"const": self.rng.choice([*WORDS, 1, 2.5, True, None, 'a b "c" é'])}

    def nullable(self, depth: int) -> Schema:
        if self.rng.random() < 0.4:
            return {"type": [self.rng.choice(["string", "integer", "number"]), "null"]}
        found = {"anyOf": [self.value(depth + 2), {"type": "null"}]}
        return found | ({"default": None} if self.rng.random() < 0.5 else {})

    def union(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth + 2) for _ in range(self.rng.randint(2, 3))]}

    def array(self, depth: int) -> Schema:
        found: Schema = {"type": "array", "items": self.value(depth + 1)}
        draw = self.rng.random()
        if draw < 0.45:
            least = self.rng.choice([0, 0, 1, 2])
            found |= {"minItems": least, "maxItems": least + self.rng.choice([1, 2, 3, 5])}
        elif draw < 0.6:
            found["maxItems"] = self.rng.choice([2, 3, 4])
        return found

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randint(2, 6 if depth == 0 else 4))
        found: Schema = {
            "type": "object",
            "properties": {name: self.value(depth + 1) for name in names},
        }
        if self.rng.random() < 0.85:
            found["required"] = [name for name in names if self.rng.random() < 0.85]
        draw = self.rng.random()
        if draw < 0.7:
            found["additionalProperties"] = False
        elif draw < 0.75:
            found["additionalProperties"] = self.value(depth + 2)
        return found

    def reference(self, depth: int) -> Schema:
        name = self.rng.choice(["Item", "Address", "Node", "Person"])
        if name in self.unfinished:  # a value that must contain itself could never end
            return self.text(depth)
        if name not in self.defs:
            self.unfinished.add(name)
            whole = self.object(depth + 1)
            if self.rng.random() < 0.3:  # recursive, as a tree is
                own = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
                whole["properties"]["children"] = own
            self.defs[name] = whole
            self.unfinished.remove(name)
        return {"$ref": f"#/$defs/{name}"}


def _tagged(maker: _Maker) -> Schema:
    kinds = maker.rng.sample(WORDS, 2)
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": maker.value(3)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in kinds
        ]
    }


def _joined(maker: _Maker) -> Schema:
    parts = [
        {"type": "object", "properties": {name: maker.value(3)}, "required": [name]}
        for name in maker.rng.sample(NAMES, 2)
    ]
    return {"allOf": parts}


# The rarer keywords, each with its weight.
RARE: dict[Callable[[_Maker], Schema], float] = {
    _tagged: 20,
    lambda maker: {"oneOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]}: 8,
    lambda maker: {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 9}]}: 2,
    _joined: 14,
    lambda maker: {
        "type": "object",
        "patternProperties": {"^[a-z]{1,5}$": maker.value(3)},
        "additionalProperties": False,
        "maxProperties": 3,
    }: 7,
    lambda maker: {"type": "object", "additionalProperties": maker.value(3)}: 10,
    lambda maker: {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": maker.value(3),
    }: 5,
    lambda maker: {
        "type": "array",
        "prefixItems": [maker.value(3), maker.value(3)],
        "items": False,
        "minItems": 2,
    }: 6,
    lambda maker: {"type": "number", "multipleOf": maker.rng.choice([0.01, 0.25, 5])}: 5,
    lambda maker: {
        "type": "object",
        "properties": {"a": maker.value(3)},
        "unevaluatedProperties": False,
    }: 3,
    lambda maker: {"type": "object", "minProperties": 1, "maxProperties": 3}: 4,
    lambda maker: {"type": "array", "items": maker.text(3), "uniqueItems": False}: 2,
    lambda maker: {"type": "array", "items": maker.text(3), "uniqueItems": True}: 8,
    lambda maker: {"type": "string", "format": maker.rng.choice(["byte", "json-pointer"])}: 3,
    lambda maker: {"type": "string", "not": {"enum": ["none"]}}: 3,
    lambda maker: {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": maker.value(3)},
        "if": {"properties": {"a": {"const": True}}},
        "then": {"required": ["b"]},
    }: 3,
    lambda maker: {
        "type": "object",
        "properties": {"a": maker.value(3), "b": maker.value(3)},
        "dependentRequired": {"a": ["b"]},
    }: 2,
    lambda maker: {"type": "array", "contains": {"type": "integer"}, "maxItems": 4}: 2,
    lambda maker: {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}: 2,
    lambda maker: {"type": "object", "minProperties": 2}: 1,
}


def prompts(count: int = 100) -> list[str]:
    """Return prompts that ask for an object of some kind."""
    things = "order person book flight recipe sensor invoice city film server".split()
    moods = (
        "Make up a {}.",
        "Describe a typical {}.",
        "Give an example of a {}.",
        "Extract the {} from this: it came late, was blue and cost 12 euros.",
        "I need test data: one {}, please.",
        "Which {} do you like most?",
        "Fill in the form for a {}.",
        "Invent a very unusual {}.",
        "What do we know about the {} called Ada?",
        "A short record of a {}.",
    )
    return [mood.format(thing) for thing in things for mood in moods][:count]


def as_text(schema: Schema) -> str:
    """Return a schema as compact JSON."""
    return json.dumps(schema, separators=(",", ":"))
