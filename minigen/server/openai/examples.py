"""Example responses for the OpenAPI page."""

from typing import Any

_ERROR = {
    "message": "'temperature': should be greater than or equal to 0, not -1.",
    "type": "invalid_request_error",
    "param": "temperature",
    "code": None,
}
_USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_FACTS = {"created": 1767225600, "model": "smollm2-135m", "system_fingerprint": "minigen-0.1.0"}
_MODEL = {"id": "smollm2-135m", "object": "model", "created": 1767225600, "owned_by": "minigen"}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _failing(description: str) -> dict[str, Any]:
    content = {"schema": _ERROR_SCHEMA, "example": {"error": _ERROR}}
    return {"description": description, "content": {"application/json": content}}


def _giving(example: dict[str, Any], **other_content: Any) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {
        200: {"description": "The response.", "content": {**content, **other_content}},
        400: _failing("A field is unknown, has the wrong type, or its value is not supported."),
        404: _failing("The model does not exist."),
        500: _failing("The model or the server failed on this request."),
        503: _failing("The server is shutting down, or the model could not be loaded."),
    }


_EVENTS = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "example": 'data: {"id":"...","object":"...","choices":[...]}\n\ndata: [DONE]\n\n',
    }
}
CHAT = _giving(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        **_FACTS,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "A force.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
    **_EVENTS,
)
COMPLETION = _giving(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        **_FACTS,
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    },
    **_EVENTS,
)
RESPONSE = _giving(
    {
        "id": "resp_1",
        "object": "response",
        "created_at": 1767225600,
        "status": "completed",
        "model": "smollm2-135m",
        "output": [
            {
                "id": "msg_1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "A force.", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "store": False,
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 9,
        },
    },
    **{
        "text/event-stream": {
            "schema": {"type": "string"},
            "example": 'event: response.output_text.delta\ndata: {"sequence_number":4,...}\n\n',
        }
    },
)
NOT_STORED: dict[int | str, dict[str, Any]] = {404: _failing("minigen stores no responses.")}
MODEL = _giving(_MODEL)
MODELS = _giving({"object": "list", "data": [_MODEL]})
TOKENIZE = _giving({"count": 2, "max_model_len": 8192, "tokens": [19556, 665], "token_strs": None})
DETOKENIZE = _giving({"prompt": "Hello there"})
