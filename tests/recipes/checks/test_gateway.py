"""The front door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.samples import ALONE, cluster, faults
from vllm_deepinfer.gateway.limits.keys import new_key
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.policy.retention import Retention, TrafficClass
from vllm_deepinfer.recipes.checks.gateway import check_gateway, is_loopback
from vllm_deepinfer.recipes.cluster_view import NodeView
from vllm_deepinfer.recipes.gateway import Gateway

FAR = cluster(NodeView("a", 8), NodeView("b", 8))


def told(**gateway: Any) -> list[str]:
    return faults(ALONE, check=check_gateway, cluster=FAR, gateway=gateway)


def test_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert is_loopback(host)
        assert told(host=host) == []


def test_other_addresses_need_keys_or_a_word() -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "gateway.example"):
        assert told(host=host) == [
            f"gateway.host is {host}, which other machines reach: give gateway.api_keys, or allow_anonymous: "
            "true."
        ]
    assert told(host="0.0.0.0", allow_anonymous=True) == []


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    assert told(host="0.0.0.0", api_keys=str(file))[0].startswith(f"gateway.api_keys: {file}: the key file")
    file.write_text("keys: 1\n")
    assert told(api_keys=str(file)) == [
        f"gateway.api_keys: {file}: the key file must be a list of keys, each with name and sha256."
    ]
    file.write_text(yaml.safe_dump([new_key("me")[1].model_dump(exclude_none=True)]))
    assert told(host="0.0.0.0", api_keys=str(file)) == []


def test_database(tmp_path: Path) -> None:
    assert told(response_db=str(tmp_path / "x.sqlite")) == []
    assert told(response_db=str(tmp_path)) == [f"gateway.response_db is {tmp_path}, a folder: name a file."]
    missing = tmp_path / "no" / "x.sqlite"
    assert told(response_db=str(missing)) == [
        f"gateway.response_db is {missing}: there is no folder {missing.parent}, make it first."
    ]
    assert told(response_db="/a\0b") == ["gateway.response_db has a zero byte: this is no file's name."]


def test_labels_of_gateways() -> None:
    labelled = cluster(NodeView("a", 8), NodeView("g", 1, labels={"pool": "gateway", "zone": "1"}))
    gateway = {"node_labels": {"pool": "gateway"}}
    assert faults(ALONE, check=check_gateway, cluster=labelled, gateway=gateway) == []
    assert faults(ALONE, check=check_gateway, gateway=gateway) == []
    assert told(**gateway) == [
        "gateway.node_labels wants pool=gateway, which none of the 2 nodes has: label one."
    ]
    every = {**gateway, "nodes": "every", "host": "0.0.0.0", "allow_anonymous": True}
    assert faults(ALONE, check=check_gateway, cluster=labelled, gateway=every) == [
        "gateway has node_labels and nodes: every, which contradict each other: leave one out."
    ]


def test_gateways_on_every_node_must_be_reached() -> None:
    assert told(nodes="every") == [
        "gateway.nodes is every, but 127.0.0.1 is reached from its own machine only: write host: 0.0.0.0 and "
        "api_keys."
    ]
    here = cluster(NodeView("a", 8, local=True), NodeView("b", 8, local=True))
    assert faults(ALONE, check=check_gateway, cluster=here, gateway={"nodes": "every"}) == []


OWN = Retention((TrafficClass("batch", 5, 60, 1.0),), default="batch")


@pytest.mark.parametrize("name", GatewaySettings.model_fields)
def test_every_limit_of_a_gateway_can_be_written_in_a_recipe(name: str) -> None:
    gateway = Gateway(max_active=7, thinking=False, response_db=Path("/x"))
    settings = gateway.settings(("a", "b"), OWN)
    elsewhere = {"served_names": ("a", "b"), "classes": OWN}
    assert getattr(settings, name) == (elsewhere[name] if name in elsewhere else getattr(gateway, name))
