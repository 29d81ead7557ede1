"""One error type for everything a client can be told, and how other layers' errors become it."""

from __future__ import annotations

import json
from typing import Any

from deepseek_recipe import ConversionError
from pydantic import ValidationError

from vllm_deepinfer.engine import EngineError, EngineUnavailable, InvalidRequest, Overloaded

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An HTTP error with one sentence for the user; each dialect renders it in its own envelope.

    Args:
        status: HTTP status, 400 to 599.
        message: what was wrong, where, and what to write instead. Never text of a prompt.
        param: the request field at fault.
        code: machine-readable detail, such as "model_not_found".
        retry_after_s: sent as `Retry-After` (rounded up).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's and Anthropic's `error.type`."""
        return _KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that belong to this error."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", str(max(1, -(-self.retry_after_s // 1))).split(".")[0].encode())]


def internal_error() -> ApiError:
    """What a client is told about a fault of ours; the log has the rest."""
    return ApiError(500, "the gateway failed on this request; send it again.")


def from_conversion(error: ConversionError | ValueError) -> ApiError:
    """Error of the recipe package → ApiError: its JSON body holds the sentence, a ValueError is one."""
    if not isinstance(error, ConversionError):
        return ApiError(400, sentence(str(error)))
    try:
        detail = json.loads(error.body)["error"]
        return ApiError(error.status_code, sentence(detail["message"]), param=detail.get("param"))
    except (ValueError, KeyError, TypeError):
        return ApiError(error.status_code, "the request cannot be converted for this model.")


def from_engine(error: EngineError) -> ApiError:
    """Refusal of the engine → ApiError."""
    if isinstance(error, InvalidRequest):
        return ApiError(400, sentence(str(error)))
    if isinstance(error, Overloaded):
        return ApiError(429, sentence(str(error)), code="overloaded", retry_after_s=error.retry_after_s)
    retry = 1.0 if isinstance(error, EngineUnavailable) else None
    return ApiError(503, sentence(str(error)), code="engine_unavailable", retry_after_s=retry)


def from_validation(error: ValidationError) -> ApiError:
    """First pydantic error → one sentence that names the field and what was given, cut short."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    given = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
    return ApiError(400, f"{where}: {_plain(first)}{given}.", param=where)


_WORDS = {  # pydantic's error type → what to send; the rest says so in its own words
    "int_type": "send a whole number",
    "int_from_float": "send a whole number",
    "int_parsing": "send a whole number",
    "float_parsing": "send a number",
    "bool_parsing": "send true or false",
    "float_type": "send a number",
    "bool_type": "send true or false",
    "string_type": "send a string",
    "list_type": "send a list",
    "dict_type": "send an object",
    "model_type": "send an object",
    "model_attributes_type": "send an object",
    "missing": "this field is required",
    "extra_forbidden": "there is no such field",
    "greater_than_equal": "send {ge:g} or more",
    "less_than_equal": "send {le:g} or less",
    "greater_than": "send more than {gt:g}",
    "less_than": "send less than {lt:g}",
    "literal_error": "send {expected}",
    "string_too_short": "send {min_length} characters or more",
    "string_too_long": "send {max_length} characters or fewer",
}


def _plain(error: Any) -> str:
    words = _WORDS.get(error["type"])
    if words is None:
        text: str = error["msg"]
        return text[:1].lower() + text[1:]
    return words.format(**error.get("ctx", {}))


def error_body(route: str, error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The error envelope of a path: Anthropic's under /v1/messages, OpenAI's everywhere else."""
    if route.startswith("/v1/messages"):
        kind = "invalid_request_error" if error.status in (405, 409) else error.kind
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sentence(text: str) -> str:
    """One line with an end."""
    text = " ".join(text.split()) or "the request is not valid"
    return text if text[-1] in ".!?" else f"{text}."
