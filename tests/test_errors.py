"""The error that the command line shows as one sentence."""

from __future__ import annotations

from vllm_deepinfer.errors import UserError


def test_a_user_error_is_a_value_error_with_its_sentence() -> None:
    assert isinstance(UserError("Say A instead of B."), ValueError)
    assert str(UserError("Say A instead of B.")) == "Say A instead of B."
