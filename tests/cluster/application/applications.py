"""Applications on simulated engines in real Ray, for tests, and the processes that they are made of."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray._private.state as ray_state
from ray import serve

from vllm_deepinfer.cluster.application.launch import Application
from vllm_deepinfer.recipes import load_recipe

AGGREGATED = """
name: {name}
model:
  tiny: {{}}
pools:
  main:
    role: aggregated
    engine: simulated
    replicas: {replicas}
    resources: {{cpus: 0.1}}
    simulated: {{wedge_after_s: 2, max_model_len: 4096, kv_capacity_tokens: 65536, max_num_seqs: 64}}
    {more}
gateway: {{port: {port}, per_node: {gateways}, drain_timeout_s: 20}}
ray:
  num_cpus: 2
  health: {{period_s: 1, timeout_s: 5}}
  deadlines: {{place_s: 30, start_s: 60, drain_s: 20}}
  {ray}
"""

SPLIT = """
name: {name}
model:
  tiny: {{}}
pools:
  prefill:
    role: prefill
    engine: simulated
    replicas: 2
    resources: &resources {{cpus: 0.1}}
    simulated: &sizes {{wedge_after_s: 2, max_model_len: 4096, kv_capacity_tokens: 65536, max_num_seqs: 64}}
  decode:
    role: decode
    engine: simulated
    replicas: {replicas}
    resources: *resources
    simulated: *sizes
    {more}
transfer: {{kind: nixl}}
gateway: {{port: {port}, per_node: {gateways}, drain_timeout_s: 20}}
ray:
  num_cpus: 2
  health: {{period_s: 1, timeout_s: 5}}
  deadlines: {{place_s: 30, start_s: 60, drain_s: 20}}
  {ray}
"""


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody had just now."""
    for start in range(21_000, 60_000, 7):
        with ExitStack() as held:
            try:
                for port in range(start, start + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return start
    raise AssertionError("no free ports")


def written(
    folder: Path, text: str = AGGREGATED, *, name: str = "app", more: str = "", ray: str = "", **numbers: int
) -> Path:
    """A recipe's file."""
    values = {"replicas": 2, "gateways": 1, "port": 0, **numbers}
    file = folder / f"{name}.yaml"
    file.write_text(text.format(name=name, more=more, ray=ray, **values), encoding="utf-8")
    return file


@contextmanager
def running(file: Path, **settings: Any) -> Iterator[Application]:
    """Started, and stopped at the end."""
    with Application(load_recipe(file), commands=True, **settings) as application:
        yield application


def processes(application: Application, deployment: str) -> dict[str, int]:
    """Process ids of a deployment's living replicas, by the replica's name."""
    prefix = f"SERVE_REPLICA::{application.recipe.name}#{deployment}#"
    return {
        actor["Name"]: actor["Pid"]
        for actor in ray_state.actors().values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith(prefix)
    }


def running_replicas(application: Application) -> dict[str, int]:
    """Replicas that Serve says are RUNNING, by deployment."""
    status = serve.status().applications[application.recipe.name]
    return {
        name: sum(count for state, count in one.replica_states.items() if state == "RUNNING")
        for name, one in status.deployments.items()
    }


def until(condition: Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.1) -> float:
    """Seconds that it took; fails when the condition does not become true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not become true in time"
        time.sleep(every_s)
    return time.monotonic() - began


def listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]
