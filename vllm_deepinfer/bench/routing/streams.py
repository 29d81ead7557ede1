"""What a streamed token costs the gateway when it comes through Ray Serve and the token channel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_deepinfer.bench.gateway.doors import read_sample
from vllm_deepinfer.bench.gateway.processes import free_port
from vllm_deepinfer.bench.routing.system import (
    Say,
    System,
    cpu_seconds,
    module,
    recipe_of,
    running,
    simulated_of,
)
from vllm_deepinfer.policy.step_cost import StepCost

STREAMS = 256
TOKENS = 444
"""The median of published agentic answers."""
STEP = StepCost(per_step=0.020, per_token=0.0)
POOLS = {"aggregated": (1, STEP)}
SPREAD_S = 1.0


@dataclass(frozen=True)
class Cores:
    """Which core the gateway has to itself, and which everything else shares."""

    gateway: int
    rest: int


@dataclass(frozen=True)
class StreamCost:
    """CPU in µs per token that the clients received.

    Attributes:
        pools: of the gateway's process, with the engine in a replica of Ray Serve.
        replica: of the replica's process.
        in_process: of a gateway's process with the same engine in it.
        engine: of the engine alone, which is in `replica` and in `in_process`.
        tokens_per_s: through the pools, while it was measured.
    """

    pools: float
    replica: float
    in_process: float
    engine: float
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """The gateway's own CPU through pools over that on an in-process engine, the engine's taken off."""
        return self.pools / (self.in_process - self.engine)

    @property
    def tokens_per_core(self) -> float:
        """Tokens that a core spent on the gateway alone would carry per second."""
        return 1e6 / self.pools


class StreamBench:
    """One round measures the pools, then the gateway with its engine inside, then the engine alone."""

    def __init__(self, folder: Path, model: Path, cores: Cores, seconds: float) -> None:
        self._folder, self._model, self._cores, self._seconds = folder, model, cores, seconds
        self._simulated = simulated_of(STEP).model_dump_json()

    @contextmanager
    def system(self, say: Say) -> Iterator[System]:
        """The application, its gateway on a core of its own."""
        with running(self._folder, recipe_of("streams", self._model, POOLS), say) as system:
            for pid in system.pids("gateway"):
                pin(pid, self._cores.gateway)
            for pid in system.pids("aggregated"):
                pin(pid, self._cores.rest)
            yield system

    def measure(self, system: System) -> StreamCost:
        """One round."""
        [gateway], [replica] = system.pids("gateway"), system.pids("aggregated")
        pools, other, rate = self._streamed(
            system.ports[0], lambda: cpu_seconds(gateway), lambda: cpu_seconds(replica)
        )
        port = free_port()
        arguments = (str(port), str(self._model), self._simulated)
        with module("routing.door", arguments, self._cores.gateway, self._folder / "door.log") as door:
            door.wait_for(f"http://127.0.0.1:{port}/health")
            inside, _, _ = self._streamed(port, door.cpu_seconds, lambda: 0.0)
        return StreamCost(pools, other, inside, self._alone(), rate)

    def _streamed(
        self, port: int, gateway: Callable[[], float], other: Callable[[], float]
    ) -> tuple[float, float, float]:
        """CPU per token of two processes in µs, and tokens per second, with all streams running."""
        arguments = (str(port), str(STREAMS), str(TOKENS), str(SPREAD_S), "0")
        with module("gateway.load", arguments, self._cores.rest, self._folder / "load.log") as load:
            load.ready()
            time.sleep(SPREAD_S + 1.0)
            spent = [-gateway(), -other()]
            before, began = read_sample(load), time.monotonic()
            time.sleep(self._seconds)
            spent = [spent[0] + gateway(), spent[1] + other()]
            after, took = read_sample(load), time.monotonic() - began
            load.ask("stop")
        # An answer's end is an event too.
        tokens = after["events"] - before["events"] - (after["answers"] - before["answers"])
        if tokens <= 0:
            raise RuntimeError("no token arrived while it was measured")
        return 1e6 * spent[0] / tokens, 1e6 * spent[1] / tokens, tokens / took

    def _alone(self) -> float:
        arguments = (str(self._model), self._simulated, str(STREAMS), str(TOKENS))
        with module("routing.alone", arguments, self._cores.gateway, self._folder / "alone.log") as alone:
            alone.ready()
            time.sleep(0.5)
            cpu, made = alone.cpu_seconds(), int(alone.ask("tokens"))
            time.sleep(self._seconds)
            cpu, made = alone.cpu_seconds() - cpu, int(alone.ask("tokens")) - made
        return 1e6 * cpu / made


def pin(pid: int, core: int) -> None:
    """All threads of a process on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), {core})
        except ProcessLookupError:
            continue  # it has just ended
