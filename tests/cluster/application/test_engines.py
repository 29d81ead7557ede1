"""A replica's engine: flags, environment, slots of a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.cluster.application import engines
from vllm_deepinfer.cluster.application.specs import ReplicaSpec
from vllm_deepinfer.engine.simulated import SimulatedEngine, chained_tokens
from vllm_deepinfer.recipes.schema import Recipe, Store


def spec(**changes: Any) -> ReplicaSpec:
    pool = {"role": "aggregated", **changes.pop("pool", {})}
    whole = {"name": "app", "model": {"tiny": {}}, "pools": {"main": pool}, **changes}
    return ReplicaSpec(pool="main", recipe=Recipe.model_validate(whole).model_dump_json(), session="s0")


@pytest.mark.parametrize(
    ("argument", "flags"),
    [
        ({"max_num_seqs": 16}, ["--max-num-seqs", "16"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"dtype": None}, []),
        ({"gpu_memory_utilization": 0.9}, ["--gpu-memory-utilization", "0.9"]),
        ({"speculative_config": {"method": "dspark"}}, ["--speculative-config", '{"method": "dspark"}']),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"lora_modules": [{"name": "x"}]}, ["--lora-modules", '[{"name": "x"}]']),
    ],
)
def test_arguments_become_the_flags_of_vllm_serve(argument: dict[str, Any], flags: list[str]) -> None:
    assert engines.flags(argument) == flags


def test_a_simulated_engine_has_the_recipe_s_sizes_and_chained_tokens(tmp_path: Path) -> None:
    engine = engines.engine_of(spec(pool={"engine": "simulated", "simulated": {"max_num_seqs": 7}}))
    assert isinstance(engine, SimulatedEngine)
    assert engine.config.max_num_seqs == 7 and engine.config.model == "app"
    assert engine._tokens.__qualname__ == chained_tokens(99).__qualname__


def test_what_the_application_decides_overrules_the_recipe() -> None:
    found = spec(pool={"kv_gib": 0.5, "resources": {"gpus": 1.0}})
    own = engines._own(found.whole, found.settings)
    assert own == {"dtype": found.whole.model.dtype, "kv_cache_memory_bytes": 1 << 29}
    assert "kv_cache_memory_bytes" not in engines._own(
        spec(pool={"kv_gib": 0.5}).whole, spec(pool={"kv_gib": 0.5}).settings
    )


def test_replicas_of_a_node_take_the_cores_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    found = spec(pool={"cpu_binds": ("0", "1"), "kv_gib": 0.25, "env": {"X": "y"}})
    made = [engines._environment(found) for _ in range(3)]
    assert [one["VLLM_CPU_OMP_THREADS_BIND"] for one in made] == ["0", "1", "0"]
    assert made[0]["VLLM_CPU_KVCACHE_SPACE"] == "1" and made[0]["X"] == "y"
    assert made[0]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


def test_pools_of_a_node_never_share_a_nixl_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One series for prefill and decode (Ray issue 60057)."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    transfer = {"kind": "nixl", "nixl": {"side_channel_base_port": 7000}}
    ports = [
        engines._environment(spec(transfer=transfer, pool={"role": role}))["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        for role in ("prefill", "decode", "prefill", "decode")
    ]
    assert ports == ["7000", "7001", "7002", "7003"]


def test_an_aggregated_pool_gets_the_recipe_s_store() -> None:
    store = {"url": "/var/lib/kv", "capacity": "500GiB"}
    found = engines._transfer((made := spec(store=store)).whole, made.settings)["kv_transfer_config"]
    assert (found["kv_connector"], found["kv_role"]) == ("PrefixStoreConnector", "kv_both")
    assert found["kv_load_failure_policy"] == "recompute", "the connector refuses any other"
    assert found["kv_connector_extra_config"] == {"store": "/var/lib/kv", "capacity": "500GiB"}
    assert engines.store_connector(Store(url="memory:a"))["kv_connector_extra_config"] == {
        "store": "memory:a"
    }
    assert engines._transfer((none := spec()).whole, none.settings) == {}


def test_the_store_s_own_classes_reach_the_engines() -> None:
    batch = {"name": "batch", "code": 5, "ttl_s": 60.0, "share": 0.5}
    store = {"url": "/kv", "classes": [batch], "default_class": "batch"}
    extra = engines.store_connector(Store.model_validate_json(json.dumps(store)))["kv_connector_extra_config"]
    assert extra == {"store": "/kv", "classes": [batch], "default_class": "batch"}
    extra = engines.store_connector(Store(url="/kv", default_class="chat"))["kv_connector_extra_config"]
    assert extra == {"store": "/kv", "default_class": "chat"}


def transfer_of(role: str, kind: str, store: dict[str, Any] | None) -> dict[str, Any]:
    """The kv-transfer-config of a pool."""
    made = spec(pool={"role": role}, transfer={"kind": kind, "timeout_s": 7.0}, store=store)
    found: dict[str, Any] = engines._transfer(made.whole, made.settings)["kv_transfer_config"]
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prompts_reach_the_decode_pool_through_the_store(role: str) -> None:
    found = transfer_of(role, "store", {"url": "/kv", "run_tokens": 64})
    assert (found["kv_connector"], found["kv_role"]) == ("PrefixStoreConnector", "kv_both")
    extra = {"store": "/kv", "run_tokens": 64, "hand_over": True, "hand_over_wait_s": 7.0}
    assert found["kv_connector_extra_config"] == extra


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_store_beside_nixl_is_one_of_two_connectors(role: str) -> None:
    alone, found = transfer_of(role, "nixl", None), transfer_of(role, "nixl", {"url": "/kv"})
    assert found["kv_connector"] == "MultiConnector" and found["kv_load_failure_policy"] == "recompute"
    nixl, store = found["kv_connector_extra_config"]["connectors"]
    assert nixl == alone, "a hand-over comes before a hit"
    assert store["kv_connector_extra_config"] == {"store": "/kv"}, "NIXL hands over"
    assert found.get("kv_buffer_device") == alone.get("kv_buffer_device")
