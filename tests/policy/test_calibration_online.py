"""Refits while serving: towards the truth, back when it changes, never for worse."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy.calibration_traffic import verified_rounds
from vllm_deepinfer.policy.calibration import Calibration
from vllm_deepinfer.policy.calibration_errors import Records, errors
from vllm_deepinfer.policy.calibration_online import EVERY, WINDOW, OnlineCalibration


def feed(online: OnlineCalibration, records: Records, step: int = 64) -> int:
    """Step by step, as an engine does. Returns how many refits were taken over."""
    return sum(
        online.observe(
            records.confidences[i : i + step], records.verified[i : i + step], records.accepted[i : i + step]
        )
        for i in range(0, len(records.verified), step)
    )


def held_out(online: OnlineCalibration, heat: float) -> tuple[float, float]:
    records = verified_rounds(6_000, heat, seed=99)
    before = errors(records.confidences, records).mean_survival
    return before, errors(online.current.apply(records.confidences), records).mean_survival


def test_it_finds_the_truth_and_follows_it_when_it_changes() -> None:
    online = OnlineCalibration(5)
    assert feed(online, verified_rounds(8_192, 2.0, seed=1)) == online.adopted >= 1
    before, after = held_out(online, 2.0)
    assert after < 0.025 < before
    assert online.before is not None and online.after is not None
    assert online.after.mean_survival < online.before.mean_survival
    feed(online, verified_rounds(16_384, 0.8, seed=2))
    before, after = held_out(online, 0.8)
    assert after < before


def test_true_confidences_are_left_alone_or_nearly() -> None:
    online = OnlineCalibration(5)
    feed(online, verified_rounds(12_288, 1.0, seed=3))
    before, after = held_out(online, 1.0)
    assert after < before + 0.01


def test_a_wrong_known_calibration_is_given_up() -> None:
    online = OnlineCalibration(5, Calibration((4.0,) * 5))
    feed(online, verified_rounds(8_192, 1.0, seed=4))
    before, after = held_out(online, 1.0)
    assert after < before + 0.015


def test_refits_come_after_so_many_rounds_that_verified_something() -> None:
    online = OnlineCalibration(2)
    nothing = np.zeros(EVERY, np.int64)
    assert not online.observe(np.full((EVERY, 2), 0.5), nothing, nothing)
    assert online.refits == 0
    rounds = verified_rounds(EVERY - 1, 1.0, seed=5, positions=2)
    feed(online, rounds)
    assert online.refits == 0
    online.observe(rounds.confidences[:1], rounds.verified[:1], rounds.accepted[:1])
    assert online.refits == 1


def test_more_rounds_at_once_than_the_window_holds() -> None:
    online = OnlineCalibration(5)
    rounds = verified_rounds(WINDOW + 500, 2.0, seed=6)
    assert online.observe(rounds.confidences, rounds.verified, rounds.accepted)
    assert online.current.temperatures[0] > 1.2


def test_rounds_without_numbers_teach_nothing() -> None:
    online = OnlineCalibration(2)
    ones = np.ones(2 * EVERY, np.int64)
    assert not online.observe(np.full((2 * EVERY, 2), np.nan), ones, ones)
    assert online.refits == 0 and online.current == Calibration.identity(2)


def test_a_known_calibration_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is for 2 drafts, and 5 are made\."):
        OnlineCalibration(5, Calibration.identity(2))
