"""Retention: what goes and in which order, against a brute-force oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.retention import (
    DAY_S,
    Choice,
    Held,
    Reason,
    Recompute,
    Retention,
    TrafficClass,
    plan,
    retention_of,
    value,
)

NOW = 1_000_000.0
RETENTION = Retention()
EVEN = Recompute(half_context=float("inf"))


def name(i: int) -> bytes:
    return i.to_bytes(8, "big")


def run(i: int, parent: int = 0, start: int = 0, **changes: object) -> Held:
    """A live run `i` (from 1 on) of 100 bytes behind `parent`; 0 is no run."""
    base = Held(name(i), name(parent), start, 64, 100, NOW + 100, NOW - 10, hits=0, code=1)
    return replace(base, **changes)  # type: ignore[arg-type]


def gone(held: list[Held], capacity: int | None, **more: object) -> list[tuple[int, str]]:
    removals = plan(held, NOW, capacity, RETENTION, **more)  # type: ignore[arg-type]
    return [(int.from_bytes(held[r.index].id, "big"), str(r.reason)) for r in removals]


def test_defaults_are_three_days_for_agents_and_seven_for_chat() -> None:
    assert RETENTION.choose("agent") == Choice(1, 3 * DAY_S)
    assert RETENTION.choose("chat") == Choice(2, 7 * DAY_S)
    assert RETENTION.choose() == RETENTION.choose("agent")
    assert RETENTION.choose("chat", ttl_s=300) == Choice(2, 300)
    assert RETENTION.choose(ttl_s=10**9) == Choice(1, 30 * DAY_S)


@pytest.mark.parametrize(
    ("name_", "ttl", "words"),
    [
        ("agnet", None, "'agnet' is none of other, agent, chat"),
        (None, 0.0, "not positive"),
        (None, float("nan"), "not positive"),
    ],
)
def test_a_wrong_choice_is_named(name_: str | None, ttl: float | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RETENTION.choose(name_, ttl)


def test_classes_are_checked() -> None:
    a = TrafficClass("a", 1, 10, 0.5)
    for wrong in ({"code": 100}, {"ttl_s": 0.0}, {"ttl_s": float("inf")}, {"share": 1.1}):
        with pytest.raises(ValueError, match="'a'"):
            replace(a, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same code"):
        Retention((a, TrafficClass("b", 1, 10, 0.5)), "a")
    with pytest.raises(ValueError, match="same name"):
        Retention((a, TrafficClass("a", 2, 10, 0.5)), "a")
    with pytest.raises(ValueError, match="'agent' is none of"):
        Retention((a,))


def test_expired_go_whatever_room_there_is() -> None:
    held = [run(1, expires=NOW), run(2), run(3, expires=NOW - 5)]
    assert sorted(gone(held, None)) == [(1, "expired"), (3, "expired")]
    assert sorted(gone(held, 10_000)) == [(1, "expired"), (3, "expired")]


def test_an_expired_run_stays_under_a_live_one_and_goes_with_it() -> None:
    held = [run(1, expires=NOW - 9), run(2, 1, 64), run(3, 1, 64, expires=NOW - 1)]
    assert gone(held, None) == [(3, "expired")]
    held[1] = replace(held[1], expires=NOW)
    assert sorted(gone(held, None)) == [(1, "expired"), (2, "expired"), (3, "expired")]


def test_a_chain_loses_its_end_first() -> None:
    held = [run(i, i - 1, 64 * (i - 1)) for i in range(1, 6)]
    assert gone(held, 300, low_water=1.0) == [(5, "pressure"), (4, "pressure")]
    assert gone(held[::-1], 300, low_water=1.0) == [(5, "pressure"), (4, "pressure")]


def test_pressure_goes_down_to_the_low_water_mark() -> None:
    held = [run(i, start=0, last_use=NOW - i) for i in range(1, 11)]
    assert gone(held, 1_000) == []
    assert [i for i, _ in gone(held, 999)] == [10, 9]
    assert [i for i, _ in gone(held, 999, low_water=0.5)] == [10, 9, 8, 7, 6, 5]


def test_unreachable_runs_go_before_valuable_ones() -> None:
    held = [run(1), run(2, 99, 64, hits=50), run(3, 2, 128, hits=50)]
    assert gone(held, 200, low_water=1.0) == [(3, "unreachable")]
    assert gone(held, 100, low_water=1.0) == [(3, "unreachable"), (2, "unreachable")]
    assert gone(held, None) == []


def test_value_is_reuse_times_recompute_per_byte() -> None:
    base = run(1, last_use=NOW - 400)
    assert value(base, NOW, EVEN) == pytest.approx(1 / 1_000 * 64 / 100)
    assert value(replace(base, hits=3), NOW, EVEN) == pytest.approx(3 * value(base, NOW, EVEN))
    assert value(replace(base, nbytes=200), NOW, EVEN) == pytest.approx(value(base, NOW, EVEN) / 2)
    deep = value(replace(base, start=65_536 - 32), NOW, Recompute())
    assert deep == pytest.approx(2 * value(replace(base, start=0), NOW, EVEN))
    assert value(replace(base, last_use=NOW + 50), NOW, EVEN) == value(replace(base, last_use=NOW), NOW, EVEN)


def test_a_class_over_its_share_gives_way_first() -> None:
    """Chat may fill 30 %; it holds 60 % here, and loses although its runs are worth more."""
    chat = [run(i, code=2, hits=100, last_use=NOW) for i in range(1, 7)]
    agent = [run(i, code=1, last_use=NOW - 500) for i in range(11, 15)]
    lost = [i for i, _ in gone(agent + chat, 999, low_water=0.75)]
    assert len(lost) == 3 and set(lost) <= set(range(1, 7))
    lost = [i for i, _ in gone(agent + chat, 999, low_water=0.2)]
    assert lost[:4] != [] and set(lost[:3]) <= set(range(1, 7)), "down to its share"
    assert set(lost[4:]) & set(range(11, 15)), "then the least valuable of all"


@st.composite
def forests(draw: st.DrawFn) -> list[Held]:
    count = draw(st.integers(0, 14))
    held: list[Held] = []
    for i in range(1, count + 1):
        parent = draw(st.integers(0, i - 1))
        start = 0 if parent == 0 else held[parent - 1].start + 64
        held.append(
            run(
                i,
                parent,
                start,
                nbytes=draw(st.integers(1, 5)),
                expires=NOW + draw(st.sampled_from([-5, 0, 1, 50])),
                last_use=NOW - draw(st.integers(0, 900)),
                hits=draw(st.integers(0, 9)),
                code=draw(st.integers(0, 2)),
            )
        )
    lost = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=2))
    kept = [h for i, h in enumerate(held) if i not in lost]
    return draw(st.permutations(kept))


def oracle(held: list[Held], capacity: int, low_water: float) -> list[tuple[bytes, str]]:
    """The same decisions, each from scratch in quadratic time."""
    left = {h.id: h for h in held}
    out: list[tuple[bytes, str]] = []

    def lives(h: Held) -> float:
        below = [lives(c) for c in held if c.parent == h.id]
        return max([h.expires, *below])

    def used(code: int | None = None) -> int:
        return sum(h.nbytes for h in left.values() if code in (None, h.code))

    def reachable(h: Held) -> bool:
        return h.start == 0 or (h.parent in left0 and reachable(left0[h.parent]))

    for h in held:
        if lives(h) <= NOW:
            del left[h.id]
            out.append((h.id, "expired"))
    left0 = dict(left)
    if used() <= capacity:
        return out
    for h in sorted(held, key=lambda h: -h.start):
        if used() > low_water * capacity and h.id in left and not reachable(h):
            del left[h.id]
            out.append((h.id, "unreachable"))
    shares = RETENTION.shares()
    while used() > low_water * capacity:
        ends = [h for h in left.values() if not any(c.parent == h.id for c in left.values())]
        over = [h for h in ends if used(h.code) > shares[h.code] * capacity]
        worst = min(over or ends, key=lambda h: (value(h, NOW, Recompute()), held.index(h)))
        del left[worst.id]
        out.append((worst.id, "pressure"))
    return out


@given(forests(), st.integers(1, 40), st.sampled_from([0.3, 0.9, 1.0]))
def test_against_the_oracle(held: list[Held], capacity: int, low_water: float) -> None:
    found = plan(held, NOW, capacity, RETENTION, low_water=low_water)
    expected = oracle(held, capacity, low_water)
    values = {h.id: value(h, NOW, Recompute()) for h in held}

    def comparable(rows: list[tuple[bytes, str]]) -> tuple[set[bytes], set[bytes], list[float]]:
        pick = [[i for i, reason in rows if reason == wanted] for wanted in Reason]
        return set(pick[0]), set(pick[1]), [values[i] for i in pick[2]]

    ours = [(held[r.index].id, str(r.reason)) for r in found]
    assert [reason for _, reason in ours] == sorted(
        (reason for _, reason in ours), key=[str(r) for r in Reason].index
    )
    left = sum(h.nbytes for h in held if h.id not in {i for i, _ in ours})
    alive = sum(h.nbytes for h in held if h.id not in comparable(ours)[0])
    assert left <= low_water * capacity or alive <= capacity
    assert comparable(ours) == comparable(expected)


@given(forests(), st.integers(1, 40))
def test_no_chain_gets_a_hole(held: list[Held], capacity: int) -> None:
    left = {h.id: h for h in held}
    parents = {h.id for h in held}
    for removal in plan(held, NOW, capacity, RETENTION):
        if removal.reason is not Reason.UNREACHABLE:
            assert not any(c.parent == held[removal.index].id for c in left.values()), (
                "a run went before what stands on it"
            )
        del left[held[removal.index].id]
    orphans = [h for h in left.values() if h.parent not in left and h.parent in parents]
    assert not orphans


def test_a_hundred_thousand_runs_are_planned() -> None:
    held = [
        run(i, i - 1 if i % 100 else 0, 64 * (i % 100), last_use=NOW - i % 977) for i in range(1, 100_001)
    ]
    removals = plan(held, NOW, 5_000_000, RETENTION)
    assert sum(held[r.index].nbytes for r in removals) == 5_500_000


def test_classes_as_a_configuration_writes_them() -> None:
    assert retention_of(None, None) == Retention()
    own = retention_of([{"name": "batch", "code": 5, "ttl_s": 60, "share": 1}], "batch")
    assert own.choose() == Choice(5, 60) and own.shares() == {5: 1}
    with pytest.raises(ValueError, match="'agent' is none of"):
        retention_of([{"name": "batch", "code": 5, "ttl_s": 60, "share": 1}], None)
    with pytest.raises(TypeError):
        retention_of([{"name": "batch"}], None)
