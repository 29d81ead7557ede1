"""The noise-free bound: the same policy and the fixed chunks on a machine that takes what the model says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_deepinfer.bench.scheduler.settings import Fixed
from vllm_deepinfer.policy.itl_control import quantile
from vllm_deepinfer.policy.prefill_budget import Patience, Prefill, StepBudget, plan
from vllm_deepinfer.policy.prefill_order import Claim, Order, rank
from vllm_deepinfer.policy.step_cost import Features, StepCost, Work

OUTSTANDING = 4  # prompts at a time, one after another
DECODE_CONTEXT = 512
CAP = 8_192


@dataclass(slots=True)
class Prompt:
    """One prompt under way."""

    arrived: float
    length: int
    done: int = 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """Prefill tokens per second, and the 99th percentile of a step in seconds."""

    throughput: float
    p99: float


Chunks = Callable[[list[Prompt], Features, float], dict[int, int]]


def fixed(setting: Fixed, decodes: int) -> Chunks:
    """vLLM's cut: tokens, in order of arrival."""

    def chunks(prompts: list[Prompt], _: Features, __: float) -> dict[int, int]:
        left, given = setting.chunk - decodes, {}
        for index, prompt in enumerate(prompts):
            chunk = min(prompt.length - prompt.done, setting.threshold or CAP, left)
            if chunk > 0:
                given[index] = chunk
                left -= chunk
        return given

    return chunks


def budgeted(cost: StepCost, limit: float) -> Chunks:
    """Ours: time, the shortest first."""
    patience = Patience()

    def chunks(prompts: list[Prompt], decodes: Features, _: float) -> dict[int, int]:
        left = {str(i): Prefill(str(i), p.done, p.length - p.done) for i, p in enumerate(prompts)}

        def claim(index: int) -> Claim:
            prompt, prefill = prompts[index], left[str(index)]
            work = cost.seconds(cost.features(Work(prefill.context, prefill_tokens=prefill.remaining)))
            return Claim(prompt.arrived, work)

        order = [
            left[str(i)] for i in sorted(range(len(prompts)), key=lambda i: rank(claim(i), Order.SHORTEST))
        ]
        budget = StepBudget(cost, decodes, limit, CAP)
        given = plan(budget, order, cost.tile if patience.exhausted else 0)
        patience.note(bool(order), order[0].key in given, budget.predicted > limit)
        return {int(key): chunk for key, chunk in given.items()}

    return chunks


def simulate(
    cost: StepCost, lengths: Iterator[int], decodes: int, chunks: Chunks, steps: int = 1_500
) -> Simulated:
    """`decodes` requests that never end, and `OUTSTANDING` prompts at any time."""
    now, tokens, durations = 0.0, 0, []
    prompts = [Prompt(0.0, next(lengths)) for _ in range(OUTSTANDING)]
    scanned = cost.attention.scanned
    for step in range(steps):
        context = decodes * scanned(DECODE_CONTEXT + step)
        decoding = Features(decodes=decodes, decode_context=context)
        given = chunks(prompts, decoding, now)
        work = [Work(prompts[i].done, prefill_tokens=n) for i, n in given.items()]
        seconds = cost.seconds(sum(map(cost.features, work), decoding))
        now += seconds
        durations.append(seconds)
        for index, chunk in given.items():
            prompts[index].done += chunk
            tokens += chunk
        prompts = [p for p in prompts if p.done < p.length]
        prompts += [Prompt(now, next(lengths)) for _ in range(OUTSTANDING - len(prompts))]
    return Simulated(tokens / now if now else math.inf, quantile(durations, 0.99))
