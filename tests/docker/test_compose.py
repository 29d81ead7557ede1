"""compose.yaml and the recipe that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.check import check_recipe
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView

FOLDER = Path(__file__).parents[2] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RECIPE = load_recipe(FOLDER / "cluster.yaml")


def labels(service: str) -> dict[str, str]:
    """What a service's node is labelled with."""
    command = " ".join(SERVICES[service]["command"])
    found = [word.partition("=")[2] for word in command.split() if word.startswith("--labels=")]
    return dict(label.split("=") for label in found)


def test_the_cluster_has_its_four_parts_from_one_image() -> None:
    assert list(SERVICES) == ["head", "prefill", "decode", "gateway"]
    assert {service["image"] for service in SERVICES.values()} == {"vllm-deepinfer:cpu"}
    build = SERVICES["head"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_every_part_is_unprivileged_and_checked(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001"
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"test", "interval", "timeout", "start_period", "retries"} <= set(service["healthcheck"])
    assert service["entrypoint"][:2] == ["tini", "--"]
    assert "privileged" not in service and service.get("network_mode") is None


def test_ports_are_published_on_the_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]
    assert (RECIPE.gateway.port, RECIPE.gateway.metrics_port) == (8000, 8001)


def test_nodes_wait_for_the_head_and_the_gateway_for_all() -> None:
    for name in ("prefill", "decode"):
        assert SERVICES[name]["depends_on"] == {"head": {"condition": "service_healthy"}}
        assert "--address=head:6379" in SERVICES[name]["entrypoint"]
    assert set(SERVICES["gateway"]["depends_on"]) == {"head", "prefill", "decode"}
    assert "--port=6379" in SERVICES["head"]["entrypoint"]


def test_the_recipe_is_mounted_where_it_is_served_from() -> None:
    (mount,) = [one for one in SERVICES["gateway"]["volumes"] if ":" in one]
    source, target, mode = mount.split(":")
    assert (FOLDER / source).is_file() and target == "/opt/deepinfer/cluster.yaml" and mode == "ro"
    assert "exec vllm-deepinfer serve cluster.yaml" in SERVICES["gateway"]["command"][0]


def test_the_recipe_is_sound_on_the_nodes_that_the_services_start() -> None:
    nodes = [NodeView("head", 0, memory_gib=8)]
    for name in ("prefill", "decode", "gateway"):
        cpus = 0 if name == "gateway" else 1
        nodes.append(NodeView(name, cpus, memory_gib=5, labels=labels(name)))
    assert {node.labels["pool"] for node in nodes[1:]} == {"prefill", "decode", "gateway"}
    assert check_recipe(RECIPE, ClusterView(tuple(nodes))) == []
