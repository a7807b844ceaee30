"""Rewrites JSON schemas so that llguidance enforces them exactly, and refuses what it would not.

llguidance ignores a few things silently, such as repeated names under `minProperties`, and refuses
others that forbid nothing. Sources: JSON Schema 2020-12, Core and Validation; ECMA-262, for
patterns; RFC 3339, for times; llguidance's docs/json_schema.md.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from minigen.sampling.structured_outputs import NAMED, VALUES

LARGEST = 2**53  # integers above it are rounded by llguidance
_COUNTS = "minLength maxLength minItems maxItems minProperties maxProperties".split()
_BOUNDS = "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
_BESIDE = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"}
_ECMA_CLASSES = {
    "\\d": "0-9",
    "\\w": "0-9A-Za-z_",
    "\\s": r"\t\n\v\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}"
    r"\x{202f}\x{205f}\x{3000}\x{feff}",
}
_NO_LEAP = "^([^:]*:){2}[0-5]"  # a leap second is right at a few moments of history only


def enforceable(schema: Any) -> Any:
    """Return a schema that means the same and that llguidance enforces.

    Raises `ValueError` for one that it would not enforce, with the keyword.
    """
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return _rewritten(schema) if isinstance(schema, Mapping) else schema


def _rewritten(schema: Mapping[str, Any]) -> dict[str, Any]:
    _check(schema)
    found = {keyword: _inside(keyword, value) for keyword, value in schema.items()}
    for keyword in _COUNTS:
        if isinstance(value := found.get(keyword), float) and value.is_integer():
            found[keyword] = int(value)
    for keyword in _idle(found):
        found.pop(keyword, None)
    for keyword, same in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if keyword in found and not _BESIDE & found.keys():
            found.setdefault(same, found.pop(keyword))
            found.pop(keyword, None)
    if isinstance(found.get("pattern"), str):
        found["pattern"] = ecma_pattern(found["pattern"])
    if found.get("format") in ("time", "date-time"):
        others = found.get("allOf", [])
        if not isinstance(others, list):
            raise _refused("allOf", "must be a list of schemas")
        found["allOf"] = [*others, {"pattern": _NO_LEAP}]
    return found


def _inside(keyword: str, value: Any) -> Any:
    """Return a keyword's value with the schemas inside of it rewritten."""
    if keyword in VALUES:
        return value
    if keyword == "patternProperties" and isinstance(value, Mapping):
        return {ecma_pattern(name): _nested(each) for name, each in value.items()}
    if keyword in NAMED and isinstance(value, Mapping):
        return {name: _nested(each) for name, each in value.items()}
    return [_nested(each) for each in value] if isinstance(value, list) else _nested(value)


def _nested(value: Any) -> Any:
    return _rewritten(value) if isinstance(value, Mapping) else value


def _idle(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that forbid nothing, and those of llguidance's own."""
    idle = {"x-guidance"}  # it would turn the checks off
    if schema.get("uniqueItems") is False or schema.get("maxItems", 2) in (0, 1):
        idle.add("uniqueItems")
    if "if" not in schema:
        idle |= {"then", "else"}
    if not {"then", "else"} & schema.keys():
        idle.add("if")
    if "contains" not in schema:
        idle |= {"minContains", "maxContains"}
    if not isinstance(schema.get("items"), list):
        idle.add("additionalItems")
    if schema.get("propertyNames", True) in (True, {}, {"type": "string"}):
        idle.add("propertyNames")
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if schema.get(keyword) == {}:
            idle.add(keyword)
    return idle


def _check(schema: Mapping[str, Any]) -> None:
    """Refuse what llguidance would accept and not enforce."""
    target = schema.get("$ref")
    if isinstance(target, str) and _is_in_a_value(unquote(target)):
        raise _refused("$ref", f"points into a value, and not to a schema: {target[:100]!r}")
    for keyword in _BOUNDS:
        value = schema.get(keyword)
        if isinstance(value, int) and abs(value) > LARGEST and not _is_of_64_bits(keyword, value):
            raise _refused(keyword, "has a number beyond 2**53, which would be rounded")
    for keyword in ("const", "enum"):
        if keyword in schema and (reason := _unfit(schema[keyword])):
            raise _refused(keyword, reason)
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    are_usual = isinstance(least, int | float) and isinstance(required, list)
    if are_usual and least - len(set(map(str, required))) > 1:
        raise _refused("minProperties", "cannot be enforced, because names may be repeated")


def _is_in_a_value(target: str) -> bool:
    """Return whether a reference leads into an `enum`, a `default` or the like."""
    before = ""
    for each in target.split("/")[1:]:
        if before not in NAMED and each in VALUES:
            return True
        before = "" if before in NAMED else each  # a name may be any word
    return False


def _is_of_64_bits(keyword: str, value: int) -> bool:
    """Return whether it is the usual upper bound of 64-bit integers, which llguidance knows."""
    return keyword == "maximum" and value == 2**63 - 1


def _unfit(value: Any) -> str | None:
    """Return why a value of `enum` or `const` cannot be written, or None."""
    if isinstance(value, Mapping):
        return _unfit([*value, *value.values()])
    if isinstance(value, list):
        return next(filter(None, map(_unfit, value)), None)
    if isinstance(value, int) and abs(value) > LARGEST:
        return "has a number beyond 2**53, which would be rounded"
    if isinstance(value, str) and any(
        (each < " " and each not in "\b\t\n\f\r") or each == "\x7f" for each in value
    ):
        return "has a control character, which answers cannot contain"
    return None


def _refused(keyword: str, reason: str) -> ValueError:
    return ValueError(f"{keyword} {reason}")


def ecma_pattern(pattern: str) -> str:
    r"""Return a regex of ECMA-262, which JSON Schema has, as one of Rust, which llguidance has.

    Rust knows sets in classes ("[[a]]", "&&"), its \d, \w and dot match more of Unicode, and its \s
    less. A hyphen beside one of these in a class is itself, as it is without ECMA's flag `u`.

    >>> print(ecma_pattern(r"^[[a-c]\d[x\D-]$"))
    ^[\[a-c][0-9][x[^0-9]\-]$
    """
    pieces, inside, position, after_class = [""], False, 0, False
    while position < len(pattern):
        each = pattern[position]
        width, members = 1, None
        if each == "\\":
            width = 2
            each = pattern[position : position + 2]
            members = _ECMA_CLASSES.get(each.lower())
            if members is not None:
                not_in = "^" if each[1].isupper() else ""
                each = members if inside and not not_in else f"[{not_in}{members}]"
        elif inside:
            inside = each != "]"
            if each in "[&~":
                each = f"\\{each}"
            elif each == "-" and (
                after_class or pattern[position + 1 : position + 3].lower() in _ECMA_CLASSES
            ):
                each = "\\-"
            elif pattern[position : position + 2] == "--":  # the end of a range, or its beginning
                is_first = pieces[-1] in ("[", "[^")
                each, width = ("\\-", 1) if is_first else ("-\\-", 2)
        elif each == "[":
            inside = True
            if pattern[position + 1 : position + 2] == "^":
                each, width = "[^", 2
        elif each == ".":
            each = r"[^\n\r\x{2028}\x{2029}]"
        pieces.append(each)
        position, after_class = position + width, members is not None
    return "".join(pieces)
