"""What a gateway knows of a pool: who may be chosen, by which load, and what is under way to whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_deepinfer.cluster.application.tickets import Ticket
from vllm_deepinfer.cluster.application.view import Member, PoolView, forget_view, view_of
from vllm_deepinfer.engine import Health, HealthState, Load
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=1e-3, per_token=1e-5, per_decode=1e-4, per_decode_context=1e-8)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine_of(clock: Clock, **changes: Any) -> Any:
    given = {"queued": 0, "used": 0, "free": 1000, "running": 0, "state": HealthState.READY, **changes}
    return SimpleNamespace(
        given=given,
        health=lambda: Health(state=given["state"]),
        load=lambda: Load(
            running_requests=given["running"],
            queued_prompt_tokens=given["queued"],
            kv_tokens_used=given["used"],
            kv_tokens_free=given["free"],
        ),
        load_at=given.get("load_at", clock.now),
    )


def view(role: str = "aggregated", *, most: int = 4, **engines: dict[str, Any]) -> tuple[PoolView, Clock]:
    clock = Clock()
    made = PoolView(role, clock=clock)
    made.members = {name: Member(engine_of(clock, **given), COST, most) for name, given in engines.items()}
    return made, clock


def test_one_view_per_pool_and_process() -> None:
    first = view_of("p", "decode")
    assert view_of("p") is first and first.role == "decode"
    forget_view("p")
    assert view_of("p") is not first
    forget_view("p")
    forget_view("never seen")


@pytest.mark.parametrize(
    ("role", "busy"),
    [("prefill", {"queued": 500}), ("decode", {"used": 500, "running": 2}), ("aggregated", {"queued": 500})],
)
def test_each_role_is_ranked_by_its_own_load(role: str, busy: dict[str, Any]) -> None:
    made, _ = view(role, a=busy, b={})
    assert made.choose(Ticket("k", 10, 5), ["a", "b"]) == "b"


def test_prefill_does_not_care_for_kv_and_decode_not_for_the_queue() -> None:
    made, _ = view("prefill", a={"queued": 10}, b={"used": 999, "free": 1, "queued": 0})
    assert made.choose(Ticket("k", 10, 5), ["a", "b"]) == "b"
    made, _ = view("decode", a={"queued": 9000}, b={"used": 500})
    assert made.choose(Ticket("k", 10, 5), ["a", "b"]) == "a"


@pytest.mark.parametrize("state", [HealthState.DEAD, HealthState.WEDGED, HealthState.DRAINING])
def test_only_those_that_are_well_and_connected_are_chosen(state: HealthState) -> None:
    made, _ = view(a={"state": state}, b={"queued": 900})
    assert made.choose(Ticket("k", 10), ["a", "b", "not connected"]) == "b"
    assert made.choose(Ticket("l", 10), ["a", "not connected"]) is None
    assert made.counts["no_room"] == 0, "nobody there is not the same as everybody full"


def test_never_beyond_capacity() -> None:
    made, _ = view("decode", a={"running": 4}, b={"used": 995, "free": 5})
    assert made.choose(Ticket("k", 10, 5), ["a", "b"]) is None
    assert made.counts["no_room"] == 1
    made.members["b"].engine.given["used"] = 985  # type: ignore[attr-defined]
    made.members["b"].engine.given["free"] = 15  # type: ignore[attr-defined]
    assert made.choose(Ticket("k", 10, 5), ["a", "b"]) == "b"


def test_between_two_loads_its_own_choices_count() -> None:
    made, _ = view("decode", most=3, a={}, b={})
    chosen = [made.choose(Ticket(f"k{at}", 10, 5), ["a", "b"]) for at in range(7)]
    assert sorted(chosen[:6], key=str) == ["a"] * 3 + ["b"] * 3 and chosen[6] is None


def test_what_has_arrived_counts_once() -> None:
    """The replica's load has it from then on."""
    made, _ = view("decode", most=1, a={})
    assert made.choose(Ticket("k", 10, 5), ["a"]) == "a"
    assert made.choose(Ticket("l", 10, 5), ["a"]) is None
    made.settle("k")
    assert made.choose(Ticket("l", 10, 5), ["a"]) == "a"


def test_a_ticket_that_is_chosen_for_again_counts_once() -> None:
    """Serve found the first choice full, and asks again."""
    made, clock = view("decode", most=1, a={}, b={})
    first = made.choose(Ticket("k", 10, 5), ["a", "b"])
    assert first is not None
    again = made.choose(Ticket("k", 10, 5), [first])
    assert again == first and len(made.ledger.open(first, clock.now)) == 1


def test_those_that_have_just_refused_come_only_when_there_is_nobody_else() -> None:
    made, _ = view(a={}, b={"queued": 900})
    ticket = Ticket("k", 10, avoid=frozenset({"a"}))
    assert made.choose(ticket, ["a", "b"]) == "b"
    assert made.choose(ticket, ["a"]) == "a"


def test_marks_are_heeded_and_expire() -> None:
    made, clock = view(a={}, b={"queued": 900})
    made.marks.mark("a", clock.now)
    assert made.choose(Ticket("k", 10), ["a", "b"]) == "b"
    made.settle("k")
    assert made.choose(Ticket("k", 10), ["a"]) == "a" and made.counts["marked"] == 1
    made.settle("k")
    clock.now += 1.5
    assert made.choose(Ticket("k", 10), ["a", "b"]) == "a"


def test_a_stale_load_comes_after_fresh_ones_and_is_counted() -> None:
    made, _ = view(a={"load_at": 90.0}, b={"queued": 900})
    assert made.choose(Ticket("k", 10), ["a", "b"]) == "b" and made.counts["stale"] == 0
    assert made.choose(Ticket("l", 10), ["a"]) == "a" and made.counts["stale"] == 1


def test_what_is_fetched_is_not_reckoned_as_prefill() -> None:
    made, clock = view("prefill", a={})
    made.choose(Ticket("k", 1000, computed_tokens=1000), ["a"])
    assert made.ledger.open("a", clock.now)[0].prefill_s == 0.0
    made.choose(Ticket("l", 1000), ["a"])
    assert made.ledger.open("a", clock.now)[1].prefill_s == pytest.approx(1e-3 + 1000 * 1e-5)


async def test_a_ticket_s_way() -> None:
    made, clock = view(a={})
    future = made.expect("k")
    assert made.stuck() == [], "nobody has been chosen, so nobody keeps it waiting"
    made.choose(Ticket("k", 10), ["a"])
    assert made.stuck() == []
    made.members["a"].engine.given["state"] = HealthState.DEAD  # type: ignore[attr-defined]
    assert made.stuck() == ["k"]
    made.routed("k", "a")
    assert await future == "a" and made.stuck() == []
    made.settle("k")
    assert not made.ledger.open("a", clock.now) and not made._routed and not made._assigned
    made.settle("k")  # and once more is no harm
    made.routed("k", "a")


async def test_a_ticket_that_came_to_nothing_frees_who_waits() -> None:
    made, _ = view(a={})
    future = made.expect("k")
    made.settle("k")
    with pytest.raises(asyncio.CancelledError):
        await future


def test_a_replica_that_is_gone_leaves_nothing_behind() -> None:
    made, clock = view(a={})
    made.choose(Ticket("k", 10), ["a"])
    made.marks.mark("a", clock.now)
    made.forget("a")
    assert not made.ledger.open("a", clock.now) and not made.marks.marked(clock.now)
    made.settle("k")
