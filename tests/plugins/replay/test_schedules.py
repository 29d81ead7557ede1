"""Random schedules of {arrive, chunk, hit, preempt, abort, finish}: no block leaks, and every request that
survives has the answer that it gets alone with the same hits. With a drafter its drafts are those, too.

DEEPINFER_REPLAY_SCHEDULES says how many, for each of four kinds of engines; by default two kinds run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.plugins.draft.proposals import Proposals
from vllm_deepinfer.policy.step_cost import StepCost

from .oracle import VOCAB, Log, check, engine, scheduler_of
from .test_engine import answer, serve

pytestmark = pytest.mark.slow

ASKED = os.environ.get("DEEPINFER_REPLAY_SCHEDULES")
SCHEDULES = int(ASKED or "3")
DOCUMENT, ARRIVALS, TOKENS = 64, 6, 12
COSTS = (None, StepCost(0.01, 1e-4), StepCost(0.001, 1e-4, 1e-8, tile=32))
"""What decides over hits: tokens, a cost by which all hits pay, and one that declines short ones."""


class Schedule:
    """One schedule: two documents stay cached because a request holds each; the others come and go."""

    def __init__(self, llm: Any, log: Log, seed: int, proposals: Proposals | None = None) -> None:
        self.llm, self.engine, self.scheduler, self.log = llm, llm.llm_engine, scheduler_of(llm), log
        self.rng, self.seed, self.proposals = random.Random(seed), seed, proposals
        self.documents = [self._ids(DOCUMENT) for _ in range(2)]
        self.prompts: dict[str, tuple[list[int], list[int]]] = {}
        self.answers: dict[str, list[int]] = {}
        self.count = self.preempted = self.drafts = 0
        self.arrivals = [self._arrival() for _ in range(ARRIVALS)]
        if proposals is not None:  # hits may change an answer, but most will be what it is without
            cold = serve(llm, {f"{seed}.cold.{n}": prompt for n, (_, prompt, _) in enumerate(self.arrivals)})
            proposals.truth = [[*out.prompt_token_ids, *answer(out)] for out in cold.values()]
            assert self.scheduler.reset_prefix_cache()
        self.pins = [self._add(document, [*document, 20], 400) for document in self.documents]

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(300, VOCAB) for _ in range(count)]

    def _add(self, document: list[int], prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        key = f"{self.seed}.{self.count}"
        self.count += 1
        self.prompts[key] = (document, prompt)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.engine.add_request(key, {"prompt_token_ids": prompt}, params)
        return key

    def _arrival(self) -> tuple[list[int], list[int], int]:
        """A document, a prompt that begins like it, and how long the answer is to be."""
        document = self.rng.choice(self.documents)
        prompt = document[: self.rng.randrange(DOCUMENT + 1)] + self._ids(self.rng.randrange(1, 40))
        return document, prompt, self.rng.randrange(1, TOKENS)

    def run(self) -> None:
        """Until all that arrived have ended, but for the two that hold the documents."""
        drafts = 2 * self.scheduler.num_spec_tokens  # of the requests that hold the documents
        budget = self.scheduler.max_num_scheduled_tokens = self.rng.choice([16, 33, 100]) + drafts
        cost = self.rng.choice(COSTS)
        self.scheduler.replay_cost = lambda: cost
        for _ in range(2 * (DOCUMENT + 1) // budget + 2):
            self._step()
        while self.arrivals or len(self.answers) + 2 < len(self.prompts):
            event = self.rng.random()
            if self.arrivals and event < 0.4:
                self._add(*self.arrivals.pop())
            elif event < 0.5:
                self._preempt()
            elif event < 0.54:
                self._abort()
            self._step()
        self.engine.abort_request(self.pins)
        while self.engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = list(output.outputs[0].token_ids)

    def _others(self) -> list[Any]:
        return [r for r in self.scheduler.running if r.request_id.rsplit("-", 1)[0] not in self.pins]

    def _preempt(self) -> None:
        if others := self._others():
            request = self.rng.choice(others)
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, time.monotonic())
            self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            self.preempted += 1

    def _abort(self) -> None:
        alive = [key for key in self.prompts if key not in self.answers and key not in self.pins]
        if alive:
            key = self.rng.choice(alive)
            self.engine.abort_request([key])
            self.prompts.pop(key)

    def verify(self) -> int:
        """How many answers were checked. One that went on with restored windows is not told by the oracle."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block leaked"
        assert not self.scheduler._windows._pinned and not self.scheduler._ledger._entries
        checked = 0
        for key, found in self.answers.items():
            admissions = self.log.admissions[key]
            if key in self.prompts and key not in self.pins and not any(a.restored for a in admissions):
                document, prompt = self.prompts[key]
                check(self.llm, prompt, found, admissions, document)
                checked += 1
                if self.proposals is not None:
                    whole = prompt + found
                    self.drafts += self.proposals.check(
                        self.llm, key, whole, len(prompt), admissions, document
                    )
        return checked


@dataclass(frozen=True)
class Kind:
    """Of an engine: MiB of host memory for windows, and blocks of a drafter."""

    tier: int
    blocks: int


KINDS = {"no host memory": Kind(0, 0), "a drafter and windows in host memory": Kind(1, 2)}
if ASKED:
    KINDS |= {"windows in host memory": Kind(1, 0), "a drafter": Kind(0, 2)}


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    small: Any = {"num_gpu_blocks_override": 150, "max_model_len": 512, "max_num_batched_tokens": 128}
    small["blocks"] = request.param.blocks
    ours = {"window_tier_mib": request.param.tier}
    with engine(tmp_path_factory.mktemp("checkpoint"), deepinfer=ours, **small) as made:
        yield made


def test_random_schedules(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(llm)
    log, forced, checked, drafts = Log(scheduler), 0, 0, 0
    speculates = llm.llm_engine.vllm_config.speculative_config is not None
    proposals = Proposals(llm, log, monkeypatch) if speculates else None
    for seed in range(SCHEDULES):
        schedule = Schedule(llm, log, seed, proposals)
        schedule.run()
        checked += schedule.verify()
        forced += schedule.preempted
        drafts += schedule.drafts
        assert scheduler.reset_prefix_cache()
        assert len(scheduler._windows) == 0, "a window stayed pinned"
    starts = [start for starts in log.admissions.values() for start in starts]
    assert any(start.hit for start in starts), "replays were meant to happen"
    assert forced and checked, "preemptions and checked answers were meant to happen"
    counts = scheduler._ledger.counts
    assert counts.replayed_tokens > 0 < counts.trimmed_rows
    assert (counts.restored_windows > 0) == (scheduler._windows._on)
    assert bool(drafts) == speculates
    if speculates and ASKED:
        assert scheduler.judge.counts.positions["accepted", 0] > 0
    print(
        f"{SCHEDULES} schedules, {len(log.admissions)} requests, {checked} checked; {counts}; {drafts} drafts"
    )
