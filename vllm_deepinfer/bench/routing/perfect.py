"""The same engines and requests under an assignment made offline, by who knows all sizes; in virtual time.

Longest job first to the worker with the least so far: the work of all workers of a pool is as equal as it
gets. Nothing but the engines' own time passes: no gateway, no network, no Ray.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections.abc import Callable, Mapping, Sequence

from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.bench.routing.words import VOCABULARY
from vllm_deepinfer.cluster.disaggregated import DisaggregatedEngine
from vllm_deepinfer.cluster.pool import PooledEngine
from vllm_deepinfer.engine import Engine, GenerateRequest, Load, SamplingParams, TokenDelta
from vllm_deepinfer.engine.clock import run_virtual
from vllm_deepinfer.engine.simulated import SimulatedEngine
from vllm_deepinfer.policy.routing import Choice
from vllm_deepinfer.policy.step_cost import StepCost, Work
from vllm_deepinfer.recipes.simulated import Simulated


def balanced(jobs: Sequence[float], workers: int) -> list[int]:
    """Which worker each job goes to: the longest first, to the worker with the least work.

    Raises: ValueError without a worker.
    """
    if workers < 1:
        raise ValueError(f"{len(jobs)} jobs need at least one worker, got {workers}.")
    heap = [(0.0, worker) for worker in range(workers)]
    assigned = [0] * len(jobs)
    for job in sorted(range(len(jobs)), key=lambda one: (-jobs[one], one)):
        work, worker = heapq.heappop(heap)
        assigned[job] = worker
        heapq.heappush(heap, (work + jobs[job], worker))
    return assigned


def prefill_seconds(cost: StepCost, arrival: Arrival) -> float:
    """Of the prompt, in one step."""
    return cost.predict([Work(0, arrival.prompt_tokens)])


def decode_seconds(cost: StepCost, arrival: Arrival) -> float:
    """What all tokens of the answer add to the steps that they are in."""
    context = arrival.prompt_tokens + arrival.answer_tokens / 2
    return arrival.answer_tokens * (cost.per_decode + cost.per_decode_context * context)


def makespan(
    arrivals: Sequence[Arrival],
    pools: Mapping[str, tuple[int, StepCost]],
    simulated: Callable[[StepCost], Simulated],
) -> float:
    """Seconds from the first arrival to the last token.

    Args:
        pools: replicas and cost by role. simulated: a replica's engine.
    """
    return run_virtual(_run(arrivals, pools, simulated))


async def _run(
    arrivals: Sequence[Arrival],
    pools: Mapping[str, tuple[int, StepCost]],
    simulated: Callable[[StepCost], Simulated],
) -> float:
    made: dict[str, PooledEngine] = {}
    engines: list[Engine] = []
    for role, (count, cost) in pools.items():
        config = simulated(cost).config("bench", vocab_size=VOCABULARY, eos_token_id=1)
        workers: dict[str, Engine] = {f"{role}{number}": SimulatedEngine(config) for number in range(count)}
        for engine in workers.values():
            await engine.start()
        engines += workers.values()
        made[role] = PooledEngine(workers, _router(arrivals, role, count, cost))
        await made[role].start()
    whole: Engine = made["aggregated"] if "aggregated" in made else _relayed(made)
    if whole not in made.values():
        await whole.start()
    try:
        return await _replay(arrivals, whole)
    finally:
        for engine in (whole, *made.values(), *engines):
            await engine.close()


def _relayed(pools: Mapping[str, PooledEngine]) -> DisaggregatedEngine:
    return DisaggregatedEngine(pools["prefill"], pools["decode"])


def _router(
    arrivals: Sequence[Arrival], role: str, count: int, cost: StepCost
) -> Callable[[GenerateRequest, Mapping[str, Load], frozenset[str]], Choice | None]:
    prefill = [0.0 if role == "decode" else prefill_seconds(cost, one) for one in arrivals]
    decode = [0.0 if role == "prefill" else decode_seconds(cost, one) for one in arrivals]
    assigned = balanced([sum(both) for both in zip(prefill, decode, strict=True)], count)

    def route(request: GenerateRequest, loads: Mapping[str, Load], refused: frozenset[str]) -> Choice | None:
        return Choice(f"{role}{assigned[_number_of(request)]}", 0.0)

    return route


def _number_of(request: GenerateRequest) -> int:
    """Attempts have names of their own: the request's with something behind it."""
    found = re.match(r"\d+", request.request_id)
    assert found is not None
    return int(found[0])


async def _replay(arrivals: Sequence[Arrival], engine: Engine) -> float:
    loop = asyncio.get_running_loop()
    began, left, done = loop.time(), len(arrivals), asyncio.Event()

    def sink(deltas: Sequence[TokenDelta]) -> None:
        nonlocal left
        left -= sum(delta.final for delta in deltas)
        if not left:
            done.set()

    async def send(number: int, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        sampling = SamplingParams(max_tokens=arrival.answer_tokens, ignore_eos=True)
        ids = [number % 1000 + 30] * arrival.prompt_tokens
        request = GenerateRequest(request_id=str(number), prompt_token_ids=ids, sampling=sampling)
        await engine.submit(request, sink)

    await asyncio.gather(*(send(number, arrival) for number, arrival in enumerate(arrivals)))
    await done.wait()
    return loop.time() - began
