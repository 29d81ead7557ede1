"""How many replicas: bounds, monotone in the load, still under constant load, slow to change its mind."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.scaling import (
    GROW_AT_MOST,
    Decision,
    ReplicaMeasure,
    ScalingSettings,
    ScalingState,
    decide,
    needs,
)

QUEUE = ScalingSettings(least=1, most=8, target_queue_s=2.0, hysteresis=0.1, up_after_s=10, down_after_s=60)
KV = replace(QUEUE, target_queue_s=None, target_kv_use=0.8)
ITL = replace(QUEUE, target_queue_s=None, target_itl_ms=50.0)
ZERO = replace(QUEUE, least=0, zero_after_s=30.0)

shares = st.floats(0, 1)
measure = st.builds(
    ReplicaMeasure,
    queue_s=st.floats(0, 100),
    kv_use=shares,
    itl_ms=st.floats(0, 1000),
    active=st.integers(0, 9).map(float),
)
targets = st.fixed_dictionaries(
    {
        "target_queue_s": st.none() | st.floats(0.1, 10),
        "target_kv_use": st.none() | st.floats(0.1, 1),
        "target_itl_ms": st.none() | st.floats(1, 500),
    }
).filter(lambda given: any(value is not None for value in given.values()))


@st.composite
def settings_of(draw: st.DrawFn) -> ScalingSettings:
    least = draw(st.integers(0, 4))
    return ScalingSettings(
        least=least,
        most=draw(st.integers(max(least, 1), 12)),
        hysteresis=draw(st.floats(0, 0.9)),
        up_after_s=draw(st.floats(0, 30)),
        down_after_s=draw(st.floats(0, 300)),
        zero_after_s=draw(st.none() | st.floats(1, 100)),
        **draw(targets),
    )


def busy(count: int, **measures: float) -> list[ReplicaMeasure]:
    return [ReplicaMeasure(active=1.0, **measures)] * count


class Pool:
    """Plays time: one decision a second on the measures of a load that the replicas share."""

    def __init__(self, settings: ScalingSettings, replicas: int) -> None:
        self.settings, self.replicas = settings, replicas
        self.state, self.now = ScalingState(), 0.0
        self.changes: list[tuple[float, int]] = []

    def run(
        self, seconds: int, *, total_queue_s: float = 0.0, active: float = 1.0, waiting: float = 0.0
    ) -> None:
        for _ in range(seconds):
            share = total_queue_s / max(self.replicas, 1)
            measures = [ReplicaMeasure(queue_s=share, active=active)] * self.replicas
            decision = decide(self.settings, self.state, self.now, self.replicas, measures, waiting)
            if decision.replicas != self.replicas:
                self.changes.append((self.now, decision.replicas))
            self.replicas, self.state = decision.replicas, decision.state
            self.now += 1.0


# Settings


@pytest.mark.parametrize(("least", "most"), [(-1, 3), (3, 2), (0, 0)])
def test_bounds_are_checked(least: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"replicas must be 0 ≤ least ≤ most, got {least} and {most}"):
        ScalingSettings(least=least, most=most, target_queue_s=1.0)


def test_a_target_is_needed() -> None:
    with pytest.raises(ValueError, match="needs a target: queue_s, kv_use or itl_ms"):
        ScalingSettings(least=1, most=2)


# Needs


def test_what_each_measure_asks_for_and_says() -> None:
    (queue,) = needs(QUEUE, busy(2, queue_s=3.0))
    assert (queue.replicas, queue.reason) == (3.0, "queue 3.00 s of 2 s")
    (kv,) = needs(KV, busy(4, kv_use=0.6))
    assert kv.replicas == pytest.approx(3.0) and kv.reason == "KV use 60% of 80%"
    (itl,) = needs(ITL, [ReplicaMeasure(itl_ms=40), ReplicaMeasure(itl_ms=75)])
    assert (itl.replicas, itl.reason) == (3.0, "ITL 75 ms of 50 ms")


def test_a_latency_grows_a_pool_by_a_bounded_factor_and_idle_replicas_have_none() -> None:
    (itl,) = needs(ITL, busy(3, itl_ms=5000.0))
    assert itl.replicas == 3 * GROW_AT_MOST
    assert needs(ITL, busy(3)) == []


def test_of_several_measures_the_neediest_decides() -> None:
    both = replace(QUEUE, target_kv_use=0.5, up_after_s=0)
    decision = decide(both, ScalingState(), 0.0, 2, busy(2, queue_s=0.1, kv_use=0.9), 0)
    assert decision.replicas == 4 and decision.reason == "KV use 90% of 50%"


# Decisions


@given(settings_of(), st.lists(measure, max_size=6), st.integers(0, 12), st.floats(0, 50), st.floats(0, 1e4))
def test_the_number_stays_within_its_bounds(
    settings: ScalingSettings, measures: list[ReplicaMeasure], current: int, waiting: float, now: float
) -> None:
    decision = decide(settings, ScalingState(0.0, 0.0, 0.0), now, current, measures, waiting)
    assert settings.least <= decision.replicas <= settings.most
    if settings.zero_after_s is None and current:
        assert decision.replicas >= 1


def test_too_many_shrink_to_the_bound_though_the_load_asks_for_more() -> None:
    """Found by the test above: shrinking from beyond `most` went to the load's number, not to `most`."""
    settings = replace(QUEUE, most=1, hysteresis=0.0, up_after_s=0.0, down_after_s=0.0)
    assert decide(settings, ScalingState(), 0.0, 3, busy(2, queue_s=2.0), 0.0).replicas == 1


@given(
    settings_of(),
    st.lists(measure, min_size=1, max_size=6),
    st.integers(0, 5),
    st.sampled_from(["queue_s", "kv_use", "itl_ms"]),
    st.floats(1, 10),
)
def test_more_load_never_asks_for_fewer(
    settings: ScalingSettings, measures: list[ReplicaMeasure], at: int, field: str, factor: float
) -> None:
    """Both delays over, the same state of things, one measure of one replica raised."""
    more = list(measures)
    one = more[at % len(more)]
    more[at % len(more)] = replace(one, **{field: getattr(one, field) * factor})
    over = ScalingState(up_since=0.0, down_since=0.0)
    now = max(settings.up_after_s, settings.down_after_s)
    before, after = (
        decide(settings, over, now, len(measures), these, 1.0).replicas for these in (measures, more)
    )
    assert after >= before


@given(
    settings_of().filter(lambda one: one.target_itl_ms is None),
    st.floats(0, 200),
    st.floats(0, 6),
    st.integers(1, 12),
)
def test_under_a_constant_load_that_replicas_share_the_number_comes_to_rest(
    settings: ScalingSettings, queue: float, kv: float, start: int
) -> None:
    """At most one change in each direction, and never one back: nothing swings."""
    state, replicas, seen = ScalingState(), min(max(start, max(settings.least, 1)), settings.most), [start]
    step = max(settings.up_after_s, settings.down_after_s) / 2 + 0.1
    for tick in range(40):
        measures = busy(replicas, queue_s=queue / replicas, kv_use=min(kv / replicas, 1.0))
        decision = decide(settings, state, tick * step, replicas, measures, 1.0)
        replicas, state = decision.replicas, decision.state
        if replicas != seen[-1]:
            seen.append(replicas)
    moves = [after - before for before, after in itertools.pairwise(seen)]
    assert all(move > 0 for move in moves) or all(move < 0 for move in moves), seen
    assert len(seen) <= 6


def test_growing_waits_for_its_delay_and_goes_to_the_target() -> None:
    pool = Pool(QUEUE, 1)
    pool.run(30, total_queue_s=9.0)
    assert pool.changes == [(10.0, 5)]


def test_shrinking_waits_longer() -> None:
    pool = Pool(QUEUE, 5)
    pool.run(100, total_queue_s=1.0)
    assert pool.changes == [(60.0, 1)]


def test_a_need_that_passes_changes_nothing() -> None:
    pool = Pool(QUEUE, 2)
    for _ in range(5):
        pool.run(9, total_queue_s=20.0)
        pool.run(1, total_queue_s=3.9)
    assert pool.changes == [] and pool.replicas == 2


def test_within_the_hysteresis_nothing_changes() -> None:
    pool = Pool(QUEUE, 2)
    for load in (2.0 * 2 * 1.09, 2.0 * 1 * 0.91):  # 9 % above the target of 2, 9 % below that of 1
        pool.run(200, total_queue_s=load)
    assert pool.changes == []
    pool.run(200, total_queue_s=2.0 * 2 * 1.12)
    assert pool.replicas == 3


def test_zero_and_back() -> None:
    pool = Pool(ZERO, 1)
    pool.run(31, active=0.0)
    assert pool.changes == [(30.0, 0)]
    pool.run(50, active=0.0)
    assert pool.replicas == 0
    pool.run(1, waiting=1.0)
    assert pool.replicas == 1, "a request that waits is not kept waiting for a delay"


def test_a_request_in_between_begins_the_idle_time_anew() -> None:
    pool = Pool(ZERO, 1)
    pool.run(29, active=0.0)
    pool.run(1, active=1.0)
    pool.run(29, active=0.0)
    assert pool.changes == []
    pool.run(2, active=0.0)
    assert pool.replicas == 0


def test_requests_that_wait_count_as_work() -> None:
    pool = Pool(ZERO, 1)
    pool.run(100, active=0.0, waiting=1.0)
    assert pool.replicas == 1


def test_without_a_time_for_it_nothing_goes_to_zero() -> None:
    pool = Pool(replace(ZERO, zero_after_s=None), 3)
    pool.run(500, active=0.0)
    assert pool.replicas == 1


def test_a_pool_of_none_whose_least_is_more_comes_back_at_once() -> None:
    assert decide(replace(QUEUE, least=2), ScalingState(), 0.0, 0, [], 0.0).replicas == 2


def test_out_of_bounds_is_mended_at_once_with_its_reason() -> None:
    """The bounds have changed, or Serve adjusts them for a rolling update."""
    for current, wanted in ((12, 8), (1, 3)):
        settings = replace(QUEUE, least=3)
        decision = decide(settings, ScalingState(), 0.0, current, busy(current, queue_s=2.0), 0.0)
        assert (decision.replicas, decision.reason) == (wanted, "out of bounds")


def test_replicas_that_are_being_started_are_not_asked_for_again() -> None:
    """Their measures are not there yet, and the load that they will take is still the others'."""
    decision = decide(QUEUE, ScalingState(up_since=0.0), 20.0, 5, busy(1, queue_s=9.0), 0.0)
    assert decision.replicas == 5


def test_no_measure_at_all_is_no_reason_to_act_before_the_delay() -> None:
    first = decide(QUEUE, ScalingState(), 0.0, 4, [], 0.0)
    assert first.replicas == 4 and first.state.down_since == 0.0
    assert decide(QUEUE, first.state, 59.0, 4, [], 0.0).replicas == 4


@given(st.floats(0.01, 50), st.integers(1, 8))
def test_the_target_itself_is_no_reason_for_one_more(target: float, count: int) -> None:
    """Rounding of count × target / target."""
    settings = replace(QUEUE, target_queue_s=target, hysteresis=0.0, up_after_s=0.0)
    decision = decide(settings, ScalingState(), 0.0, count, busy(count, queue_s=target), 0.0)
    assert decision.replicas == count


def test_a_decision_says_why() -> None:
    decision = decide(replace(QUEUE, up_after_s=0), ScalingState(), 0.0, 1, busy(1, queue_s=7.5), 0.0)
    assert isinstance(decision, Decision) and decision.reason == "queue 7.50 s of 2 s"
    assert decision.replicas == math.ceil(7.5 / 2)
