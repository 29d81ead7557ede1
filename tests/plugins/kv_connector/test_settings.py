"""Settings: defaults, and each mistake in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_deepinfer_plugins.kv_connector.settings import read_settings

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.admission import Mode


def test_only_the_store_is_required() -> None:
    settings = read_settings({"store": "/kv"}, "recompute")
    assert settings.capacity_bytes is None
    assert settings.rule.mode is Mode.EXPECTED_REUSE
    assert settings.retention.choose("agent").ttl_s == 3 * 86_400


def test_own_classes() -> None:
    own = [{"name": "batch", "code": 5, "ttl_s": 60, "share": 0.5}]
    settings = read_settings({"store": "/kv", "classes": own, "default_class": "batch"}, "recompute")
    assert settings.retention.choose().code == 5


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "store: Field required"),
        ({"store": "/kv", "capasity": "1GiB"}, "capasity: .*known keys are admission, capacity"),
        ({"store": "/kv", "capacity": "5GB"}, "write a size such as"),
        ({"store": "/kv", "run_tokens": 0}, "run_tokens"),
        ({"store": "/kv", "default_class": "agnet"}, "'agnet' is none of"),
        ({"store": "/kv", "admission": "sometimes"}, "admission"),
        ({"store": "/kv", "load_deadline_s": -1}, "load_deadline_s"),
    ],
)
def test_mistakes(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_settings(extra, "recompute")
    assert "\n" not in str(caught.value)


def test_the_failure_policy_must_recompute() -> None:
    with pytest.raises(UserError, match='"kv_load_failure_policy": "recompute"'):
        read_settings({"store": "/kv"}, "fail")
