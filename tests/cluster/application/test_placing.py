"""A pool without a place: which resource is missing on which node, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_deepinfer.cluster.application import placing
from vllm_deepinfer.cluster.application.placing import why_unplaced
from vllm_deepinfer.recipes.schema import Pool


def node(address: str, alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> Any:
    return {
        "NodeID": address,
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": resources,
        "Labels": labels or {},
    }


def pool(**changes: Any) -> Pool:
    return Pool.model_validate({"role": "decode", "replicas": 2, **changes})


def test_what_is_missing_where() -> None:
    wanted = pool(resources={"cpus": 4.0, "gpus": 2.0, "memory_gib": 8.0, "node_labels": {"pool": "decode"}})
    nodes = [
        node("10.0.0.1", CPU=8.0, GPU=1.0, memory=float(16 << 30), labels={"pool": "decode"}),
        node("10.0.0.2", CPU=2.0, GPU=2.0, memory=float(4 << 30)),
        node("10.0.0.3", alive=False, CPU=99.0),
    ]
    assert why_unplaced("decode", wanted, 60.0, nodes) == (
        "pool decode could not be placed within 60 s: each of its 2 replicas needs "
        "1 × {4 CPU, 2 GPU, 8 GiB memory}, and node 10.0.0.1 lacks 2 GPU (free 1); node 10.0.0.2 lacks "
        "label pool=decode, 4 CPU (free 2), 8 GiB memory (free 4 GiB); add nodes, or ask for less."
    )


def test_a_custom_resource_that_no_node_has() -> None:
    sentence = why_unplaced("p", pool(resources={"custom": {"rack": 1.0}}), 5.0, [node("a", CPU=9.0)])
    assert "node a lacks 1 rack (free 0)" in sentence


def test_enough_for_one_replica_and_not_for_the_next() -> None:
    sentence = why_unplaced("p", pool(resources={"cpus": 1.0}), 5.0, [node("a", CPU=1.0)])
    assert "node a lacks nothing for one replica more" in sentence


def test_a_cluster_without_nodes() -> None:
    assert "the cluster has no node" in why_unplaced("p", pool(), 5.0, [node("a", alive=False)])


def test_groups_that_wait_are_counted_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_deepinfer.recipes.schema import Recipe

    recipe = Recipe.model_validate(
        {
            "name": "app",
            "model": {"tiny": {}},
            "pools": {
                "one": {"role": "prefill", "replicas": 2},
                "two": {"role": "decode", "replicas": 4, "placement": {"gang": 2}},
            },
            "transfer": {"kind": "nixl"},
        }
    )
    states = [("app#one#x", "CREATED"), ("app#one#y", "PENDING"), ("app#two#g", "CREATED")]
    table = {str(at): {"name": name, "state": state} for at, (name, state) in enumerate(states)}
    monkeypatch.setattr("ray.util.placement_group_table", lambda: table)
    monkeypatch.setattr("vllm_deepinfer.cluster.application.placing.ray_state.actors", dict)
    assert placing.unplaced_pools("app", recipe) == ["one", "two"], "of two groups one each"
    table["1"]["state"] = "CREATED"
    assert placing.unplaced_pools("app", recipe) == ["two"]
    table["3"] = {"name": "other#two#h", "state": "CREATED"}
    assert placing.unplaced_pools("app", recipe) == ["two"], "another application's is not ours"
    table["4"] = {"name": "app#two#h", "state": "CREATED"}
    assert placing.unplaced_pools("app", recipe) == []


def test_replicas_without_groups_are_placed_when_their_actors_live(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_deepinfer.recipes.schema import Recipe

    spread = {"role": "aggregated", "replicas": 2, "placement": {"max_replicas_per_node": 1}}
    recipe = Recipe.model_validate({"name": "app", "model": {"tiny": {}}, "pools": {"main": spread}})
    actors = {
        "1": {"Name": "SERVE_REPLICA::app#main#a", "State": "ALIVE"},
        "2": {"Name": "SERVE_REPLICA::app#main#b", "State": "PENDING_CREATION"},
    }
    monkeypatch.setattr("ray.util.placement_group_table", dict)
    monkeypatch.setattr("vllm_deepinfer.cluster.application.placing.ray_state.actors", lambda: actors)
    assert placing.unplaced_pools("app", recipe) == ["main"]
    actors["2"]["State"] = "ALIVE"
    assert placing.unplaced_pools("app", recipe) == []


def test_why_a_deployment_did_not_start_is_its_last_line() -> None:
    application = SimpleNamespace(message="the application's own.")
    state = SimpleNamespace(status="DEPLOY_FAILED", message="Traceback\n  File x\nUserError: no tokenizer.\n")
    well = SimpleNamespace(status="HEALTHY", message="")
    sentence = placing._failure(application, {"main": state, "gateway": well})
    assert sentence == "the application did not start: main: UserError: no tokenizer."
    assert placing._failure(application, {}) == "the application did not start: the application's own."
