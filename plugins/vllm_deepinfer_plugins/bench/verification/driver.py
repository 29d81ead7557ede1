"""Slices: a setting is put in, requests begin, their decode steps are timed and counted, and they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from ..cpu_share import ForeignCpu
from ..workload import greedy
from .minds import Minds
from .script import Confidences, Scripts
from .scripted import number_of

SKIPPED = 3  # first decode steps of a slice: drafts come with the second, old confidences with the third


@dataclass
class Slice:
    """What was counted of its decode steps; steps with prefill are left out.

    Attributes:
        seconds: of these steps. tokens: that they brought. drafts: that they verified.
        expected: tokens, by the script, that what was verified brings on average; 0.0 without a script.
        foreign: share of all cores that other processes used meanwhile.
        trace: seconds of each step, and how many drafts of each request it verified, by number.
    """

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    expected: float = 0.0
    foreign: float | None = None
    trace: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second: expected ones where they are known, for luck is no merit of a setting's."""
        return (self.expected or self.tokens) / self.seconds


class Driver:
    """Holds an in-process engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._ids = count()
        self._heads: dict[str, list[int]] = {}
        self.minds = Minds(engine)

    def measure(
        self,
        setting: str,
        prompts: Sequence[Sequence[int]],
        *,
        scripts: Scripts | None = None,
        confidences: Confidences = Confidences.RIGHT,
        outputs: int,
        at_once: int | None = None,
        steps: int = 1,
        seconds: float = 0.0,
        trace: bool = False,
    ) -> Slice:
        """One slice of a setting of `Minds`.

        Args:
            scripts: of the requests by number; the slice ends when it is long enough. None: it ends with its
                last answer, so that every setting does the same work.
            outputs: tokens of an answer. at_once: requests that run at a time; None: all.
            steps, seconds: long enough, with scripts.
        """
        scheduler = self.minds.put_in(setting, confidences, at_once)
        if scripts is not None:
            self.minds.proposer.scripts = scripts
        taken, seen = self._outputs_of(scheduler), Slice()
        for prompt in prompts:
            name = f"bench-{next(self._ids)}"
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(outputs, None))
        skipped = 0
        with ForeignCpu() as foreign:
            while self._engine.has_unfinished_requests():
                known = {key: request.num_tokens for key, request in scheduler.requests.items()}
                begin = time.perf_counter()
                results = self._engine.step()
                elapsed = time.perf_counter() - begin
                output = taken.pop()
                if _prefills(output, known):
                    continue
                skipped += 1
                if skipped > SKIPPED or scripts is None:
                    numbers = self._count(seen, elapsed, output, known, scripts)
                    seen.tokens += sum(len(result.outputs[0].token_ids) for result in results)
                    if trace:
                        seen.trace.append((elapsed, numbers))
                if scripts is not None and seen.steps >= steps and seen.seconds >= seconds:
                    break
        seen.foreign = foreign.share
        self._end()
        return seen

    def _count(
        self, seen: Slice, elapsed: float, output: Any, known: dict[str, int], scripts: Scripts | None
    ) -> list[int]:
        """A decode step; returns drafts verified of each request, by number where there is a script."""
        keys = list(output.num_scheduled_tokens)
        verified = np.array([len(output.scheduled_spec_decode_tokens.get(key, ())) for key in keys])
        seen.seconds += elapsed
        seen.steps += 1
        seen.drafts += int(verified.sum())
        if scripts is None:
            return [int(each) for each in verified]
        numbers = number_of(np.array([self._head(key) for key in keys], np.int32))
        most = int(verified.max(initial=0))
        survived = scripts.survivals(numbers, np.array([known[key] for key in keys]), most)
        chosen = np.arange(most) < verified[:, None]
        seen.expected += len(keys) + float(survived[chosen].sum())
        return [int(each) for each in verified[numbers.argsort()]]

    def _head(self, key: str) -> list[int]:
        """First two tokens of a request's prompt; of one that has ended with this step, too."""
        return self._heads[key]

    def _outputs_of(self, scheduler: Any) -> list[Any]:
        """A list that each step's output is put into, as the scheduler makes it."""
        taken: list[Any] = []
        self._heads = {}
        schedule = scheduler.schedule

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            taken.append(output)
            for request in output.scheduled_new_reqs:
                self._heads[request.req_id] = list(request.prompt_token_ids[:2])
            return output

        scheduler.schedule = noting
        return taken

    def _end(self) -> None:
        """End everything that is under way."""
        self._engine.abort_request(list(self._engine.output_processor.external_req_ids))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _prefills(output: Any, known: dict[str, int]) -> bool:
    """Whether a step computes more of a request than its last token and its drafts, or nothing at all."""
    drafts = output.scheduled_spec_decode_tokens
    counts = output.num_scheduled_tokens
    return not counts or any(
        tokens > 1 + len(drafts.get(key, ())) or key not in known for key, tokens in counts.items()
    )
