"""Targets that requests carry: seconds, or a name in `ignored`; never an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.engine import params
from vllm_deepinfer_plugins.scheduler.targets import ITL_TARGET_MS, NONE, TTFT_TARGET_MS, Targets, targets_of


def request(extra: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


def test_the_names_are_those_that_the_engine_protocol_sends() -> None:
    assert (TTFT_TARGET_MS, ITL_TARGET_MS) == (params.TTFT_TARGET_MS, params.ITL_TARGET_MS)


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": {}}])
def test_none(extra: Any) -> None:
    assert targets_of(request(extra)) is NONE


def test_a_pooling_request_has_none() -> None:
    assert targets_of(SimpleNamespace(sampling_params=None)) is NONE  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({TTFT_TARGET_MS: 500}, Targets(ttft=0.5)),
        ({ITL_TARGET_MS: 25.5}, Targets(itl=0.0255)),
        ({ITL_TARGET_MS: "40", TTFT_TARGET_MS: "1e3"}, Targets(ttft=1.0, itl=0.04)),
        ({ITL_TARGET_MS: 0, TTFT_TARGET_MS: 200}, Targets(ttft=0.2, ignored=(ITL_TARGET_MS,))),
    ],
)
def test_milliseconds_become_seconds(extra: dict[str, Any], expected: Targets) -> None:
    assert targets_of(request(extra)) == expected


@given(st.one_of(st.none(), st.booleans(), st.text(), st.floats(max_value=0), st.lists(st.integers())))
def test_what_is_no_positive_number_is_ignored_and_named(value: Any) -> None:
    found = targets_of(request({ITL_TARGET_MS: value}))
    assert found == Targets(ignored=(ITL_TARGET_MS,)) or (isinstance(value, str) and float(value) > 0)


@pytest.mark.parametrize("value", ["nan", "inf", float("inf"), float("nan"), "4O", -1, True])
def test_numbers_that_are_none(value: Any) -> None:
    assert targets_of(request({TTFT_TARGET_MS: value})) == Targets(ignored=(TTFT_TARGET_MS,))
