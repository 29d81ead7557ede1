"""Request fields of the three APIs: read by the recipe package, by the gateway, or without effect here.

A field in none of these sets is a typo or a feature that does not exist; it is refused with the nearest valid
name, as OpenAI's own server does, and never dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_deepinfer.engine import ConstraintKind, InvalidRequest, StructuredOutput
from vllm_deepinfer.gateway.errors import ApiError, from_validation

ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "standard", "standard_only"]
Probability = Annotated[float, Field(ge=0, le=1)]


class StructuredOutputsField(BaseModel):
    """vLLM's `structured_outputs`: exactly one of these."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: str | None = None


class EngineFields(BaseModel):
    """Fields that the recipe package does not read; names as in vLLM's server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    structured_outputs: StructuredOutputsField | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any], names: Container[str]) -> EngineFields:
        """The fields `names` of `body`. Raises: ApiError naming the first bad one."""
        try:
            return cls.model_validate({name: body[name] for name in body if name in names})
        except ValidationError as error:
            raise from_validation(error) from None

    def bias(self) -> dict[int, float]:
        """`logit_bias` with its keys as token ids. Raises: ApiError for a key that is none."""
        result = {}
        for key, value in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 9:
                raise ApiError(400, f"logit_bias: keys are token ids, got {key[:20]!r}.", param="logit_bias")
            result[int(key)] = value
        return result

    def constraint(self) -> StructuredOutput | None:
        """`structured_outputs` as the engine reads it, from the first token on."""
        fields = self.structured_outputs
        if fields is None:
            return None
        given = {name: value for name, value in fields if value is not None and value is not False}
        if len(given) != 1:
            raise ApiError(
                400,
                "structured_outputs needs exactly one of json, json_object, regex, grammar, choice and "
                f"structural_tag, got {len(given)}.",
                param="structured_outputs",
            )
        (name, value), *_ = given.items()
        return _constraint(name, value)


def _constraint(name: str, value: Any) -> StructuredOutput:
    if name == "json_":
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = ConstraintKind.JSON_SCHEMA
    elif name == "json_object":
        kind, text = ConstraintKind.JSON_OBJECT, ""
    elif name == "choice":
        kind, text = ConstraintKind.CHOICE, json.dumps(value, ensure_ascii=False)
        if not value:
            raise ApiError(400, "choice needs at least one string.", param="structured_outputs")
    else:
        kind, text = ConstraintKind(name), value
    try:
        return StructuredOutput(kind=kind, value=text)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param="structured_outputs") from None


def refuse_unknown(body: Mapping[str, Any], known: frozenset[str], refused: Mapping[str, str]) -> None:
    """Raises: ApiError for a field that this API does not have, or that has a successor (`refused`)."""
    for name, value in body.items():
        if name in refused and value is not None:
            raise ApiError(400, f"{name[:60]}: {refused[name]}", param=name)
        if name not in known and name not in refused:
            near = get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else "."
            message = f"unknown field {name[:60]!r}{hint}"
            raise ApiError(400, message, param=name[:60], code="unknown_parameter")
