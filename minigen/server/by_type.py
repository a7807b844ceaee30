"""Fields of a request whose objects differ by their `type`: items, blocks, tools, forms.

pydantic's own unions put the type into the place of an error; here "input[0].call_id" stays so.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

NO_REFUSALS: Mapping[str, str] = MappingProxyType({})


class ByType:
    """Marks a field that takes an object of one of `models`, each with a literal `type`.

    An object without a type is of type `usual`; one of `texts` may stand for an object. A null
    within an object means the same as a missing field. `refused` has the sentences for types that
    clients know and minigen does not, `others` the one for all other types.
    """

    def __init__(
        self,
        *models: type[BaseModel],
        usual: str | None = None,
        texts: tuple[str, ...] = (),
        refused: Mapping[str, str] = NO_REFUSALS,
        others: str | None = None,
    ):
        self.models = {
            name: model
            for model in models
            for name in get_args(model.model_fields["type"].annotation)
        }
        self.usual, self.texts, self.refused = usual, texts, refused
        self.others = others or f"should be {' or '.join(map(repr, self.models))}"

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        different = dict.fromkeys(self.models.values())
        schemas: list[Any] = [handler(model.__pydantic_core_schema__) for model in different]
        return {"anyOf": schemas + ([{"enum": list(self.texts)}] if self.texts else [])}

    def _check(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.texts:
            return value
        if not isinstance(value, dict):
            texts = "".join(f"{json.dumps(each)}, " for each in self.texts)
            raise ValueError(f"should be {texts}{'or ' if texts else ''}an object with a type")
        given = {name: each for name, each in value.items() if each is not None}
        kind = given.get("type", self.usual)
        if not isinstance(kind, str) or kind not in self.models:
            raise self._wrong_type(kind)
        return self.models[kind].model_validate(given)

    def _wrong_type(self, kind: Any) -> ValidationError:
        sentence = self.refused.get(kind, self.others) if isinstance(kind, str) else self.others
        problem = PydanticCustomError("wrong_type", "{sentence}", {"sentence": sentence})
        details = InitErrorDetails(type=problem, loc=("type",), input=kind)
        return ValidationError.from_exception_data("type", [details])
