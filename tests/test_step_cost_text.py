"""A saved fit comes back exactly, or says in a clause why not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, StepCost
from vllm_deepinfer.step_cost_text import ForeignFit, dumps, loads

HERE = {"model": "tiny", "dtype": "bfloat16", "vllm": "0.32.0"}
numbers = st.floats(0, 1e3)
optional = st.none() | st.integers(1, 4096)
costs = st.builds(
    StepCost,
    *[numbers] * 6,
    attention=st.builds(AttentionBound, window=optional, top_k=optional),
    tile=st.integers(1, 512),
)


@given(costs, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
def test_what_is_written_is_read_back(cost: StepCost, fingerprint: dict[str, str]) -> None:
    assert loads(dumps(cost, fingerprint), fingerprint) == cost


@pytest.mark.parametrize("key", HERE)
def test_a_foreign_fit_names_what_differs(key: str) -> None:
    with pytest.raises(ForeignFit, match=f"it was fitted with {key} '{HERE[key]}', and this is 'other'"):
        loads(dumps(TWO_CORE_DENSE, HERE), {**HERE, key: "other"})


def test_a_key_that_only_one_side_has_is_a_difference() -> None:
    with pytest.raises(ForeignFit, match="cpu None, and this is 'Xeon'"):
        loads(dumps(TWO_CORE_DENSE, HERE), {**HERE, "cpu": "Xeon"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not of format 1"),
        ('{"format": 0}', "not of format 1"),
        ('{"format": 1}', "no fingerprint"),
        ('{"format": 1, "fingerprint": {}}', "cannot be used"),
        ('{"format": 1, "fingerprint": {}, "cost": {"per_step": 1}}', "cannot be used"),
        ('{"format": 1, "fingerprint": {}, "cost": [1]}', "cannot be used"),
    ],
)
def test_damaged_text(text: str, reason: str) -> None:
    with pytest.raises(ForeignFit, match=reason):
        loads(text, {})


@pytest.mark.parametrize("value", [-1.0, "1", None, float("nan"), [1]])
def test_a_coefficient_that_is_none(value: object) -> None:
    document = json.loads(dumps(TWO_CORE_DENSE, {}))
    document["cost"]["per_token"] = value
    with pytest.raises(ForeignFit, match="cannot be used"):
        loads(json.dumps(document), {})
