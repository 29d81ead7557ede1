"""The benchmark's driver on a tiny engine: what it counts, and that it leaves the engine idle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from tests.plugins.scheduler.harness import tiny

pytestmark = pytest.mark.slow

STOCK = {"chunk": 128, "threshold": 0}
OURS = {"target_ms": 30.0}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm_deepinfer_plugins.scheduler.bench.driver import Driver

    with tiny(tmp_path_factory.mktemp("models"), enable_prefix_caching=False) as llm:
        yield Driver(llm, 512)


def idle(driver: Any) -> bool:
    return not driver._core.scheduler.has_unfinished_requests() and not driver._core.scheduler.running


def test_a_closed_loop_counts_prompts_and_every_step(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_deepinfer_plugins.scheduler.bench.driver.DECODE_PROMPT", 32)
    found = driver.closed(STOCK, repeat(200), decodes=3, seconds=0.4, warm_up=0.1)
    assert found.seconds == pytest.approx(sum(found.periods))
    assert found.seconds >= 0.4
    assert 0 < found.tokens <= 125 * len(found.periods)  # 128 less three decodes
    assert found.ttft and not found.use
    assert found.summary()["p99"] <= max(found.periods)
    assert idle(driver)


def test_ours_keeps_what_it_learned_for_the_next_window(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_deepinfer_plugins.scheduler.bench.driver.DECODE_PROMPT", 32)
    driver.closed(OURS, repeat(200), decodes=2, seconds=1.5, warm_up=0.1)
    first = driver.learner
    assert first is not None
    found = driver.closed(OURS, repeat(200), decodes=2, seconds=0.3, warm_up=0.0)
    assert driver.learner is first and found.tokens > 0
    assert found.use or not first.usable, "on a busy machine no fit may be good enough"
    assert idle(driver)


def test_an_open_stream_serves_every_prompt(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_deepinfer_plugins.scheduler.bench.driver.DECODE_PROMPT", 32)
    arrivals = [(0.01 * number, 100) for number in range(7)]
    for setting in (STOCK, OURS):
        found = driver.opened(setting, arrivals, decodes=2)
        assert len(found.ttft) == 7 and all(seconds > 0 for seconds in found.ttft)
        assert found.tokens >= 7 * 99
        assert idle(driver)


def test_schedule_is_timed_once_per_step(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adding = driver._add
    monkeypatch.setattr(driver, "_add", lambda length, outputs: adding(min(length, 400), outputs))
    taken = driver.schedule_times(OURS, running=8, waiting=5, steps=6)
    assert len(taken) == 6 and all(0 < seconds < 1 for seconds in taken)
    assert idle(driver)
