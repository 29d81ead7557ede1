"""One sentence out of vLLM's exceptions."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from vllm_deepinfer_plugins.engine.reasons import reason_of, refusal_of

from vllm_deepinfer.errors import UserError


class Config(BaseModel):
    size: int = 0

    @field_validator("size")
    @classmethod
    def check(cls, value: int) -> int:
        if value == 1:
            raise UserError("--size is 1: write 2")
        if value > 5:
            raise ValueError("size must be at most 5")
        return value


def refused(value: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Config(size=value)  # type: ignore[arg-type]
    return caught.value


def test_ours_comes_first() -> None:
    try:
        try:
            raise UserError("write something else")
        except UserError as inner:
            raise RuntimeError("engine failed") from inner
    except RuntimeError as error:
        assert reason_of(error) == "write something else"


def test_pydantics_wrapping_goes() -> None:
    assert reason_of(refused(7)) == "size must be at most 5"
    assert reason_of(refused("x")).startswith("Input should be a valid integer")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\ntwo", "one"),
        ("", "RuntimeError"),
        (
            "Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "Engine core initialization failed. vLLM's log above says why.",
        ),
    ],
)
def test_the_first_line(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (
            {"regex": "("},
            "Failed to transform regex into a grammar: Regex parsing error at position 2: The parenthesis is "
            "not closed.",
        ),
        (
            {"regex": "[z-a]"},
            r"^Failed to transform regex into a grammar: .*lower bound is larger than upper",
        ),
        (
            {"json": '{"type": "nope"}'},
            'Failed to transform json schema into a grammar: Unsupported type "nope"',
        ),
        ({"grammar": "root ::= nope"}, 'Invalid grammar specification: .*Rule "nope" is not defined'),
        (
            {"structural_tag": '{"type": "structural_tag", "format": {"type": "x"}}'},
            "Invalid structural tag specification: .*Format type not recognized: x",
        ),
    ],
)
def test_a_bad_constraint_keeps_its_reason(constraint: dict[str, str], says: str) -> None:
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(VLLMClientError) as caught:
        validate_xgrammar_grammar(params)
    said = refusal_of(caught.value)
    assert re.search(says, said) and "\n" not in said and ".cc:" not in said


def test_a_refusal_without_a_cause_is_its_first_line() -> None:
    assert refusal_of(ValueError("\n too long.\nand more")) == "too long."
    assert refusal_of(ValueError()) == "ValueError"
