"""The policy inside Serve's own request router: who is asked, who waits, and whom that holds up."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.request_router import PendingRequest

from vllm_deepinfer.cluster.application.request_router import PolicyRouter
from vllm_deepinfer.cluster.application.tickets import Ticket
from vllm_deepinfer.cluster.application.view import Member, PoolView, forget_view, view_of
from vllm_deepinfer.engine import Health, HealthState, Load
from vllm_deepinfer.policy.step_cost import StepCost

DEPLOYMENT = DeploymentID("pool", "app")
COST = StepCost(per_step=1e-3, per_token=1e-5, per_decode_context=1e-9)
_ids = itertools.count()


class Replica:
    """As much of Serve's `RunningReplica` as its router uses."""

    def __init__(self, name: str, ongoing: int = 0, most: int = 8) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = {"address": f"tcp://{name}"}
        self.max_ongoing_requests, self.ongoing = most, ongoing

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing


def router_of(*replicas: Replica, role: str = "aggregated") -> PolicyRouter:
    forget_view("pool")
    router = PolicyRouter(
        DEPLOYMENT,
        DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        initial_backoff_s=0.005,
        backoff_multiplier=1.5,
        max_backoff_s=0.02,
    )
    router.initialize_state(pool="pool", role=role)
    router.update_replicas(list(replicas))
    return router


def member(view: PoolView, *, queued: int = 0, used: int = 0, most: int = 8) -> Member:
    engine: Any = SimpleNamespace(
        health=lambda: Health(state=HealthState.READY),
        load=lambda: Load(queued_prompt_tokens=queued, kv_tokens_used=used, kv_tokens_free=10_000 - used),
        load_at=view.clock(),
    )
    return Member(engine, COST, most)


def pending(argument: object, *, key: str = "") -> PendingRequest:
    number = str(next(_ids))
    return PendingRequest([argument], {}, RequestMetadata(number, number, _by_reference=True))


async def test_the_view_is_the_process_s_and_learns_who_runs() -> None:
    told: list[int] = []
    router = router_of(Replica("a"), Replica("b"))
    assert view_of("pool") is router.view and router.view.role == "aggregated"
    assert router.view.wanted == {"a": {"address": "tcp://a"}, "b": {"address": "tcp://b"}}
    router.view.changed = lambda: told.append(1)
    router.update_replicas([Replica("a"), Replica("b")])
    assert not told, "the same again is no news"
    router.update_replicas([Replica("b")])
    assert told == [1] and set(router.view.wanted) == {"b"}


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_the_policy_s_choice_is_where_serve_sends_it(role: str) -> None:
    router = router_of(Replica("a"), Replica("b"), role=role)
    router.view.members = {"a": member(router.view, queued=900, used=900), "b": member(router.view)}
    chosen = await router._choose_replica_for_request(pending(Ticket("k", 10)))
    assert chosen.replica_id.unique_id == "b"


async def test_each_ticket_gets_its_own_choice_though_many_wait_at_once() -> None:
    """Serve's base router may give any waiting request the replica that was found for another."""
    router = router_of(*(Replica(name, most=1000) for name in "abcd"))
    router.view.members = {name: member(router.view, most=1000) for name in "abcd"}
    tickets = [Ticket(f"k{at}", 10, avoid=frozenset("abcd") - {"abcd"[at % 4]}) for at in range(80)]
    chosen = await asyncio.gather(*(router._choose_replica_for_request(pending(one)) for one in tickets))
    assert [one.replica_id.unique_id for one in chosen] == ["abcd"[at % 4] for at in range(80)]


async def test_without_room_the_request_waits_and_the_event_loop_goes_on() -> None:
    router = router_of(Replica("a"))  # nobody is connected to it yet
    waiting = asyncio.ensure_future(router._choose_replica_for_request(pending(Ticket("k", 10))))
    await asyncio.wait_for(asyncio.sleep(0.05), 5)  # hung for ever when the router did not back off
    assert not waiting.done()
    router.view.members = {"a": member(router.view)}
    assert (await asyncio.wait_for(waiting, 5)).replica_id.unique_id == "a"


async def test_a_request_that_is_given_up_while_it_waits_holds_nobody_up() -> None:
    router = router_of(Replica("a"))
    first, second = (
        asyncio.ensure_future(router._choose_replica_for_request(pending(Ticket(f"k{at}", 10))))
        for at in range(2)
    )
    await asyncio.sleep(0.02)
    first.cancel()
    router.view.members = {"a": member(router.view)}
    assert (await asyncio.wait_for(second, 5)).replica_id.unique_id == "a"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_serve_s_own_limit_holds_also_against_the_policy() -> None:
    busy = Replica("a", ongoing=8)
    router = router_of(busy, Replica("b"))
    router.view.members = {"a": member(router.view), "b": member(router.view, queued=900)}
    waiting = asyncio.ensure_future(router._choose_replica_for_request(pending(Ticket("k", 10))))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the policy wants a, and Serve says that a has its fill"
    busy.ongoing = 0
    assert (await asyncio.wait_for(waiting, 5)).replica_id.unique_id == "a"


async def test_other_calls_are_not_the_policy_s_business() -> None:
    router = router_of(Replica("a"), Replica("b"))
    assert (await router.choose_replicas([Replica("a")], pending("no ticket")))[0][
        0
    ].replica_id.unique_id == "a"
    nothing = PendingRequest([], {}, RequestMetadata("n", "n"))
    assert len((await router.choose_replicas([Replica("a"), Replica("b")], nothing))[0]) == 2
    router.on_request_routed(nothing, ReplicaID("a", DEPLOYMENT), None)  # and is no news for anybody


async def test_where_a_ticket_went_is_told_to_who_waits_for_it() -> None:
    router = router_of(Replica("a"))
    future = router.view.expect("k")
    router.on_request_routed(pending(Ticket("other", 1)), ReplicaID("a", DEPLOYMENT), None)
    assert not future.done()
    router.on_request_routed(pending(Ticket("k", 1)), ReplicaID("a", DEPLOYMENT), None)
    assert await future == "a"


class Sent:
    """A replica's actor as far as Serve's wrapper calls it."""

    def __init__(self) -> None:
        self._actor_id = None
        self.plain: list[tuple[Any, ...]] = []
        self.streamed: list[tuple[Any, ...]] = []
        self.handle_request = SimpleNamespace(remote=self._plain)
        self.handle_request_with_rejection = SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=self._streamed)
        )

    def _plain(self, *arguments: Any) -> None:
        self.plain.append(arguments[1:])

    def _streamed(self, *arguments: Any) -> None:
        self.streamed.append(arguments[1:])


def wrapped(router: PolicyRouter, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Sent]:
    """As the router wraps a replica that Serve tells of."""
    sent = Sent()
    monkeypatch.setattr(RunningReplicaInfo, "get_actor_handle", lambda self: sent)
    info = RunningReplicaInfo(
        replica_id=ReplicaID("a", DEPLOYMENT),
        node_id=None,
        node_ip=None,
        availability_zone=None,
        actor_name="a",
        max_ongoing_requests=8,
    )
    return router.create_replica_wrapper(info), sent


async def test_a_ticket_is_one_plain_call_that_serve_takes_for_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = router_of(Replica("a"))
    replica, sent = wrapped(router, monkeypatch)
    router.view.members["a"] = member(router.view)
    router.view.choose(Ticket("k", 3), ["a"])
    ticket = Ticket("k", 3)
    answer = replica.try_send_request(pending(ticket), with_rejection=True)
    assert (sent.plain, sent.streamed) == ([(ticket,)], [])
    queue = await answer.get_rejection_response()
    assert queue.accepted and queue.num_ongoing_requests == 1, "the one that is on its way"


async def test_any_other_call_keeps_serve_s_own_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, sent = wrapped(router_of(Replica("a")), monkeypatch)
    replica.try_send_request(pending("x"), with_rejection=True)
    assert (sent.plain, sent.streamed) == ([], [("x",)])
