"""Fields of others' APIs that minigen does not act on: values that ask for nothing pass.

Common clients send many of these always; what would change an answer is refused by its name.
"""

import json
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

TYPES = {"boolean": bool, "string": str, "object": dict}


class Neutral:
    """Marks a field that may be null or one of `values`, each of which asks for nothing."""

    def __init__(self, *values: Any):
        self.values = (None, *values)

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """How pydantic is to check it."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """How it shows on the OpenAPI page."""
        description = "Accepted only with a value that asks for nothing."
        return {"enum": list(self.values), "description": description}

    def _check(self, value: Any) -> None:
        # By type too, since 0 equals false; and any of them is as good as absent from here on.
        if not any(type(value) is type(each) and value == each for each in self.values):
            allowed = " or ".join(json.dumps(each) for each in self.values)
            raise ValueError(f"asks for what minigen does not do; leave it out, or send {allowed}")


class Ignored:
    """Marks a field that may hold anything of a JSON type: a note that changes no answer."""

    def __init__(self, json_type: str):
        self.json_type = json_type

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """How pydantic is to check it."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """How it shows on the OpenAPI page."""
        description = "Accepted; it changes no answer."
        return {"anyOf": [{"type": self.json_type}, {"type": "null"}], "description": description}

    def _check(self, value: Any) -> None:
        if value is not None and not isinstance(value, TYPES[self.json_type]):
            raise ValueError(f"must be null or of type {self.json_type}")
