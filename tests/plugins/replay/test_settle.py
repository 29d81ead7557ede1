"""Which replays an engine starts with, and the one sentence for what cannot be followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.platforms import current_platform
from vllm_deepinfer_plugins.replay.scheduler import ReplayScheduler
from vllm_deepinfer_plugins.replay.settle import SCHEDULER, WORKER, ReplayError, settle
from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler

STOCK = "vllm.v1.core.sched.scheduler.Scheduler"


class SchedulerConfig(SimpleNamespace):
    def get_scheduler_cls(self) -> Any:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        return resolve_obj_by_qualname(self.scheduler_cls)


def config(
    *,
    worker: str = "auto",
    scheduler: str | None = None,
    caching: bool = True,
    swa: bool = True,
    transfer: object = None,
    **ours: Any,
) -> Any:
    return SimpleNamespace(
        additional_config={"deepinfer": ours, "other": 1} if ours else {},
        cache_config=SimpleNamespace(swa_bounded_replay=swa, enable_prefix_caching=caching),
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(worker_cls=worker),
        scheduler_config=SchedulerConfig(scheduler_cls=scheduler),
        use_v2_model_runner=False,
    )


def settled(given: Any) -> tuple[bool, bool]:
    settle(given)
    part = given.additional_config["deepinfer"]
    return part["encoder_replay"], part["decoder_replay"]


def test_both_by_default_with_worker_and_scheduler() -> None:
    given = config()
    assert settled(given) == (True, True)
    assert given.parallel_config.worker_cls == WORKER
    assert given.scheduler_config.scheduler_cls == SCHEDULER
    assert given.scheduler_config.get_scheduler_cls() is ReplayScheduler
    assert settled(given) == (True, True), "settling is idempotent"


def test_both_when_asked_with_worker_and_scheduler() -> None:
    given = config(encoder_replay=True)
    assert settled(given) == (True, True)
    assert given.parallel_config.worker_cls == WORKER
    assert given.scheduler_config.scheduler_cls == SCHEDULER
    assert given.scheduler_config.get_scheduler_cls() is ReplayScheduler
    assert settled(given) == (True, True), "settling is idempotent"


def test_other_settings_stay() -> None:
    given = config(itl_target_ms=40.0)
    settle(given)
    assert given.additional_config["other"] == 1
    assert given.additional_config["deepinfer"]["itl_target_ms"] == 40.0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (config(batch_invariant=True), (False, False)),
        (config(batch_invariant=True, encoder_replay=True), (True, False)),
        (config(batch_invariant=True, encoder_replay=True, decoder_replay=True), (True, True)),
        (config(swa=False), (False, False)),
        (config(encoder_replay=False), (False, False)),
        (config(encoder_replay=False, caching=False, decoder_replay=True), (False, True)),
        (config(encoder_replay=False, caching=False), (False, True)),
        (config(encoder_replay=False, caching=False, transfer="a store"), (False, False)),
        (config(transfer="a store"), (True, True)),
        (config(decoder_replay=False), (True, False)),
        (config(caching=False), (True, True)),
        (config(batch_invariant=False), (True, True)),
        (config(encoder_replay=True, decoder_replay=False), (True, False)),
    ],
)
def test_what_follows_from_what(given: Any, wanted: tuple[bool, bool]) -> None:
    assert settled(given) == wanted


def test_without_replays_vllm_s_own_classes_stay() -> None:
    given = config(encoder_replay=False, decoder_replay=False)
    settle(given)
    assert given.parallel_config.worker_cls == "auto" and given.scheduler_config.scheduler_cls is None


def test_the_time_budget_scheduler_is_one_of_ours() -> None:
    name = "vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler"
    given = config(scheduler=name, encoder_replay=True)
    assert settled(given) == (True, True) and given.scheduler_config.scheduler_cls == name
    assert given.scheduler_config.get_scheduler_cls() is TimeBudgetScheduler


def test_a_foreign_scheduler_or_worker_costs_them_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(config(scheduler=STOCK)) == (False, False)
    assert "encoder_replay is off: --scheduler-cls is " + STOCK in caplog.text
    caplog.clear()
    before = lost("encoder_replay")
    assert settled(config(worker="my.Worker")) == (False, False)
    assert "--worker-cls is my.Worker" in caplog.text
    assert lost("encoder_replay") == before + 1, "/metrics says so, too"


def lost(part: str) -> float:
    return REGISTRY.get_sample_value("deepinfer_fallbacks_total", {"part": part}) or 0.0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (config(scheduler=STOCK, encoder_replay=True), '"encoder_replay"] is true, but --scheduler-cls is'),
        (config(worker="my.Worker", decoder_replay=True), "leave the flag out"),
        (config(encoder_replay=False, decoder_replay=True), "write encoder_replay true as well"),
    ],
)
def test_what_was_asked_for_and_cannot_be(given: Any, sentence: str) -> None:
    with pytest.raises(ReplayError) as raised:
        settle(given)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False, raising=False)
    assert settled(config()) == (False, False)
    with pytest.raises(ReplayError, match="on CPUs"):
        settle(config(encoder_replay=True))
