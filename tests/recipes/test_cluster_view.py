"""Nodes from Ray, from this machine, and from a recipe's local nodes."""

from __future__ import annotations

import os

from vllm_deepinfer.recipes.cluster_view import GIB, ClusterView, NodeView
from vllm_deepinfer.recipes.schema import Ray, Resources

# What ray.nodes() of Ray 2.60 returns, cut to what is read.
NODES = [
    {
        "NodeID": "a1",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "head",
        "Resources": {
            "CPU": 8.0,
            "GPU": 4.0,
            "memory": 16.0 * GIB,
            "object_store_memory": 1e9,
            "node:10.0.0.1": 1.0,
            "node:__internal_head__": 1.0,
            "accelerator_type:H200": 1.0,
            "fast": 2.0,
        },
        "Labels": {"pool": "decode", "ray.io/node-id": "a1"},
    },
    {"NodeID": "b2", "Alive": False, "NodeManagerHostname": "dead", "Resources": {}, "Labels": {}},
    {"NodeID": "c3", "Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 2.0}},
]


def test_of_ray() -> None:
    head, other = ClusterView.of_ray(NODES).nodes
    assert (head.name, head.cpus, head.gpus, head.memory_gib) == ("head", 8, 4, 16)
    assert head.custom == {"fast": 2.0}
    assert head.labels["pool"] == "decode"
    assert (other.name, other.cpus, other.gpus, other.memory_gib) == ("10.0.0.3", 2, 0, None)
    assert not ClusterView.of_ray(NODES).local


def test_of_this_machine() -> None:
    view = ClusterView.of_this_machine(Ray())
    assert view.local
    (node,) = view.nodes
    assert node.cpus == os.cpu_count()
    assert node.memory_gib is not None and 0.5 < node.memory_gib < 1e5
    assert ClusterView.of_this_machine(Ray(num_cpus=7)).nodes[0].cpus == 7


def test_local_nodes_have_what_is_written() -> None:
    ray = Ray(
        num_cpus=1,
        local_nodes=(
            Resources(cpus=2, memory_gib=0.5, custom={"fast": 1}, node_labels={"pool": "p"}),
            Resources(cpus=3, gpus=1, memory_gib=1e9),
        ),
    )
    head, first, second = ClusterView.of_this_machine(ray).nodes
    assert first == NodeView(
        "local node 2", 2, memory_gib=0.5, custom={"fast": 1}, labels={"pool": "p"}, local=True
    )
    assert (second.name, second.cpus, second.gpus) == ("local node 3", 3, 1)
    assert second.memory_gib == head.memory_gib  # no more than the machine has
