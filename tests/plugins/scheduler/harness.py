"""Real engines on tiny models, with a clock that a cost model drives: what is decided does not depend on the
machine's mood, and what the model answers is real."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

# A step of 64 tokens takes about 10 ms, one decode 0.2.
COST = StepCost(0.002, 1e-4, 1e-7, 2e-4, 1e-7, 1e-6, tile=32)
TARGET_MS = 12.0


@dataclass
class Arrival:
    """A request that comes in before a step."""

    step: int
    prompt: list[int]
    tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass
class Served:
    """What came of it: tokens by arrival, what each step scheduled, our records, first tokens' steps."""

    answers: list[list[int]]
    steps: list[dict[str, int]]
    records: list[Any]
    first: dict[int, int]
    preemptions: int
    cached: int


def traffic(
    seed: int, count: int = 24, longest: int = 400, most: int = 24, spacing: int = 3
) -> list[Arrival]:
    """Prompts of any length, one every few steps."""
    rng = random.Random(seed)
    return [
        Arrival(
            step=spacing * number if number > 2 else 0,
            prompt=[rng.randrange(20, 270) for _ in range(rng.randrange(3, longest))],
            tokens=rng.randrange(2, most),
        )
        for number in range(count)
    ]


def serve(llm: Any, arrivals: list[Arrival]) -> Served:
    """Run the engine step by step until every request has ended; greedy."""
    from vllm import SamplingParams

    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    watch = Watch(core.scheduler)
    answers: dict[str, list[int]] = {}
    first: dict[int, int] = {}
    cached, step, pending = 0, 0, sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
    while pending or engine.has_unfinished_requests():
        while pending and (pending[0][1].step <= step or not engine.has_unfinished_requests()):
            number, arrival = pending.pop(0)
            given = {"temperature": 0, "max_tokens": arrival.tokens, "ignore_eos": True, **arrival.extra}
            prompt = {"prompt_token_ids": arrival.prompt}
            engine.add_request(str(number), prompt, SamplingParams(**given), priority=arrival.priority)
        for output in engine.step():
            first.setdefault(int(output.request_id), step)
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
                cached += output.num_cached_tokens or 0
        step += 1
    watch.close()
    ordered = [answers[str(i)] for i in range(len(arrivals))]
    return Served(ordered, watch.steps, watch.records, first, watch.preemptions, cached)


class Watch:
    """Writes down what a scheduler does."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[dict[str, int]] = []
        self.records: list[Any] = []
        self.preemptions = 0
        self._scheduler = scheduler
        self._before = dict(scheduler.__dict__)
        scheduler.schedule = self._around(scheduler.schedule, self._scheduled)
        scheduler._preempt_request = self._around(scheduler._preempt_request, self._preempted)
        if hasattr(scheduler, "_record"):
            scheduler._record = self._around(scheduler._record, self.records.append)

    def close(self) -> None:
        for name in ("schedule", "_preempt_request", "_record"):
            self._scheduler.__dict__.pop(name, None)
            if name in self._before:
                self._scheduler.__dict__[name] = self._before[name]

    def _scheduled(self, output: Any) -> None:
        if output.num_scheduled_tokens:
            # vLLM adds a suffix of its own to our ids
            self.steps.append({key.split("-")[0]: n for key, n in output.num_scheduled_tokens.items()})

    def _preempted(self, _: Any) -> None:
        self.preemptions += 1

    @staticmethod
    def _around(function: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            note(result)
            return result

        return wrapped


def use_model_clock(scheduler: Any, cost: StepCost = COST, known: bool = True) -> None:
    """Time passes as `cost` says; with `known` the scheduler's own model is that cost from the start."""
    now = [0.0]
    if known:
        learner = StepCostLearner(scheduler._learner.fitted, cost)
        scheduler._learner = scheduler._meter.learner = scheduler._planner._learner = learner
    scheduler._clock = lambda: now[0]
    record = scheduler._record

    def recorded(*args: Any) -> Any:
        made = record(*args)
        now[0] += cost.seconds(made.features)
        return made

    scheduler._record = recorded


@contextmanager
def tiny(folder: Path, **settings: Any) -> Iterator[Any]:
    """An in-process engine with the tiny dense model, float32, stock scheduler."""
    from tests.plugins.model.engines import engine
    from tests.plugins.tiny_qwen3 import write_tiny_qwen3

    model = folder / "tiny-qwen3"
    if not model.exists():
        write_tiny_qwen3(model)
    defaults = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 16}
    with engine(model, **{**defaults, **settings}) as llm:
        yield llm
