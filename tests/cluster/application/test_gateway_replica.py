"""What a gateway process is made of, as far as the recipe decides it; the rest is `test_application.py`."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_deepinfer.cluster.application.gateway_replica import _shortest
from vllm_deepinfer.recipes import Recipe


@pytest.mark.parametrize(
    ("kind", "store", "shortest"),
    [
        ("nixl", None, 0),
        ("nixl", {"url": "/kv", "run_tokens": 64}, 0),
        ("store", {"url": "/kv"}, 0),
        ("store", {"url": "/kv", "run_tokens": 64}, 64),
    ],
)
def test_prompts_that_fill_no_run_of_the_store_are_not_prefilled_apart(
    kind: str, store: Any, shortest: int
) -> None:
    pools = {role: {"role": role} for role in ("prefill", "decode")}
    given = {"name": "app", "model": {"tiny": {}}, "pools": pools, "transfer": {"kind": kind}, "store": store}
    assert _shortest(Recipe.model_validate(given)) == shortest
