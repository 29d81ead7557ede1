"""Drives a scheduler without a model: made-up tokens come back, one or two steps later."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def request(name: str, prompt: int, tokens: int, arrival: float = 0.0, priority: int = 0) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    params.update_from_generation_config({}, None)
    rng = random.Random(name)
    ids = [rng.randrange(20, 270) for _ in range(prompt)]
    return Request(name, ids, params, None, arrival_time=arrival, priority=priority)


@dataclass
class Drive:
    """A scheduler with up to `ahead` steps under way.

    Attributes:
        answers: tokens that came out, by request.
        gaps: per request, steps between one of its tokens and the next.
        steps: what each scheduled.
    """

    scheduler: Any
    ahead: int = 1
    answers: dict[str, list[int]] = field(default_factory=dict)
    gaps: dict[str, list[int]] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    _under_way: deque[tuple[Any, ModelRunnerOutput]] = field(default_factory=deque)
    _last: dict[str, int] = field(default_factory=dict)

    def step(self) -> None:
        """Schedule one step, and take back the oldest if that many are under way."""
        output = self.scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        if scheduled:
            self.steps.append(scheduled)
        self._under_way.append((output, self._model(scheduled)))
        if len(self._under_way) >= self.ahead or not scheduled:
            self._take_back()

    def finish(self, most: int = 5_000) -> None:
        """Until nothing is left; AssertionError if that takes more steps than `most`."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "requests starve"
        while self._under_way:
            self._take_back()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _model(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        """A token for each request whose prefill this step ends or that decodes."""
        sampled = []
        for name in scheduled:
            one = self.scheduler.requests[name]
            sampled.append([] if one.is_prefill_chunk else [20 + len(scheduled) % 7])
        index = {name: i for i, name in enumerate(scheduled)}
        return ModelRunnerOutput(list(scheduled), index, sampled)

    def _take_back(self) -> None:
        output, made = self._under_way.popleft()
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                if one.new_token_ids:
                    self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                    now = len(self.steps)
                    if one.request_id in self._last:
                        self.gaps.setdefault(one.request_id, []).append(now - self._last[one.request_id])
                    self._last[one.request_id] = now
