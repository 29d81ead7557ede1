"""Settings: defaults that hold together, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_deepinfer.gateway.settings import GatewaySettings


def test_defaults() -> None:
    settings = GatewaySettings(served_names=("m",))
    assert settings.thinking and settings.max_busy is None and settings.response_db is None
    assert settings.max_waiting <= settings.max_active
    assert settings.max_pending_bytes < settings.max_body_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"served_names": ()},
        {"max_active": 0},
        {"max_waiting": 0},
        {"max_busy": 0},
        {"max_busy": 1.1},
        {"max_body_bytes": 10},
        {"body_timeout_s": 0},
        {"drain_timeout_s": -1},
        {"max_prompt_tokens": 0},
        {"response_ttl_s": 0},
        {"keepalive": 3},
    ],
)
def test_refusals(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**({"served_names": ("m",)} | change))


def test_settings_do_not_change() -> None:
    settings = GatewaySettings(served_names=("m",))
    with pytest.raises(ValidationError):
        settings.max_active = 5  # type: ignore[misc]
