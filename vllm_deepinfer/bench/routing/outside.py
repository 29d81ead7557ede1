"""The vllm-router package in front of as many plain gateways as the compared pool has replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_deepinfer.bench.gateway.doors import ROUTER, ROUTER_VERSION, find_router
from vllm_deepinfer.bench.gateway.processes import Child, free_port
from vllm_deepinfer.bench.routing.system import go_first, module, simulated_of
from vllm_deepinfer.policy.step_cost import StepCost

POLICIES = ("power_of_two", "cache_aware", "round_robin")
NAME = f"{ROUTER} {ROUTER_VERSION}"


@contextmanager
def doors(folder: Path, model: Path, count: int, cost: StepCost) -> Iterator[list[int]]:
    """Gateways, each with a simulated engine in its process; gives their ports."""
    simulated = simulated_of(cost).model_dump_json()
    ports = [free_port() for _ in range(count)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                module(
                    "routing.door",
                    (str(port), str(model), simulated, "router"),
                    None,
                    folder / f"door{number}.log",
                )
            )
            for number, port in enumerate(ports)
        ]
        for child, port in zip(children, ports, strict=True):
            child.wait_for(f"http://127.0.0.1:{port}/health")
            go_first(child.pid, 2)
        yield ports


@contextmanager
def router(folder: Path, ports: list[int], policy: str) -> Iterator[int]:
    """The router over these doors; gives its port. Raises: FileNotFoundError if it is not installed."""
    port = free_port()
    command = [find_router(), "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--worker-urls"]
    command += [f"http://127.0.0.1:{door}" for door in ports]
    with Child(command, None, folder / f"router-{policy}.log") as child:
        child.wait_for(f"http://127.0.0.1:{port}/health")
        go_first(child.pid, 1)
        yield port
