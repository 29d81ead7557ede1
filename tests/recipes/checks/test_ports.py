"""Ports that overlap, leave the range, or are taken by a process that is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.samples import ALONE, SIMULATED, SPLIT, cluster, faults
from vllm_deepinfer.recipes.checks.ports import check_ports
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView

HERE = cluster(NodeView("here", 2, local=True))
FAR = cluster(NodeView("far", 8), NodeView("farther", 2))


def told(base: dict[str, Any] = ALONE, where: ClusterView | None = None, **changes: Any) -> list[str]:
    return faults(base, check=check_ports, cluster=where, **changes)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_somebody_listens_on_is_refused_with_its_holder(taken: int) -> None:
    name = Path("/proc/self/comm").read_text().strip()
    assert told(where=HERE, gateway={"port": taken}) == [
        f"gateway.port needs port {taken}, which {name} ({os.getpid()}) listens on: stop it, or write "
        "another "
        "port."
    ]
    assert told(where=HERE, gateway={"port": taken - 1, "per_node": 2}) == [
        f"gateway.port needs port {taken}, which {name} ({os.getpid()}) listens on: stop it, or write "
        "another "
        "port."
    ]
    assert told(where=FAR, gateway={"port": taken}) == []
    assert told(gateway={"port": taken}) == []


def test_port_0_takes_any() -> None:
    assert told(where=HERE, gateway={"port": 0, "per_node": 4}) == []


def test_ranges_beyond_the_last_port() -> None:
    assert told(gateway={"port": 65534, "per_node": 3}) == [
        "gateway.port is 65534, and 3 ports from there pass 65535: write a smaller one."
    ]
    assert told(gateway={"port": 65533, "per_node": 3}) == []


def test_ranges_that_overlap() -> None:
    assert told(
        gateway={"port": 8000, "per_node": 4, "metrics_port": 8003}, ray={"dashboard_port": 8003}
    ) == [
        "gateway.port (8000 to 8003) and gateway.metrics_port (8003) both take port 8003 of a node: move "
        "one of "
        "them.",
        "gateway.port (8000 to 8003) and ray.dashboard_port (8003) both take port 8003 of a node: move "
        "one of "
        "them.",
        "gateway.metrics_port (8003) and ray.dashboard_port (8003) both take port 8003 of a node: move "
        "one of "
        "them.",
    ]


def test_side_channels_of_all_replicas_that_a_node_may_hold() -> None:
    nixl = {"transfer__nixl__side_channel_base_port": 7997, "pools__prefill__replicas": 9}
    expected = [
        "gateway.port (8000) and transfer.nixl.side_channel_base_port (7997 to 8005) both take port 8000 "
        "of a "
        "node: move one of them."
    ]
    # 8 of 9 prefill replicas fit on the larger node, and the decode replica
    assert told(SPLIT, where=FAR, **nixl) == expected
    assert told(SPLIT, where=FAR, **nixl, pools__prefill__placement={"max_replicas_per_node": 2}) == []
    assert told(SPLIT, where=FAR, **nixl, pools__prefill__resources={"cpus": 8}) == []


def test_simulated_engines_have_no_side_channels() -> None:
    assert told(SIMULATED, transfer__nixl={"side_channel_base_port": 8000}) == []
