"""Forms that a hostile client may send, to keep a server busy or to end it."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

_INTEGER = {"type": "integer"}


def _nested(depth: int, leaf: Any, around: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        leaf = around(leaf)
    return leaf


def _chain(length: int) -> dict[str, Any]:
    names = [f"d{number}" for number in range(length + 1)]
    links = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)}
    return {"$defs": {**links, names[-1]: _INTEGER}, "$ref": f"#/$defs/{names[0]}"}


HOSTILE: dict[str, dict[str, Any]] = {
    "60 levels": {"json": _nested(60, _INTEGER, lambda inner: {"type": "array", "items": inner})},
    "10,000 levels": {"json": '{"items": ' * 10_000 + "{}" + "}" * 10_000},
    "5,000 properties": {
        "json": {"properties": {f"p{number}": {"type": "string"} for number in range(5000)}}
    },
    "20,000 required": {"json": {"type": "object", "required": [f"r{n}" for n in range(20_000)]}},
    "300 patternProperties": {
        "json": {"patternProperties": {f"^a{number}$": _INTEGER for number in range(300)}}
    },
    "20,000 values": {"json": {"enum": [f"v{number}" for number in range(20_000)]}},
    "6,000 objects": {"json": {"enum": [{"a": number} for number in range(6000)]}},
    "least integer": {"json": {"const": -(2**63)}},
    "least integer in Lark": {"grammar": f'start: %json {{"const": {-(2**63)}}}'},
    "3,000 references": {"json": _chain(3000)},
    "reference to itself": {"json": {"$ref": "#"}},
    "circle": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "endless tree": {
        "json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 9}
    },
    "remote reference": {"json": {"$ref": "http://192.0.2.1/schema.json"}},
    "9 to the 9th alternatives": {
        "json": {
            "allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in "a" * 9]
        }
    },
    "60 patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"x{number}"} for number in range(60)]}
    },
    "shifted patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(5, 40)]}
    },
    "a billion items": {"json": {"type": "array", "minItems": 10**9}},
    "maxItems 2**63": {"json": {"type": "array", "maxItems": 2**63}},
    "a billion characters": {"json": {"type": "string", "minLength": 10**9}},
    "counts in counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "count in a pattern": {"json": {"type": "string", "pattern": "^(.*a){50}$", "minLength": 4000}},
    "4 billion times": {"regex": "a{4294967295}"},
    "optional and required": {"regex": "(a?){10000}a{10000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){25}"},
    "50,000 stars": {"regex": "a*" * 50_000},
    "100,000 parentheses": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "look-ahead": {"json": {"type": "string", "pattern": "(?=a)b"}},
    "back-reference": {"regex": r"(a)\1"},
    "20,000 optional parts": {"grammar": "start: " + "a? " * 20_000 + '\na: "x"'},
    "doubling rules": {
        "grammar": "start: a0\n"
        + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(300))
        + '\na300: "x"'
    },
    "left recursion": {"grammar": 'root ::= root root root | "a" | ""'},
}
