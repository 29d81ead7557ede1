"""Other policies inside Serve's own request router, over the view that ours has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from vllm_deepinfer.bench.routing.policies import OTHERS, OURS
from vllm_deepinfer.bench.routing.router import POLICY_FILE, ComparedRouter
from vllm_deepinfer.bench.routing.system import set_policy
from vllm_deepinfer.cluster.application.tickets import Ticket
from vllm_deepinfer.cluster.application.view import Member, forget_view
from vllm_deepinfer.engine import Health, HealthState, Load
from vllm_deepinfer.policy.step_cost import StepCost

DEPLOYMENT = DeploymentID("pool", "app")
COST = StepCost(per_step=1e-3, per_token=1e-5, per_decode_context=1e-9)
NAMES = ("a", "b", "c", "d")
_ids = itertools.count()


class Replica:
    """As much of Serve's `RunningReplica` as its router uses."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = {"address": f"tcp://{name}"}
        self.max_ongoing_requests = 8

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


@pytest.fixture
def replicas() -> list[Any]:
    return [Replica(name) for name in NAMES]


@pytest.fixture
async def router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: list[Any]
) -> AsyncIterator[ComparedRouter]:
    monkeypatch.setenv(POLICY_FILE, str(tmp_path / "policy"))
    set_policy(tmp_path, OURS)
    forget_view("pool")
    router = ComparedRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state(pool="pool", role="prefill")
    router.update_replicas(replicas)
    queued = {"a": 5_000_000, "b": 2_000_000, "c": 9_000_000, "d": 7_000_000}  # minutes of work
    router.view.members = {name: member(router, queued[name]) for name in NAMES}
    yield router
    forget_view("pool")


def member(router: ComparedRouter, queued: int, state: HealthState = HealthState.READY) -> Member:
    engine: Any = SimpleNamespace(
        health=lambda: Health(state=state),
        load=lambda: Load(queued_prompt_tokens=queued),
        load_at=router.view.clock(),
    )
    return Member(engine, COST, 8)


def pending(argument: object) -> PendingRequest:
    number = str(next(_ids))
    return PendingRequest([argument], {}, RequestMetadata(number, number))


async def chosen(router: ComparedRouter, replicas: list[Any], prefix: int = 0) -> list[str]:
    ticket = Ticket(key=str(next(_ids)), prompt_tokens=10, prefix=prefix)
    found = await router.choose_replicas(replicas, pending(ticket))
    return [one.replica_id.unique_id for rank in found for one in rank]


async def test_ours_is_the_product_s_own_choice(router: ComparedRouter, replicas: list[Any]) -> None:
    assert await chosen(router, replicas) == ["b"]


async def test_the_policy_changes_with_the_file(
    router: ComparedRouter, replicas: list[Any], tmp_path: Path
) -> None:
    set_policy(tmp_path, "round_robin")
    assert [(await chosen(router, replicas))[0] for _ in range(5)] == ["a", "b", "c", "d", "a"]
    set_policy(tmp_path, OURS)
    assert await chosen(router, replicas) == ["b"]


async def test_power_of_two_gives_serve_two_to_choose_from(
    router: ComparedRouter, replicas: list[Any], tmp_path: Path
) -> None:
    set_policy(tmp_path, "power_of_two")
    for _ in range(10):
        pair = await chosen(router, replicas)
        assert len(pair) == 2 and len(set(pair)) == 2


async def test_consistent_hash_goes_by_the_prefix_alone(
    router: ComparedRouter, replicas: list[Any], tmp_path: Path
) -> None:
    set_policy(tmp_path, "consistent_hash")
    owners = {prefix: (await chosen(router, replicas, prefix))[0] for prefix in range(64)}
    assert len(set(owners.values())) == len(NAMES)
    for prefix in range(64):
        assert await chosen(router, replicas[::-1], prefix) == [owners[prefix]]


async def test_random_reaches_everybody(router: ComparedRouter, replicas: list[Any], tmp_path: Path) -> None:
    set_policy(tmp_path, "random")
    counts = Counter([(await chosen(router, replicas))[0] for _ in range(400)])
    assert set(counts) == set(NAMES) and min(counts.values()) > 60


@pytest.mark.parametrize("policy", OTHERS)
async def test_no_policy_sends_to_one_that_is_not_ready(
    router: ComparedRouter, replicas: list[Any], tmp_path: Path, policy: str
) -> None:
    set_policy(tmp_path, policy)
    router.view.members["a"] = member(router, 0, HealthState.DEAD)
    del router.view.members["b"]
    for prefix in range(30):
        assert set(await chosen(router, replicas, prefix)) <= {"c", "d"}
    router.view.members.clear()
    assert await chosen(router, replicas) == []


async def test_what_is_no_ticket_goes_to_whoever_answers_first(
    router: ComparedRouter, replicas: list[Any], tmp_path: Path
) -> None:
    set_policy(tmp_path, "round_robin")
    assert await router.choose_replicas(replicas, pending("url")) == [replicas]
