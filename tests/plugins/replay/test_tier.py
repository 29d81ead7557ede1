"""The index of window KV in host memory: least recently used out, expired out, pinned never."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.replay.tier import WindowTier


def test_keeps_finds_and_expires() -> None:
    tier = WindowTier(2, ttl=10.0)
    kept = tier.keep("a", 5, now=0.0)
    assert kept is not None and kept.floor == 5 and len(tier) == 1
    assert tier.find("a", 9.9) is kept and tier.find("a", 10.0) is None and tier.find("b", 0.0) is None
    tier.use("a", 9.0)
    assert tier.find("a", 18.9) is kept
    tier.expire(19.0)
    assert len(tier) == 0 and tier.take_dropped() == [kept.slot] and tier.take_dropped() == []


def test_the_least_recently_used_goes_first() -> None:
    tier = WindowTier(2, ttl=10.0)
    a, b = tier.keep("a", 0, 0.0), tier.keep("b", 0, 1.0)
    assert a is not None and b is not None and a.slot != b.slot
    tier.use("a", 2.0)
    c = tier.keep("c", 0, 3.0)
    assert c is not None and c.slot == b.slot and tier.find("b", 3.0) is None and tier.find("a", 3.0) is a
    assert tier.take_dropped() == [], "the slot was taken again"


def test_what_is_kept_is_not_copied_again_unless_it_gets_better() -> None:
    tier = WindowTier(2, ttl=10.0)
    kept = tier.keep("a", 40, 0.0)
    assert kept is not None
    assert tier.keep("a", 40, 5.0) is None and tier.keep("a", 50, 5.0) is None
    assert tier.find("a", 14.0) is kept, "it was used"
    assert tier.keep("a", 8, 6.0) is kept and kept.floor == 8


def test_pinned_stays_through_expiry_eviction_and_reset() -> None:
    tier = WindowTier(1, ttl=10.0)
    kept = tier.keep("a", 9, 0.0)
    assert kept is not None
    kept.pins += 1
    assert tier.keep("b", 0, 1.0) is None, "no slot is free"
    assert tier.keep("a", 0, 1.0) is None, "somebody is about to read it"
    tier.expire(99.0)
    assert tier.pinned("a") is kept
    tier.clear()
    assert len(tier) == 1 and tier.find("a", 0.0) is None, "after a reset it serves nobody else"
    tier.use("a", 2.0)
    assert tier.find("a", 2.0) is None, "nor does its use make it new"
    kept.pins -= 1
    assert tier.pinned("a") is None and tier.pinned("b") is None
    tier.expire(2.0)
    assert len(tier) == 0 and tier.take_dropped() == [kept.slot]


def test_a_tier_of_nothing() -> None:
    tier = WindowTier(0, ttl=10.0)
    assert tier.keep("a", 0, 0.0) is None and tier.find("a", 0.0) is None


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=60))
def test_against_a_list(slots: int, events: list[tuple[str, int]]) -> None:
    """A model: an ordered table of deadlines; slots are never shared and never lost."""
    tier, now = WindowTier(slots, ttl=5.0), 0.0
    model: OrderedDict[str, float] = OrderedDict()
    for key, wait in events:
        now += wait
        for old in [old for old, until in model.items() if until <= now]:
            del model[old]
        new = tier.keep(key, 0, now)
        assert (new is None) == (key in model)
        if key not in model and len(model) == slots:
            model.popitem(last=False)
        model[key] = now + 5.0
        model.move_to_end(key)
        found = {key: tier.find(key, now) for key in "abcdef"}
        assert {key for key, kept in found.items() if kept} == set(model)
        taken = [kept.slot for kept in found.values() if kept]
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(slots))
        assert not set(tier.take_dropped()) & set(taken)
