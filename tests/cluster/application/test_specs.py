"""What replicas and gateways are started with, and how much of it is said aloud."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from vllm_deepinfer.cluster.application.specs import GatewaySpec, ReplicaSpec, most_active
from vllm_deepinfer.cluster.channel import ChannelKeys
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE
from vllm_deepinfer.recipes.schema import Pool, Recipe


def recipe(**pool: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "app", "model": {"tiny": {}}, "pools": {"main": {"role": "aggregated", **pool}}}
    )


def spec(found: Recipe, **changes: Any) -> ReplicaSpec:
    return ReplicaSpec(pool="main", recipe=found.model_dump_json(), session="s", **changes)


def test_a_spec_travels_whole() -> None:
    found = recipe(engine="simulated", simulated={"max_num_seqs": 7})
    there = pickle.loads(pickle.dumps(spec(found)))
    assert there.whole == found and there.settings == found.pools["main"]
    assert GatewaySpec(found.model_dump_json(), "s").whole == found


def test_keys_are_not_shown() -> None:
    keys = ChannelKeys.make()
    for one in (spec(recipe(), keys=keys), GatewaySpec(recipe().model_dump_json(), "s", keys)):
        assert keys.replica_secret.decode() not in repr(one)
        assert keys.gateway_secret.decode() not in repr(one) and "keys=" not in repr(one)


@pytest.mark.parametrize(
    ("pool", "most"),
    [
        ({}, 512),
        ({"engine_args": {"max_num_seqs": 16}}, 32),
        ({"engine": "simulated"}, 512),
        ({"engine": "simulated", "simulated": {"max_num_seqs": 3}}, 6),
        ({"engine_args": {"max_num_seqs": 16}, "max_ongoing": 5}, 5),
    ],
)
def test_as_many_requests_as_run_and_as_many_again_wait(pool: dict[str, Any], most: int) -> None:
    assert most_active(Pool.model_validate({"role": "decode", **pool})) == most
    assert spec(recipe(**pool)).most_active == most


def test_the_cost_of_a_step_is_the_recipe_s_where_it_has_one() -> None:
    assert spec(recipe()).cost == TWO_CORE_DENSE
    simulated = {"cost": {"per_step": 0.5, "per_token": 0.25}}
    assert spec(recipe(simulated=simulated)).cost.per_step == 0.5


def test_without_keys_the_channel_stays_on_the_loopback() -> None:
    assert spec(recipe()).host() == "127.0.0.1"
