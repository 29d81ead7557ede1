"""The application under test: simulated pools in a real Ray Serve, behind a real gateway, on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from vllm_deepinfer.bench.gateway.processes import SCHEDULED, Child
from vllm_deepinfer.bench.routing.client import Plan, Record
from vllm_deepinfer.bench.routing.policies import OURS
from vllm_deepinfer.bench.routing.router import POLICY_FILE, ROUTER
from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.bench.routing.words import write_tokenizer
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.cluster.application.launch import Application
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost
from vllm_deepinfer.recipes.checkpoints import ensure_checkpoint
from vllm_deepinfer.recipes.schema import Recipe, Simulated, SimulatedCost

Variant = Literal["disaggregated", "aggregated"]
Say = Callable[[str], None]
CONTEXT = 32_768
KV_TOKENS = 262_144


def faster(cost: StepCost, times: float) -> StepCost:
    """The cost of an engine that computes so many times as fast; launching a step stays as it is."""
    names = ("per_token", "per_pair", "per_decode", "per_decode_context", "per_prefill_context")
    return replace(cost, **{name: getattr(cost, name) / times for name in names})


PREFILL_COST = faster(TWO_CORE_DENSE, 4)
DECODE_COST = faster(TWO_CORE_DENSE, 0.35)
"""Steps of some 25 ms under this load, near those on accelerators: short ones would measure the machine."""
POOLS: dict[Variant, dict[str, tuple[int, StepCost]]] = {
    "disaggregated": {"prefill": (5, PREFILL_COST), "decode": (8, DECODE_COST)},
    "aggregated": {"aggregated": (8, PREFILL_COST)},
}
"""Replicas and cost by role."""


def simulated_of(cost: StepCost) -> Simulated:
    """A replica's engine. Prefixes are not cached: what a shared store has is not in these prompts."""
    fields = {field: getattr(cost, field) for field in StepCost.__slots__ if field != "attention"}
    return Simulated(
        cost=SimulatedCost(**fields),
        max_model_len=CONTEXT,
        kv_capacity_tokens=KV_TOKENS,
        max_num_seqs=512,
        prefix_caching=False,
    )


def recipe_of(name: str, model: Path, pools: Mapping[str, tuple[int, StepCost]]) -> Recipe:
    """Simulated pools by role: replicas, and the cost of their engines' steps."""
    return Recipe.model_validate(
        {
            "name": f"{name}-{os.getpid()}",
            "model": {"path": str(model), "served_name": "bench"},
            "pools": {
                role: {
                    "role": role,
                    "engine": "simulated",
                    "replicas": count,
                    "resources": {"cpus": 0.01},
                    "simulated": simulated_of(cost).model_dump(mode="json"),
                }
                for role, (count, cost) in pools.items()
            },
            "gateway": {
                "port": 0,
                "log_level": "warning",
                "max_active": 8192,
                "max_waiting": 8192,
                "drain_timeout_s": 0.0,
            },
            "ray": {"deadlines": {"drain_s": 0.0}},
        }
    )


class System:
    """A running application whose policy can be changed."""

    def __init__(self, application: Application, folder: Path) -> None:
        self._application, self._folder = application, folder

    @property
    def ports(self) -> list[int]:
        """Of its gateways."""
        return [port for url in self._application.urls if (port := urlsplit(url).port)]

    @property
    def roles(self) -> list[str]:
        """Its pools."""
        return list(self._application.recipe.pools)

    def follow(self, policy: str) -> None:
        """Route by this policy from the next request on."""
        set_policy(self._folder, policy)

    def go_first(self) -> None:
        """The gateways before everything else, and before them the replicas: an engine waits for nobody."""
        for deployment, priority in (("gateway", 1), *((role, 2) for role in self.roles)):
            for pid in self.pids(deployment):
                go_first(pid, priority)

    def pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas."""
        return find_processes(f"ServeReplica:{self._application.recipe.name}:{deployment}")


def set_policy(folder: Path, policy: str) -> None:
    """Write the file that `ComparedRouter` reads, at once."""
    new = folder / "policy.new"
    new.write_text(policy, encoding="utf-8")
    new.replace(folder / "policy")


def make_model(folder: Path) -> Path:
    """A checkpoint folder whose tokenizer is `words`'; simulated engines read nothing else of it."""
    recipe = Recipe.model_validate(
        {"name": "tiny", "model": {"tiny": TinyOptions()}, "pools": {"a": {"role": "aggregated"}}}
    )
    model = folder / "model"
    shutil.copytree(ensure_checkpoint(recipe), model)
    write_tokenizer(model, CONTEXT)
    return model


@contextmanager
def running(folder: Path, recipe: Recipe, say: Say) -> Iterator[System]:
    """Start the application, stop it at the end."""
    os.environ[POLICY_FILE] = str(folder / "policy")
    set_policy(folder, OURS)
    with Application(recipe, router=ROUTER, say=say) as application:
        yield System(application, folder)


def replay(folder: Path, ports: list[int], arrivals: list[Arrival], patience_s: float) -> list[Record]:
    """Run the client over a trace. Raises: RuntimeError if it fails."""
    plan, result = folder / "plan.json", folder / "result.json"
    result.unlink(missing_ok=True)
    plan.write_bytes(msgspec.json.encode(Plan(ports, "bench", arrivals, patience_s)))
    with module("routing.client", (str(plan), str(result)), None, folder / "client.log") as child:
        child.ready()  # when the result is written
    return msgspec.json.decode(result.read_bytes(), type=list[Record])


def module(name: str, arguments: Sequence[str], core: int | None, log: Path) -> Child:
    """A module of `vllm_deepinfer.bench` as a process."""
    return Child([sys.executable, "-m", f"vllm_deepinfer.bench.{name}", *arguments], core, log)


def find_processes(title: str) -> list[int]:
    """Processes whose command line holds a title."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has just ended
            if title in line:
                found.append(int(entry.name))
    return sorted(found)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process since it started, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | SCHEDULED)


def go_first(pid: int, priority: int) -> None:
    """Let all threads of a process run whenever they have work, before those of a lower priority.

    What shares this machine's cores stands for as many machines. Without the right to it nothing changes, for
    any of the policies that are compared.
    """
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # not allowed, or it has just ended
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(priority))


def machine_busy() -> float:
    """Seconds that all cores together have been busy since the machine started."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait
