"""Close the objects of a JSON schema, so that a model writes only the properties that it declares.

JSON Schema lets an object have any further properties, and a model that may add some often adds
them without end. An answer to the closed schema is valid by the original one. The structured
outputs of vLLM, SGLang and llama.cpp do the same by default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Beside these, an object's properties are declared in several places, so none of them may close it.
_TOGETHER = {"allOf", "anyOf", "oneOf", "if", "not", "$ref", "dependentSchemas", "$dynamicRef"}
_OPEN = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("minProperties", "propertyNames"),
}
_NAMED = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where it is absent.

    A schema that declares the properties of one object in several places stays as it is.

    >>> closed({"properties": {"a": {"properties": {}}}})["properties"]["a"]
    {'properties': {}, 'additionalProperties': False}
    """
    declared = [each for each in _all(schema) if "properties" in each]
    together = any(_TOGETHER & each.keys() for each in declared)
    if together or any({"allOf", "if", "not", "oneOf"} & each.keys() for each in _all(schema)):
        return dict(schema)
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for keyword in _NAMED:
        if isinstance(found.get(keyword), Mapping):
            found[keyword] = {name: _closed(each) for name, each in found[keyword].items()}
    for keyword in _LISTED:
        if isinstance(found.get(keyword), list):
            found[keyword] = [_closed(each) for each in found[keyword]]
    if isinstance(found.get("items"), Mapping):
        found["items"] = _closed(found["items"])
    if _may_be_closed(found):
        found["additionalProperties"] = False
    return found


def _may_be_closed(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema declares all properties that its object may need."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return not _OPEN & schema.keys() and all(str(name) in properties for name in required)


def _all(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those inside of it, at any place."""
    level = [schema]
    while level:
        found = [each for each in level if isinstance(each, Mapping)]
        yield from found
        level = []
        for each in found:
            for keyword, value in each.items():
                if keyword in _NAMED and isinstance(value, Mapping):
                    level += value.values()
                elif isinstance(value, list):
                    level += value
                else:
                    level.append(value)
