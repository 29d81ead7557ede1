"""The cluster's settings, and a store that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.samples import ALONE, SPLIT, faults
from vllm_deepinfer.recipes.checks.ray import check_ray, check_store


@pytest.mark.parametrize(
    "address", ["local", "auto", "head:6379", "10.0.0.1:6379", "ray://head:10001", "[::1]:6379"]
)
def test_addresses(address: str) -> None:
    assert faults(ALONE, check=check_ray, ray={"address": address}) == []


@pytest.mark.parametrize("address", ["head", "6379", "http://head:1", "head:99999", "::1:6379", "a b:1"])
def test_what_is_no_address(address: str) -> None:
    assert faults(ALONE, check=check_ray, ray={"address": address}) == [
        f"ray.address is {address}: write local, auto, or host:port of the cluster's head."
    ]


@pytest.mark.parametrize(
    ("key", "value"), [("num_cpus", 4), ("local_nodes", [{"cpus": 1}]), ("dashboard_port", 8265)]
)
def test_settings_of_our_own_cluster_beside_another_one(key: str, value: Any) -> None:
    assert faults(ALONE, check=check_ray, ray={"address": "auto", key: value}) == [
        f"ray.{key} is for a cluster of our own, but ray.address is auto: leave it out."
    ]
    assert faults(ALONE, check=check_ray, ray={key: value}) == []


def test_times() -> None:
    assert faults(ALONE, check=check_ray, ray={"health": {"period_s": 5, "wedge_after_s": 5}}) == [
        "ray.health.wedge_after_s is 5, no longer than period_s 5: write a longer time than the longest step."
    ]


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    assert faults(ALONE, check=check_store) == []
    assert faults(ALONE, check=check_store, store={"url": str(tmp_path), "capacity": "5GiB"}) == []
    url = str(tmp_path / "no")
    assert faults(ALONE, check=check_store, store={"url": url}) == [
        f"store.url is {url}: there is no folder {tmp_path}/no, make it first.",
    ]


def test_classes_of_a_store(tmp_path: Path) -> None:
    batch = {"name": "batch", "code": 5, "ttl_s": 60, "share": 0.5}
    store = {"url": str(tmp_path), "classes": [batch], "default_class": "batch"}
    assert faults(ALONE, check=check_store, store=store) == []
    assert faults(ALONE, check=check_store, store={**store, "default_class": "agent"}) == [
        "store.classes: the default traffic class 'agent' is none of ['batch']."
    ]
    assert faults(ALONE, check=check_store, store={**store, "classes": [batch, {**batch, "name": "b"}]}) == [
        "store.classes: two traffic classes have the same code: [5, 5]."
    ]


def test_a_store_that_no_engine_uses(tmp_path: Path) -> None:
    store = {"url": str(tmp_path)}
    assert faults(SPLIT, check=check_store, store=store) == []
    assert faults(SPLIT, check=check_store, store=store, pools__decode__engine="simulated") == [
        "store is given, but pools.decode is simulated and keeps no KV: leave it out."
    ]
    assert faults(ALONE, check=check_store, store=store, pools__all__engine="simulated") == [
        "store is given, but pools.all is simulated and keeps no KV: leave it out."
    ]
    assert faults(ALONE, check=check_store, store={**store, "capacity": "5 GB"}) == [
        "store.capacity is '5 GB'; write a size such as 512MiB or 8GiB."
    ]
