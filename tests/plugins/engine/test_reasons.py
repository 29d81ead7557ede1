"""One sentence out of vLLM's exceptions."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from vllm_deepinfer_plugins.engine.reasons import reason_of

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
