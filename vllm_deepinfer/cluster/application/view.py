"""What one gateway process knows of one pool: its replicas' loads, and what it has sent them itself.

Replicas push their loads on the token channel, with every engine step and twice a second without one. The
router in the gateway's process, which Serve asks, and the pool, which sends the request, share this view.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vllm_deepinfer.cluster.channel import RemoteEngine
from vllm_deepinfer.engine import HealthState
from vllm_deepinfer.policy.routing import (
    Choice,
    DecodeCost,
    DecodeLoad,
    Ledger,
    Marks,
    PrefillLoad,
    Staleness,
    choose_aggregated,
    choose_decode,
    choose_prefill,
)
from vllm_deepinfer.policy.step_cost import StepCost, Work

from .tickets import Ticket


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as the router sees it.

    Attributes:
        engine: its end of the token channel here.
        cost: of a step on it.
        most_active: requests that it may have at once.
    """

    engine: RemoteEngine
    cost: StepCost
    most_active: int


@dataclass(slots=True)
class PoolView:
    """One pool, seen from this process.

    Attributes:
        role: prefill, decode or aggregated: by what it is ranked.
        members: the replicas that take requests, by Serve's replica id.
        wanted: the replicas that Serve says are running, with the metadata that each gave of itself.
        counts: ``stale``, ``marked``, ``no_room`` choices.
        changed: called when `wanted` has changed.
    """

    role: str
    staleness: Staleness = field(default_factory=Staleness)
    marks: Marks = field(default_factory=Marks)
    members: dict[str, Member] = field(default_factory=dict)
    wanted: dict[str, Mapping[str, object]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counter[str] = field(default_factory=Counter)
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _routed: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    _assigned: dict[str, tuple[str, int]] = field(default_factory=dict)

    # The pool's side

    def expect(self, key: str) -> asyncio.Future[str]:
        """The replica that a ticket will be sent to."""
        future = self._routed[key] = asyncio.get_running_loop().create_future()
        return future

    def settle(self, key: str) -> None:
        """The request has reached its replica, whose load counts it from now on, or has failed to."""
        future = self._routed.pop(key, None)
        if future is not None and not future.done():
            future.cancel()
        worker, number = self._assigned.pop(key, ("", 0))
        if worker:
            self.ledger.forget(worker, number)

    def stuck(self) -> list[str]:
        """Keys of tickets that wait for the answer of a replica that is not well."""
        return [
            key
            for key, future in self._routed.items()
            if not future.done() and not self._ready(self._assigned.get(key, ("", 0))[0], True)
        ]

    def forget(self, worker: str) -> None:
        """The replica is gone."""
        self.ledger.drop(worker)
        self.marks.clear(worker)

    # The router's side

    def replicas(self, wanted: Mapping[str, Mapping[str, object]]) -> None:
        """Serve has told which replicas run."""
        if wanted != self.wanted:
            self.wanted = dict(wanted)
            self.changed()

    def routed(self, key: str, replica: str) -> None:
        """Serve has sent the ticket there, and the replica has taken it."""
        self.marks.clear(replica)
        future = self._routed.get(key)
        if future is not None and not future.done():
            future.set_result(replica)

    def choose(self, ticket: Ticket, candidates: Iterable[str]) -> str | None:
        """A replica for the ticket among the candidates; None: no room, try again later."""
        now = self.clock()
        worker, number = self._assigned.pop(ticket.key, ("", 0))
        if worker:  # chosen before, and not taken there
            self.ledger.forget(worker, number)
        members = {name: self.members[name] for name in candidates if self._ready(name)}
        fresh = {name: member for name, member in members.items() if name not in ticket.avoid}
        choice = self._rank(ticket, fresh or members, now)
        if choice is None:
            self.counts["no_room"] += bool(members)
            return None
        self.counts["stale"] += choice.stale
        self.counts["marked"] += choice.marked
        seconds = self._seconds(members[choice.worker].cost, ticket.prefill_tokens)
        made = self.ledger.assign(choice.worker, now, prefill_s=seconds, kv_tokens=ticket.kv_tokens)
        self._assigned[ticket.key] = (choice.worker, made.number)
        return choice.worker

    def ongoing(self, replica: str) -> int:
        """Requests that the replica has or that are on their way to it; 0 for one that is not known."""
        if replica not in self.members:
            return 0
        load = self.members[replica].engine.load()
        return load.active_requests + len(self.ledger.open(replica, self.clock()))

    def _ready(self, name: str, nobody: bool = False) -> bool:
        """Whether the replica can take a request; ``nobody`` for no replica at all."""
        if not name:
            return nobody
        return name in self.members and self.members[name].engine.health().state is HealthState.READY

    def _rank(self, ticket: Ticket, members: Mapping[str, Member], now: float) -> Choice | None:
        if not members:
            return None
        marked = self.marks.marked(now)
        seconds = {
            name: self._seconds(member.cost, ticket.prefill_tokens) for name, member in members.items()
        }
        prefill = {
            name: PrefillLoad(
                self._seconds(member.cost, member.engine.load().queued_prompt_tokens), member.engine.load_at
            )
            for name, member in members.items()
        }
        if self.role == "prefill":
            return choose_prefill(prefill, seconds, self.ledger, now, marked=marked, staleness=self.staleness)
        decode = {name: _decode_load(member) for name, member in members.items()}
        cost = _decode_cost(next(iter(members.values())).cost)
        if self.role == "decode":
            return choose_decode(
                decode, ticket.kv_tokens, cost, self.ledger, now, marked=marked, staleness=self.staleness
            )
        first = next(iter(seconds.values()))
        return choose_aggregated(
            prefill,
            decode,
            first,
            ticket.kv_tokens,
            cost,
            self.ledger,
            now,
            marked=marked,
            staleness=self.staleness,
        )

    @staticmethod
    def _seconds(cost: StepCost, tokens: int) -> float:
        return cost.seconds(cost.features(Work(context=0, prefill_tokens=tokens))) if tokens else 0.0


def _decode_load(member: Member) -> DecodeLoad:
    load = member.engine.load()
    capacity = load.kv_tokens_used + load.kv_tokens_free
    return DecodeLoad(
        active=load.active_requests,
        kv_tokens=load.kv_tokens_used,
        most_active=member.most_active,
        most_kv_tokens=capacity,
        at=member.engine.load_at,
    )


def _decode_cost(cost: StepCost) -> DecodeCost:
    # Without a term of its own a decode still has its place in the batch.
    return DecodeCost(cost.per_decode or cost.per_token or 1e-6, cost.per_decode_context)


_views: dict[str, PoolView] = {}


def view_of(pool: str, role: str = "aggregated") -> PoolView:
    """This process's view of a pool; router and pool find each other by it."""
    if pool not in _views:
        _views[pool] = PoolView(role)
    return _views[pool]


def forget_view(pool: str) -> None:
    """When the pool's user in this process has stopped."""
    _views.pop(pool, None)
