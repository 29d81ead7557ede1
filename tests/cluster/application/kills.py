"""Kills parts of a running application at random moments under load, and says what the clients saw.

python -m tests.cluster.application.kills --kills 50 --kind replica --kind gateway
python -m tests.cluster.application.kills --kills 10 --kind prefill --kind decode --recipe recipes/laptop.yaml

Engines are simulated, or with --recipe those of a recipe, in float32 and batch-invariant mode, where the
company of a request does not change its tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.application import applications
from tests.cluster.application.traffic import Traffic
from vllm_deepinfer.cluster.application.launch import Application
from vllm_deepinfer.recipes import Recipe, load_recipe

ENGINES = """
  local_nodes:
    - {cpus: 1, custom: {engines: 2}}
    - {cpus: 1, custom: {engines: 2}}
    - {cpus: 1, custom: {engines: 2}}
"""
"""Nodes of which two hold all engines, so that one may die."""

PATIENCE_S = 300.0
"""A real engine starts in half a minute or more."""

STALE_S = 0.3
"""So long after a gateway's death a client may still write to a connection that it had kept."""


@dataclass
class Tally:
    """All kills of one kind. ``recovered``: the longest that any stream waited for a token, in seconds, until
    all replicas ran again; ``replaced``: how long that took."""

    kind: str
    recovered: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """For the table."""
        return {
            "kind": self.kind,
            "kills": len(self.recovered),
            "recovered_p50_s": percentile(self.recovered, 50),
            "recovered_p99_s": percentile(self.recovered, 99),
            "replaced_p50_s": percentile(self.replaced, 50),
            "replaced_p99_s": percentile(self.replaced, 99),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) * percent // 100, len(ordered) - 1)], 2) if ordered else 0.0


class Killer:
    """Of one application.

    Args:
        wanted: replicas by deployment when it is whole.
    """

    def __init__(self, application: Application, wanted: dict[str, int], seed: int = 0) -> None:
        self.application, self.wanted = application, wanted
        self._rng = random.Random(seed)

    def kill(self, kind: str, traffic: Traffic) -> None:
        """Kinds: name of a pool, ``gateway``, ``hang`` (an engine stands still), ``node``."""
        if kind == "gateway":
            self._gateway(traffic)
        elif kind == "node":
            self._node(traffic)
        elif kind.startswith("hang"):
            self._hang(kind.partition(":")[2] or "main", traffic)
        else:
            pid = self._rng.choice(list(applications.processes(self.application, kind).values()))
            traffic.mark()
            os.kill(pid, signal.SIGKILL)

    def _gateway(self, traffic: Traffic) -> None:
        pid = self._rng.choice(list(applications.processes(self.application, "gateway").values()))
        ports = applications.listening(pid)
        traffic.mark()
        os.kill(pid, signal.SIGKILL)
        for url in traffic.urls:
            if int(url.rsplit(":", 1)[1]) in ports:
                traffic.killed[url] = time.monotonic() + STALE_S

    def _hang(self, pool: str, traffic: Traffic) -> None:
        assert self.application.handle(pool).command.remote("hang").result(timeout_s=20) is None
        traffic.mark()  # not before: the call takes longer than a token

    def _node(self, traffic: Traffic) -> None:
        """A node of engines, with all its processes at once, and a new one in its place."""
        cluster = self.application._nodes._cluster
        engines = {
            pid for name in self.pools for pid in applications.processes(self.application, name).values()
        }
        homes = {}
        for node in cluster.worker_nodes:
            raylet = node.all_processes["raylet"][0].process.pid
            homes[node] = applications.family(raylet)
        node = self._rng.choice([one for one, all_ in homes.items() if engines & {p.pid for p in all_}])
        for process in homes[node]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.kill()
        traffic.mark()
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(
            num_cpus=1,
            resources={"engines": 2},
            object_store_memory=int(self.application.recipe.ray.object_store_gib * (1 << 30)),
            wait=False,
        )

    def _living(self) -> set[str]:
        """Names of all replicas whose processes live, as far as Ray knows."""
        return {one for name in self.wanted for one in applications.processes(self.application, name)}

    @property
    def pools(self) -> list[str]:
        """Names of the recipe's pools."""
        return list(self.application.recipe.pools)

    def storm(self, kinds: Sequence[str], kills: int, traffic: Traffic, seconds: float = 1e9) -> list[Tally]:
        """So many kills of these kinds in turn, each at a random moment after the last one was made good.

        ``seconds``: no more kills after that time.
        """
        tallies, began = {kind: Tally(kind) for kind in kinds}, time.monotonic()
        for at in range(kills):
            if time.monotonic() - began > seconds:
                break
            kind = kinds[at % len(kinds)]
            time.sleep(self._rng.random() * 1.0)
            recovered, replaced = self._kill_and_wait(kind, traffic)
            tallies[kind].recovered.append(recovered)
            tallies[kind].replaced.append(replaced)
            line = f"{at + 1}/{kills} {kind}: streams after {recovered:.2f} s, whole after {replaced:.2f} s"
            print(line, dict(traffic.counts), file=sys.stderr, flush=True)
        return list(tallies.values())

    def _kill_and_wait(self, kind: str, traffic: Traffic) -> tuple[float, float]:
        before, began = self._living(), time.monotonic()
        self.kill(kind, traffic)

        def whole() -> bool:
            living = self._living()
            return (
                not before <= living
                and len(living) == len(before)
                and applications.running_replicas(self.application) == self.wanted
            )

        applications.until(whole, PATIENCE_S)
        replaced = time.monotonic() - began
        applications.until(lambda: traffic.recovered() is not None, PATIENCE_S, 0.02)
        return traffic.recovered() or 0.0, replaced


def invariant(recipe: Recipe) -> Recipe:
    """With engines whose tokens can be compared, and a free port, which the next gateway has too."""
    mode = {"additional_config": {"deepinfer": {"batch_invariant": True}}}
    pools = {
        name: pool.model_copy(update={"engine_args": {**pool.engine_args, **mode}})
        for name, pool in recipe.pools.items()
    }
    gateway = recipe.gateway.model_copy(update={"port": applications.free_ports(1)})
    return recipe.model_copy(update={"pools": pools, "gateway": gateway})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--split", action="store_true", help="prefill and decode apart")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="no more kills after that")
    parser.add_argument("--recipe", type=Path, help="engines that are not simulated")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    kinds = chosen.kind or ["main", "gateway"]
    nodes = "node" in kinds
    replicas = 2 if chosen.split else 3
    with tempfile.TemporaryDirectory() as folder:
        file = applications.written(
            Path(folder),
            applications.SPLIT if chosen.split else applications.AGGREGATED,
            replicas=replicas,
            gateways=2,
            port=applications.free_ports(2),
            ray=ENGINES if nodes else "",
        )
        if nodes:
            text = file.read_text().replace("{cpus: 0.1}", "{cpus: 0.1, custom: {engines: 1}}")
            file.write_text(text)
        recipe = invariant(load_recipe(chosen.recipe)) if chosen.recipe else load_recipe(file)
        with Application(recipe, commands=True, say=lambda line: print(line, file=sys.stderr)) as application:
            pools = {name: pool.replicas.min for name, pool in application.recipe.pools.items()}
            killer = Killer(application, {**pools, "gateway": len(application.urls)}, chosen.seed)
            model = application.recipe.served_names[0]
            # An answer of a real engine in this mode takes seconds.
            sizes: dict[str, Any] = {"tokens": (8, 60), "prompts": 8} if chosen.recipe else {}
            flow = Traffic(list(application.urls), model, streams=chosen.streams, **sizes)
            with flow.flowing() as traffic:
                tallies = killer.storm(kinds, chosen.kills, traffic, chosen.seconds)
            report = {
                "rows": [one.row() for one in tallies],
                "counts": dict(traffic.counts),
                "errors": traffic.errors[:20],
                "raw": [asdict(one) for one in tallies],
            }
    text = json.dumps(report, indent=1)
    print(
        text
        if not chosen.json
        else json.dumps({key: report[key] for key in ("rows", "counts", "errors")}, indent=1)
    )
    if chosen.json:
        chosen.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
