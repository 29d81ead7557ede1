"""Fields of a request: ranges, unknown names, structured outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_deepinfer.engine import ConstraintKind
from vllm_deepinfer.gateway.dialects import chat, messages, responses
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.fields import EngineFields, refuse_unknown

ALL = frozenset(EngineFields.model_fields)


def read(**body: Any) -> EngineFields:
    return EngineFields.read(body, ALL)


def refused(**body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        fields = read(**body)
        fields.bias()
        fields.constraint()
    assert caught.value.status == 400
    return caught.value.message


def test_fields_that_are_not_asked_for_are_not_read() -> None:
    assert EngineFields.read({"n": 5, "seed": 3}, {"seed"}).n is None


def test_null_is_the_same_as_absent() -> None:
    assert read(n=None, seed=None, logit_bias=None, structured_outputs=None) == read()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n": 0}, "n: "),
        ({"n": 129}, "n: "),
        ({"n": True}, "n: "),
        ({"n": "2"}, "n: "),
        ({"seed": 2**63}, "seed: "),
        ({"seed": 1.5}, "seed: "),
        ({"temperature": -0.1}, "temperature: "),
        ({"temperature": float("nan")}, "temperature: "),
        ({"temperature": float("inf")}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"top_k": -2}, "top_k: "),
        ({"presence_penalty": 2.1}, "presence_penalty: "),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0: "),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: "),
        ({"logit_bias": {"-5": 1}}, "logit_bias: keys are token ids"),
        ({"logit_bias": {"٣": 1}}, "logit_bias: keys are token ids"),
        ({"logit_bias": {"1" * 30: 1}}, "logit_bias: keys are token ids"),
        ({"cache_salt": ""}, "cache_salt: "),
        ({"service_tier": "gold"}, "service_tier: "),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "exactly one of"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "choice needs at least one"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml: "),
        ({"structured_outputs": {"regex": ""}}, "needs a value"),
    ],
)
def test_out_of_range(body: dict[str, Any], says: str) -> None:
    assert says in refused(**body)


def test_a_message_does_not_repeat_a_long_value() -> None:
    assert len(refused(cache_salt="x" * 10_000)) < 200


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"json": {"type": "object"}}, ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"json_object": True}, ConstraintKind.JSON_OBJECT, ""),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"grammar": 'root ::= "a"'}, ConstraintKind.GRAMMAR, 'root ::= "a"'),
        ({"choice": ["ä", "b"]}, ConstraintKind.CHOICE, '["ä", "b"]'),
        ({"structural_tag": "{}"}, ConstraintKind.STRUCTURAL_TAG, "{}"),
    ],
)
def test_structured_outputs(given: dict[str, Any], kind: ConstraintKind, value: str) -> None:
    constraint = read(structured_outputs=given).constraint()
    assert constraint is not None and (constraint.kind, constraint.value) == (kind, value)


def test_logit_bias() -> None:
    assert read(logit_bias={"5": 1, "0007": -2.5}).bias() == {5: 1.0, 7: -2.5}


def test_unknown_names_get_the_nearest_one() -> None:
    known = frozenset({"temperature", "top_p"})
    refuse_unknown({"temperature": 1}, known, {})
    for body, says in (
        ({"temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
        ({"zzz": 1}, "unknown field 'zzz'."),
        ({"old": 1}, "old: use new."),
    ):
        with pytest.raises(ApiError) as caught:
            refuse_unknown(body, known, {"old": "use new."})
        assert caught.value.message == says
    refuse_unknown({"old": None}, known, {"old": "use new."})  # null is as good as absent


def test_the_sets_of_a_dialect_do_not_overlap() -> None:
    for dialect in (chat, messages, responses):
        recipe, own, inert = dialect.RECIPE_FIELDS, dialect.OWN_FIELDS, dialect.INERT_FIELDS
        assert not recipe & own and not recipe & inert and not own & inert
        assert not dialect.KNOWN & dialect.REFUSED.keys()


def test_a_constraint_crosses_processes() -> None:
    constraint = read(structured_outputs={"json": {"é": 1}}).constraint()
    assert constraint is not None and json.loads(constraint.value) == {"é": 1}
