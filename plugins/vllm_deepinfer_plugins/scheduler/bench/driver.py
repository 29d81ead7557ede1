"""One measurement on an in-process engine: endless decodes beside a closed loop or a stream of prompts.

Time stands still while prompts are added (9 to 18 ms for 16k tokens, which a server's front end does in
another process): the engine's time is the sum of its steps'. The scheduler's own clock is that one too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_deepinfer.policy.itl_control import quantile

from ...bench.cpu_share import ForeignCpu
from .. import TimeBudgetScheduler
from .swap import swap

DECODE_PROMPT = 512  # tokens
OUTSTANDING = 4
FIRST = 20  # token ids of prompts begin here


@dataclass
class Measurement:
    """Of one window.

    Attributes:
        seconds: of engine time. tokens: prefilled in it.
        periods: seconds of each step: what every decode waited for its token.
        use: duration over budget, of our steps that prefilled beside decodes.
        foreign: share of all cores that other processes used meanwhile.
        ttft: seconds from arrival to first token, of the prompts that ended.
    """

    seconds: float = 0.0
    tokens: int = 0
    periods: list[float] = field(default_factory=list)
    use: list[float] = field(default_factory=list)
    foreign: float | None = None
    ttft: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For the wire."""
        return {**asdict(self), "p99": quantile(self.periods, 0.99) if self.periods else None}


class Driver:
    """Holds the engine, and what our scheduler has learned: a server in use for a while, not a fresh one."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._vocabulary = vocabulary
        self._ids = count()
        self._meter: Any = None
        self._now = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="bench-scheduler-fit-")  # gone with the process

    def choose(self, setting: dict[str, Any]) -> Any:
        """Put in the scheduler that the setting names."""
        if "target_ms" not in setting:
            return swap(self._core, Scheduler, chunk=setting["chunk"], threshold=setting["threshold"])
        ours = {"itl_target_ms": setting["target_ms"], "step_cost_file": f"{self._folder.name}/fit.json"}
        scheduler = swap(self._core, TimeBudgetScheduler, deepinfer=ours)
        scheduler._clock = self._clock
        if self._meter is not None:
            self._meter._ended = 0.0
            scheduler._meter, scheduler._learner = self._meter, self._meter.learner
            scheduler._planner._learner = self._meter.learner
            scheduler._planner._control = self._meter.control
            scheduler.waiting.rerank()
        self._meter = scheduler._meter
        return scheduler

    @property
    def learner(self) -> Any:
        """Of our scheduler; None before it was used."""
        return self._meter.learner if self._meter is not None else None

    def closed(
        self, setting: dict[str, Any], lengths: Iterator[int], decodes: int, seconds: float, warm_up: float
    ) -> Measurement:
        """`decodes` endless requests and always `OUTSTANDING` prompts, for `seconds` after `warm_up`."""
        scheduler = self.choose(setting)
        self._begin_decodes(decodes)
        alive: dict[str, float] = {}
        measured, until, counted = Measurement(), self._now + warm_up, False
        with ForeignCpu() as foreign:
            while not counted or self._now < until:
                if not counted and self._now >= until:
                    counted, until = True, self._now + seconds
                while len(alive) < OUTSTANDING:
                    alive[self._add(next(lengths), 1)] = self._now
                self._step(scheduler, measured if counted else None, alive)
        measured.foreign = foreign.share
        self._drain()
        return measured

    def opened(
        self, setting: dict[str, Any], arrivals: Sequence[tuple[float, int]], decodes: int
    ) -> Measurement:
        """`decodes` requests that never end beside prompts that come when they come."""
        scheduler = self.choose(setting)
        self._begin_decodes(decodes)
        alive: dict[str, float] = {}
        measured, pending, start = Measurement(), list(arrivals), self._now
        while pending or alive:
            while pending and start + pending[0][0] <= self._now:
                due, length = pending.pop(0)
                alive[self._add(length, 1)] = start + due
            self._step(scheduler, measured, alive)
        self._drain()
        return measured

    def schedule_times(self, setting: dict[str, Any], running: int, waiting: int, steps: int) -> list[float]:
        """Seconds of each `schedule()` with so many running and waiting requests, four of them prefilling."""
        scheduler = self.choose(setting)
        self._begin_decodes(running - OUTSTANDING, prompt=32)
        for _ in range(OUTSTANDING):
            self._add(4_000, 1)
        self._step(scheduler, None, {})
        for _ in range(waiting):
            self._add(1_000, 1)
        taken: list[float] = []
        schedule = scheduler.schedule

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            output = schedule(*args)
            taken.append(time.perf_counter() - begin)
            return output

        scheduler.schedule = timed
        for _ in range(steps):
            self._step(scheduler, None, {})
        self._drain()
        return taken

    def _clock(self) -> float:
        return self._now + (time.perf_counter() - self._began)

    def _step(self, scheduler: Any, measured: Measurement | None, alive: dict[str, float]) -> None:
        self._began = time.perf_counter()
        outputs = self._engine.step()
        elapsed = time.perf_counter() - self._began
        self._now += elapsed
        self._began = time.perf_counter()
        ended = {output.request_id for output in outputs if output.finished}
        if measured is not None:
            measured.seconds += elapsed
            measured.periods.append(elapsed)
            measured.ttft += [self._now - alive[key] for key in ended if key in alive]
            measured.tokens += self._prefilled
            report = scheduler._complaints._latest if hasattr(scheduler, "_complaints") else None
            if report is not None and report.budget and report.chunks and report.decodes:
                measured.use.append(report.actual / report.budget)
        for key in ended:
            alive.pop(key, None)

    def _begin_decodes(self, decodes: int, prompt: int | None = None) -> None:
        """They are decoding when this returns; their prefill is nobody's measurement."""
        self._count_prefill()
        prompt = prompt or DECODE_PROMPT
        room = self._core.vllm_config.model_config.max_model_len - prompt - 1
        for _ in range(decodes):
            self._add(prompt, room)
        self._began = time.perf_counter()
        while any(
            r.num_computed_tokens < r.num_prompt_tokens for r in self._core.scheduler.requests.values()
        ):
            self._began = time.perf_counter()
            self._engine.step()
            self._now += time.perf_counter() - self._began

    def _count_prefill(self) -> None:
        """Prefill tokens of the latest step, from what the scheduler puts out."""
        scheduler, self._prefilled = self._core.scheduler, 0
        schedule = scheduler.schedule

        def counted(*args: Any) -> Any:
            output = schedule(*args)
            self._prefilled = sum(n for n in output.num_scheduled_tokens.values() if n > 1)
            return output

        scheduler.schedule = counted

    def _add(self, length: int, outputs: int) -> str:
        from vllm import SamplingParams

        key = str(next(self._ids))
        number = int(key)
        tokens = [FIRST + (number * 7919 + i * i) % (self._vocabulary - FIRST) for i in range(length)]
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        self._engine.add_request(key, {"prompt_token_ids": tokens}, params)
        return key

    def _drain(self) -> None:
        """End everything that is under way."""
        self._engine.abort_request(list(self._engine.output_processor.external_req_ids))
        while self._engine.has_unfinished_requests():
            self._engine.step()
