"""The form that a request asks of its answers, by OpenAI's, vLLM's and Ollama's names.

Sources: OpenAI's API reference, `response_format`; vLLM's structured outputs; Ollama's `format`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from minigen.errors import ParamsError
from minigen.sampling.structured_outputs import StructuredOutputsParams, structured_outputs_of
from minigen.server.errors import ApiError

MOST_MESSAGES = 10_000  # each costs the event loop about 5 microseconds
MOST_PARTS = 10_000  # of a message
MOST_TOOLS = 1_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class JsonSchemaFormat(_Strict):
    """A named schema; with `strict`, a keyword that JSON Schema does not know is refused."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of an answer: free text, a JSON object, or JSON that is valid by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Renamed:
    """Marks a field that had another name before; any value but null is refused with `now`."""

    def __init__(self, now: str):
        self.now = now

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check for pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema for the OpenAPI page."""
        return {"enum": [None], "description": f"An older name: send {self.now}."}

    def _check(self, value: Any) -> None:
        if value is not None:
            raise ValueError(f"is an older name: send {self.now}")


class Formed(_Strict):
    """The fields of a request that ask for a form; at most one of the first two is given."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with a schema."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="One of json, regex, choice, grammar, json_object; strict, "
        "whitespace_pattern and disable_any_whitespace besides.",
    )
    guided_json: Annotated[Any, Renamed('structured_outputs: {"json": ...}')] = None
    guided_regex: Annotated[Any, Renamed('structured_outputs: {"regex": ...}')] = None
    guided_choice: Annotated[Any, Renamed('structured_outputs: {"choice": ...}')] = None
    guided_grammar: Annotated[Any, Renamed('structured_outputs: {"grammar": ...}')] = None

    @property
    def asks_for_a_form(self) -> bool:
        """Whether answers must have a form, which must be compiled."""
        wanted = self.response_format
        return self.structured_outputs is not None or (wanted is not None and wanted.type != "text")

    def form(self) -> StructuredOutputsParams | None:
        """Return the form, or None for free text. Raises `ApiError` if it cannot be one."""
        wanted, given = self.response_format, self.structured_outputs
        if not self.asks_for_a_form:
            if wanted is not None and wanted.json_schema is not None:
                raise _only_with_its_type()
            return None
        if given is not None and wanted is not None and wanted.type != "text":
            raise ApiError(
                "response_format and structured_outputs both set the form of the answer; give only "
                "one of them.",
                param="structured_outputs",
            )
        with naming_the_form(self):
            if given is not None:
                return structured_outputs_of(given)
            assert wanted is not None
            return _of_format(wanted)


def _of_format(wanted: ResponseFormat) -> StructuredOutputsParams:
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise _only_with_its_type()
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None:
        raise ApiError(
            'response_format of type json_schema needs "json_schema": {"name", "schema"}.',
            param="response_format",
        )
    own = wanted.json_schema
    return StructuredOutputsParams(json=own.schema_, strict=bool(own.strict))


def _only_with_its_type() -> ApiError:
    return ApiError(
        "response_format.json_schema belongs to the type json_schema; leave it out, or change the "
        "type.",
        param="response_format",
    )


def form_of_ollama(wanted: Any) -> StructuredOutputsParams | None:
    """Return the form that Ollama's `format` asks for: "json", a schema, or nothing.

    Raises `ApiError` for anything else.
    """
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return StructuredOutputsParams(json_object=True)
    if not isinstance(wanted, Mapping):
        raise ApiError(
            f'format must be "json" or a JSON schema, not {json.dumps(wanted)[:80]}.',
            param="format",
        )
    with naming("structured_outputs.json", "format"):
        return StructuredOutputsParams(json=wanted)


@contextmanager
def naming_the_form(request: Formed) -> Iterator[None]:
    """Let a `ParamsError` about a form name the field of the request that asks for it."""
    ours, theirs = "structured_outputs", "structured_outputs"
    if request.structured_outputs is None and request.response_format is not None:
        schema = request.response_format.json_schema
        ours = "structured_outputs.json"
        theirs = "response_format" if schema is None else "response_format.json_schema.schema"
    with naming(ours, theirs):
        yield


@contextmanager
def naming(ours: str, theirs: str) -> Iterator[None]:
    """Let a `ParamsError` about the field `ours` be an `ApiError` about the API's field."""
    try:
        yield
    except ParamsError as error:
        if ours not in str(error):
            raise
        raise ApiError(str(error).replace(ours, theirs), param=theirs.partition(".")[0]) from error


def naming_tools(form: StructuredOutputsParams | None) -> AbstractContextManager[None]:
    """Let a `ParamsError` about the grammar name the tools, if it was written for them.

    `form` is the client's own form.
    """
    own = form is not None and form.grammar is not None
    return nullcontext() if own else naming("structured_outputs.grammar", "tools")
