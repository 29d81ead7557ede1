"""SoakResult: what counts as lost, how growth is measured. The soak itself: tests/gateway/test_soak.py."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_deepinfer.bench.gateway.soak import SoakResult, resident_bytes, soak


def result(**changes: Any) -> SoakResult:
    values: dict[str, Any] = {"accepted": 10, "ended": 10, "outcomes": {"complete": 10}, "faults": {}}
    return SoakResult(**(values | {"rss_bytes": [100] * 60, "leaked": {"streams": 0}} | changes))


def test_nothing_lost() -> None:
    assert result().lost == 0
    assert result(outcomes={"complete": 4, "error": 3, "left": 2, "cut": 1}).lost == 0


def test_everything_that_is_lost() -> None:
    assert result(ended=8).lost == 2
    assert result(ended=13).lost == 3
    assert result(outcomes={"complete": 7, "lost": 3}).lost == 3
    assert result(faults={"delta after the end": 2, "submitted twice": 1}).lost == 3
    assert result(ended=9, outcomes={"lost": 1}, faults={"x": 1}).lost == 3


def test_growth_is_that_of_the_second_half() -> None:
    assert result().rss_growth == 0.0
    warm_up = [1000 + 100 * i for i in range(30)] + [5000] * 30
    assert result(rss_bytes=warm_up).rss_growth == 0.0
    leak = [1000 + 10 * i for i in range(60)]  # second half 1300 … 1590; windows of 6: 1325 and 1565
    assert abs(result(rss_bytes=leak).rss_growth - (1565 / 1325 - 1)) < 1e-12


def test_growth_ignores_a_single_spike() -> None:
    samples = [100] * 59 + [900]
    assert result(rss_bytes=samples).rss_growth == 0.0


def test_resident_bytes() -> None:
    before = resident_bytes()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * (len(block) // 4096)
    assert resident_bytes() - before > 60 << 20


@pytest.mark.slow
@pytest.mark.long
async def test_a_short_soak() -> None:
    found = await soak(60, seed=3)
    assert found.lost == 0, found
    assert not any(found.leaked.values())
    assert sum(found.outcomes.values()) == 60
    assert found.outcomes["complete"] > 25
    assert found.accepted == found.ended >= 40
    assert len(found.rss_bytes) == 60
