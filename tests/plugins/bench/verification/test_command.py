"""The sweep with a stand-in for the engine's process: order, repetitions, and when it ends."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.bench.verification import command
from vllm_deepinfer_plugins.bench.verification.command import CELLS, Sweep, _settings
from vllm_deepinfer_plugins.bench.verification.figures import Measured
from vllm_deepinfer_plugins.bench.verification.plan import (
    ADAPTIVE,
    CONCURRENCY,
    FIXED,
    FULL,
    OFF,
    QUICK,
    SAYS,
    SCRIPTED,
    TRAFFIC,
    TRAINED,
    Plan,
    settings,
)

PLAN = Plan(2, 100.0, 4, 0.5, 8, (64,), 8, 100, 10.0)
LEARNED = len(TRAFFIC) * (len(CONCURRENCY) + 2)


class Engine:
    """Notes what it is asked; disturbed as often as it is told."""

    def __init__(self, clock: list[float], disturbed: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self._clock, self._disturbed = clock, disturbed

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert do == "measure"
        self.asked.append(arguments)
        self._clock[0] += 0.01
        self._disturbed -= 1
        return {"rate": float(len(self.asked)), "foreign": 0.5 if self._disturbed >= 0 else 0.01}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def sweep(engine: Engine, plan: Plan = PLAN) -> tuple[int, Measured]:
    measured = Measured()
    made = Sweep(engine, SCRIPTED, plan, measured, lambda what: None)  # type: ignore[arg-type]
    made.learn()
    return made.run(), measured


def test_every_setting_of_a_cell_sees_the_same_requests_in_every_round(clock: list[float]) -> None:
    engine = Engine(clock)
    rounds, measured = sweep(engine)
    assert [each["seed"] for each in engine.asked[:LEARNED]] == [0] * LEARNED
    assert all(each["setting"] in SAYS and each["steps"] == 12 for each in engine.asked[:LEARNED])
    assert rounds == 2 and len(measured.rates) == len(CELLS)
    for (_, concurrency), rates in measured.rates.items():
        assert set(rates) == {OFF, *FIXED, *(SAYS if concurrency == 64 else (ADAPTIVE,))}
        assert {len(each) for each in rates.values()} == {2}
    taken = engine.asked[LEARNED:]
    runs = [(each["seed"], each["traffic"], each["concurrency"]) for each in taken]
    changes = 1 + sum(a != b for a, b in itertools.pairwise(runs))
    assert changes == 2 * len(CELLS), "a cell's settings follow one another"
    assert [each["setting"] for each in taken[:7]] != [each["setting"] for each in taken[-7:]]
    assert all(each["steps"] == 4 and each["seconds"] == 0.5 for each in taken)


def test_a_disturbed_slice_is_taken_again_twice_at_most(clock: list[float]) -> None:
    plain, engine = Engine(clock), Engine(clock, disturbed=10**6)
    sweep(plain)
    _, measured = sweep(engine)
    assert len(engine.asked) - LEARNED == 3 * (len(plain.asked) - LEARNED), "patience lasts here"
    assert set(measured.foreign) == {0.5}
    hasty = Engine(clock, disturbed=10**6)
    sweep(hasty, Plan(2, 100.0, 4, 0.5, 8, (64,), 8, 100, 0.0))
    assert len(hasty.asked) == len(plain.asked)
    once = Engine(clock, disturbed=LEARNED + 1)
    _, measured = sweep(once)
    assert len(once.asked) == len(plain.asked) + 1 and set(measured.foreign) == {0.01}


def test_no_round_begins_that_would_end_behind_the_budget(clock: list[float]) -> None:
    """A round takes some 1.6 s here: the second ends at 3.3, a third would end at 4.9."""
    rounds, _ = sweep(Engine(clock), Plan(50, 4.0, 4, 0.5, 8, (64,), 8, 100, 0.0))
    assert rounds == 2


def test_variants_are_for_scripted_drafters() -> None:
    assert settings(64, TRAINED, PLAN) == (OFF, *FIXED, ADAPTIVE) == settings(8, SCRIPTED, PLAN)
    assert settings(64, SCRIPTED, PLAN) == (OFF, *FIXED, *SAYS)
    assert set(QUICK.variants) <= set(CONCURRENCY) and FULL.variants == CONCURRENCY


def test_the_report_says_what_was_measured() -> None:
    shown = _settings(PLAN, SCRIPTED)
    assert shown["drafter"] == SCRIPTED and shown["variants"] == [64] and shown["steps"] == 4
    assert isinstance(shown["model"], dict) and shown["model"]["vocab"] == 2048
