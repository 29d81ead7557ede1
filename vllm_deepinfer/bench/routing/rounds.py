"""All policies in turn over the same traces, in another order each round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from vllm_deepinfer.bench.routing.measure import Pass, Window, summarise
from vllm_deepinfer.bench.routing.policies import OTHERS, OURS
from vllm_deepinfer.bench.routing.system import Say, System, cpu_seconds, machine_busy, replay
from vllm_deepinfer.bench.routing.trace import Shape, draw

PATIENCE_S = 2.0
OUR_PATIENCE_S = 30.0
"""Ours must end every answer: what is open then is lost."""
FILL_S = 2.0
SETTLE_S = 0.5


@dataclass(frozen=True)
class Shares:
    """Cores that were busy during a pass: of the gateway, of all replicas, of the whole machine."""

    gateway: float
    replicas: float
    machine: float


@dataclass
class Results:
    """What was measured, by policy, a pass per round."""

    passes: dict[str, list[Pass]] = field(default_factory=dict)
    shares: dict[str, list[Shares]] = field(default_factory=dict)

    def ratios(self, of: Callable[[Pass], float], ours: str = OURS) -> tuple[str, list[float]]:
        """The best other policy, by its median over the rounds, and our value over its in each round."""
        others = {name: [of(one) for one in passes] for name, passes in self.passes.items() if name != ours}
        best = min(others, key=lambda name: sorted(others[name])[len(others[name]) // 2])
        return best, [of(one) / other for one, other in zip(self.passes[ours], others[best], strict=True)]


def compare(system: System, folder: Path, shape: Shape, rounds: int, say: Say) -> Results:
    """Every policy over every round's trace."""
    results = Results({name: [] for name in (OURS, *OTHERS)}, {name: [] for name in (OURS, *OTHERS)})
    system.go_first()
    for number in range(rounds):
        order = [OURS, *OTHERS]
        Random(number).shuffle(order)
        for policy in order:
            say(f"round {number + 1} of {rounds}: {policy}")
            system.follow(policy)
            patience = OUR_PATIENCE_S if policy == OURS else PATIENCE_S
            found, shares = observe(system, folder, system.ports, shape, number, patience)
            results.passes[policy].append(found)
            results.shares[policy].append(shares)
    return results


def observe(
    system: System | None, folder: Path, ports: list[int], shape: Shape, seed: int, patience_s: float
) -> tuple[Pass, Shares]:
    """One pass over a trace, and how busy the machine was; without a system only as a whole."""
    arrivals, before, began = draw(shape, seed), _spent(system), time.monotonic()
    records = replay(folder, ports, arrivals, patience_s)
    after, took = _spent(system), time.monotonic() - began
    time.sleep(SETTLE_S)  # what was given up is aborted
    window = Window(min(FILL_S, shape.seconds / 4), shape.seconds)
    shares = {name: (after[name] - before[name]) / took for name in before}
    return summarise(arrivals, records, window, patience_s), Shares(**shares)


def _spent(system: System | None) -> Mapping[str, float]:
    if system is None:
        return {"gateway": 0.0, "replicas": 0.0, "machine": machine_busy()}
    replicas = [pid for role in system.roles for pid in system.pids(role)]
    return {
        "gateway": sum(map(cpu_seconds, system.pids("gateway"))),
        "replicas": sum(map(cpu_seconds, replicas)),
        "machine": machine_busy(),
    }
