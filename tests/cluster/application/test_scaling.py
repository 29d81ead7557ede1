"""The scaling policy as Serve calls it: measures in, a number out, and a record of why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_deepinfer.cluster.application import decisions
from vllm_deepinfer.cluster.application.decisions import ScalingRecord
from vllm_deepinfer.cluster.application.scaling import PoolScaling, measures_of


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], ScalingRecord]:
    kept: dict[tuple[str, str], ScalingRecord] = {}
    monkeypatch.setattr(decisions, "read", lambda app, pool: kept.get((app, pool)))
    monkeypatch.setattr(decisions, "write", lambda app, pool, record: kept.update({(app, pool): record}))
    return kept


def context(now: float, target: int, state: Any = None, waiting: float = 0.0, **metrics: Any) -> Any:
    return SimpleNamespace(
        app_name="app",
        current_time=now,
        target_num_replicas=target,
        policy_state=state,
        aggregated_metrics=metrics,
        total_queued_requests=waiting,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )


def test_measures_by_replica() -> None:
    found = measures_of({"queue_s": {"b": 2.0, "a": 1.0}, "active": {"a": 3}, "other": {"c": 9.0}})
    assert [(one.queue_s, one.active, one.kv_use) for one in found] == [(1.0, 3.0, 0.0), (2.0, 0.0, 0.0)]
    assert measures_of({}) == []


def test_serve_carries_the_state_from_call_to_call(records: dict[tuple[str, str], ScalingRecord]) -> None:
    policy = PoolScaling("main", "prefill", target_queue_s=1.0, upscale_delay_s=5.0)
    load: dict[str, Any] = {"queue_s": {"r": 3.0}, "active": {"r": 1.0}}
    count, state = policy(context(100.0, 1, None, **load))
    assert count == 1 and state == {"since": {"up_since": 100.0, "down_since": None, "idle_since": None}}
    count, state = policy(context(104.0, 1, state, **load))
    assert count == 1
    count, state = policy(context(105.0, 1, state, **load))
    assert count == 3 and state["since"]["up_since"] is None
    record = records["app", "main"]
    assert (record.target, record.ups, record.downs) == (3, 1, 0)
    assert record.reason == "queue 3.00 s of 1 s" and record.at > 0


def test_every_decision_is_counted_once_also_by_a_controller_that_was_restarted(
    records: dict[tuple[str, str], ScalingRecord],
) -> None:
    settings: dict[str, Any] = {"target_queue_s": 1.0, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    first = PoolScaling("main", "prefill", **settings)
    for _ in range(3):
        first(context(1.0, 2, queue_s={"a": 1.0, "b": 1.0}, active={"a": 1.0}))
    assert (records["app", "main"].ups, records["app", "main"].downs) == (0, 0)
    first(context(2.0, 2, queue_s={"a": 2.0, "b": 2.0}, active={"a": 1.0}))
    second = PoolScaling("main", "prefill", **settings)
    second(context(3.0, 4, queue_s={"a": 1.0}, active={"a": 1.0}))
    record = records["app", "main"]
    assert (record.target, record.ups, record.downs) == (2, 1, 1)


@pytest.mark.parametrize(
    ("role", "queue", "kv"), [("prefill", 2.0, None), ("decode", None, 0.8), ("aggregated", 2.0, 0.8)]
)
def test_a_role_without_targets_has_its_own_measure(role: str, queue: float | None, kv: float | None) -> None:
    settings = PoolScaling("main", role).settings(1, 4)
    assert (settings.target_queue_s, settings.target_kv_use, settings.target_itl_ms) == (queue, kv, None)
    assert (settings.least, settings.most) == (1, 4)


def test_a_recipe_s_target_is_the_only_one_then() -> None:
    settings = PoolScaling("main", "aggregated", target_itl_ms=30.0).settings(1, 4)
    assert (settings.target_queue_s, settings.target_kv_use, settings.target_itl_ms) == (None, None, 30.0)
