"""The OpenAPI document: FastAPI's own routes, and the raw ASGI ones added by hand."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vllm_deepinfer.gateway.fields import EngineFields, StructuredOutputsField

Json = dict[str, Any]

_TEXTS = {
    200: "Done.",
    400: "The request is not valid; the message says what to change.",
    401: "No or an unknown API key.",
    404: "There is no such thing.",
    405: "The path has no such method.",
    408: "The request body came too slowly.",
    409: "The state does not allow it.",
    413: "The request body is too large.",
    429: "A limit is reached; Retry-After says when to come back.",
    500: "The engine or the gateway failed.",
    503: "The engine cannot work now.",
}
_ANSWER: Json = {"content": {"application/json": {"schema": {"type": "object"}}}}


def documented(*statuses: int, body: str | None = None) -> Json:
    """Arguments of a FastAPI route that documents its statuses and its body's schema."""
    shown = (*statuses, *((401,) if 401 not in statuses else ()))
    result: Json = {"responses": {status: {"description": _TEXTS[status], **_ANSWER} for status in shown}}
    if body is not None:
        result["openapi_extra"] = {"requestBody": _body(body)}
    return result


def _body(schema: str) -> Json:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 1}
OBJECT: Json = {"type": "object"}
OBJECTS: Json = {"type": "array", "items": OBJECT}
TEXTS: Json = {"type": "array", "items": TEXT}
ROLE_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, OBJECTS]},
    },
    "required": ["role", "content"],
}


def _schemas(engine: Json) -> Json:
    """Request bodies. Fields of the engine are the same in all APIs."""
    common: Json = {
        **engine,
        "model": {"type": "string", "description": "A name from /v1/models."},
        "stream": FLAG,
        "tools": OBJECTS,
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, OBJECT]},
    }
    chat = common | {
        "messages": {"type": "array", "items": ROLE_MESSAGE, "minItems": 1},
        "max_tokens": COUNT,
        "max_completion_tokens": COUNT,
        "stop": {"anyOf": [TEXT, TEXTS]},
        "stream_options": _object([], include_usage=FLAG),
        "response_format": OBJECT,
        "logprobs": FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "thinking": _object([], type={"enum": ["enabled", "disabled"]}),
        "reasoning_effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]},
    }
    one = {name: value for name, value in common.items() if name != "n"}
    messages = {
        **{name: value for name, value in one.items() if name != "parallel_tool_calls"},
        "messages": {"type": "array", "items": ROLE_MESSAGE, "minItems": 1},
        "system": {"anyOf": [TEXT, OBJECTS]},
        "stop_sequences": TEXTS,
        "thinking": OBJECT,
        "output_config": OBJECT,
        "tool_choice": OBJECT,
    }
    responses = one | {
        "input": {"anyOf": [TEXT, OBJECTS]},
        "instructions": TEXT,
        "max_output_tokens": COUNT,
        "previous_response_id": TEXT,
        "store": FLAG,
        "background": FLAG,
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "reasoning": OBJECT,
        "text": OBJECT,
        "include": TEXTS,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    }
    tokenize = {"prompt": TEXT, "messages": OBJECTS, "return_token_strs": FLAG, "add_special_tokens": FLAG}
    ids: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return {
        "ChatCompletionRequest": _object(["model", "messages"], **chat),
        "ResponsesRequest": _object(["model", "input"], **responses),
        "MessagesRequest": _object(["model", "messages", "max_tokens"], max_tokens=COUNT, **messages),
        "CountTokensRequest": _object(["model", "messages"], **messages),
        "TokenizeRequest": _object([], **tokenize),
        "DetokenizeRequest": _object(["tokens"], tokens=ids),
        "StructuredOutputsField": StructuredOutputsField.model_json_schema(),
    }


_GENERATION = {
    "/v1/chat/completions": ("ChatCompletionRequest", "Chat completion"),
    "/v1/responses": ("ResponsesRequest", "Response"),
    "/v1/messages": ("MessagesRequest", "Message"),
}


def build(app: FastAPI) -> Json:
    """The document, with the generation paths."""
    document = get_openapi(
        title="vLLM-DeepInfer gateway", version=version("vllm-deepinfer"), routes=app.routes
    )
    reference = "#/components/schemas/{model}"
    engine = EngineFields.model_json_schema(ref_template=reference)["properties"]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(_schemas(engine))
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    answer = {"description": _TEXTS[200], "content": {**_ANSWER["content"], **events}}
    errors = {
        str(status): {"description": _TEXTS[status], **_ANSWER}
        for status in (400, 401, 404, 405, 408, 409, 413, 429, 500, 503)
    }
    for path, (schema, summary) in _GENERATION.items():
        document["paths"][path] = {
            "post": {
                "summary": summary,
                "operationId": schema,
                "tags": ["generation"],
                "requestBody": _body(schema),
                "responses": {"200": answer, **errors},
            }
        }
    return document
