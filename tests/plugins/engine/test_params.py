"""Our sampling parameters in vLLM's words, field by field."""

from __future__ import annotations

import json

import pytest

from vllm_deepinfer.engine import (
    ConstraintKind,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    StructuredOutput,
    Targets,
)

params = pytest.importorskip("vllm_deepinfer_plugins.engine.params")

DEFAULTS = SamplingParams()
EVERYTHING = SamplingParams(
    max_tokens=100,
    min_tokens=3,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=11,
    stop_token_ids=[5, 6],
    ignore_eos=True,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    logit_bias={7: -3.0},
    logprobs=4,
    prompt_logprobs=2,
)


def request_of(sampling: SamplingParams = DEFAULTS, **values: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=sampling, **values)  # type: ignore[arg-type]


def structured(kind: ConstraintKind, value: str = "", after_reasoning: bool = False) -> GenerateRequest:
    constraint = StructuredOutput(kind=kind, value=value, after_reasoning=after_reasoning)
    return request_of(SamplingParams(structured=constraint))


def test_every_field_arrives_under_its_name() -> None:
    theirs = params.sampling_params_of(request_of(EVERYTHING))
    for name in EVERYTHING.__struct_fields__:
        if name not in ("structured", "forced"):
            assert getattr(theirs, name) == getattr(EVERYTHING, name), name
    assert theirs.detokenize is False
    assert theirs.output_kind.name == "DELTA"
    assert theirs.n == 1 and not theirs.stop
    forced = params.sampling_params_of(request_of(SamplingParams(forced=(3, 4))))
    assert forced.extra_args == {"deepinfer_forced_token_ids": [3, 4]}


def test_the_defaults_ask_for_nothing() -> None:
    theirs = params.sampling_params_of(request_of())
    assert (theirs.max_tokens, theirs.logit_bias, theirs.logprobs) == (None, None, None)
    assert (theirs.extra_args, theirs.structured_outputs) == (None, None)


def test_targets_and_class_travel_as_extra_arguments() -> None:
    targets = Targets(ttft_ms=500.0, itl_ms=40.0)
    theirs = params.sampling_params_of(request_of(targets=targets, traffic_class="agent", cache_ttl_s=60.0))
    assert theirs.extra_args == {
        "deepinfer_ttft_target_ms": 500.0,
        "deepinfer_itl_target_ms": 40.0,
        "prefix_store_class": "agent",
        "prefix_store_ttl_s": 60.0,
    }
    partly = params.sampling_params_of(request_of(targets=Targets(itl_ms=40.0)))
    assert partly.extra_args == {"deepinfer_itl_target_ms": 40.0}


@pytest.mark.parametrize(
    ("kind", "value", "field", "expected"),
    [
        (ConstraintKind.JSON_OBJECT, "", "json_object", True),
        (ConstraintKind.JSON_SCHEMA, '{"type": "object"}', "json", '{"type": "object"}'),
        (ConstraintKind.REGEX, "a+", "regex", "a+"),
        (ConstraintKind.GRAMMAR, 'root ::= "a"', "grammar", 'root ::= "a"'),
        (ConstraintKind.CHOICE, '["a", "b"]', "choice", ["a", "b"]),
        (ConstraintKind.STRUCTURAL_TAG, '{"type": "x"}', "structural_tag", '{"type": "x"}'),
    ],
)
def test_each_kind_of_constraint_is_vllms_own(
    kind: ConstraintKind, value: str, field: str, expected: object
) -> None:
    theirs = params.sampling_params_of(structured(kind, value)).structured_outputs
    names = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    given = {name: getattr(theirs, name) for name in names if getattr(theirs, name) is not None}
    assert given == {field: expected}


def test_every_kind_is_mapped() -> None:
    for kind in ConstraintKind:
        value = "" if kind is ConstraintKind.JSON_OBJECT else json.dumps(["a"])
        assert params.sampling_params_of(structured(kind, value)).structured_outputs is not None


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (ConstraintKind.JSON_SCHEMA, "{", "kind json_schema is not valid JSON"),
        (ConstraintKind.STRUCTURAL_TAG, "nope", "kind structural_tag is not valid JSON"),
        (ConstraintKind.CHOICE, "[]", "JSON array of strings, not empty"),
        (ConstraintKind.CHOICE, '["a", 1]', "JSON array of strings, not empty"),
        (ConstraintKind.CHOICE, '{"a": 1}', "JSON array of strings, not empty"),
    ],
)
def test_malformed_constraints_are_refused(kind: ConstraintKind, value: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        params.sampling_params_of(structured(kind, value))


def test_when_a_constraint_begins() -> None:
    assert params.reasoning_ended(request_of()) is None
    assert params.reasoning_ended(structured(ConstraintKind.JSON_OBJECT)) is True
    assert params.reasoning_ended(structured(ConstraintKind.JSON_OBJECT, after_reasoning=True)) is False
