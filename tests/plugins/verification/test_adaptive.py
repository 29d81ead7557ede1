"""The mixin on a stand-in for vLLM's scheduler: what it drops, times and counts, step by step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.draft.drafted import Drafted
from vllm_deepinfer_plugins.draft.settle import PROPOSER
from vllm_deepinfer_plugins.verification.adaptive import AdaptiveVerification
from vllm_deepinfer_plugins.verification.counts import VerificationCounts

from vllm_deepinfer.policy.step_cost import Features, StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner
from vllm_deepinfer.policy.verification_pause import Pause, PauseRule

DRAFTS = 3
DEAR = StepCost(per_step=10e-3, per_token=2e-3, per_decode=2e-3)


class Scheduler:
    """Schedules all that runs: a decode with its drafts, a prompt to its end."""

    num_spec_tokens = DRAFTS
    max_num_running_reqs = 8
    max_num_scheduled_tokens = 100

    def __init__(self, *_: Any) -> None:
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.freed: list[str] = []

    def schedule(self, throttle_prefills: bool = False) -> Any:
        counts, drafts = {}, {}
        for request in self.running:
            key, drafted = request.request_id, request.spec_token_ids
            counts[key] = request.num_tokens - request.num_computed_tokens + len(drafted)
            if drafted:
                drafts[key] = drafted
            request.num_computed_tokens += counts[key]
            request.spec_token_ids = []
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens=drafts,
            num_spec_tokens_to_schedule=DRAFTS,
        )

    def update_draft_token_ids(self, drafts: Any) -> None:
        for key, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[key].spec_token_ids = list(tokens)

    def update_from_output(self, output: Any, result: Any) -> Any:
        for key, tokens in zip(result.req_id_to_index, result.sampled_token_ids, strict=True):
            request = self.requests[key]
            request.num_tokens += len(tokens)
            request.num_computed_tokens = request.num_tokens - 1
        return {}

    def make_stats(self) -> Any:
        return SimpleNamespace(num_kv_fetch_reqs_by_stage={})

    def _free_request(self, request: Any) -> None:
        self.freed.append(request.request_id)


class Verifying(AdaptiveVerification, Scheduler):
    """The two together, with a clock that steps 20 ms between its readings."""

    def __init__(self, proposer: str = "a.P", **deepinfer: Any) -> None:
        text = SimpleNamespace(index_topk=None)
        config = SimpleNamespace(
            additional_config={"deepinfer": deepinfer},
            model_config=SimpleNamespace(hf_text_config=text, model="/m"),
            speculative_config=SimpleNamespace(method="custom_class", model=proposer),
        )
        super().__init__(config, SimpleNamespace(kv_cache_groups=[]))
        self.seconds, self.tick_s = 0.0, 0.020
        self._clock = self.tick

    def tick(self) -> float:
        self.seconds += self.tick_s
        return self.seconds

    def add(self, key: str, tokens: int, computed: int) -> None:
        request = SimpleNamespace(
            request_id=key, num_tokens=tokens, num_computed_tokens=computed, spec_token_ids=[]
        )
        self.running.append(request)
        self.requests[key] = request

    def draft(self, **confidences: list[float]) -> None:
        lists = [Drafted([7] * len(own), own) for own in confidences.values()]
        self.update_draft_token_ids(SimpleNamespace(req_ids=list(confidences), draft_token_ids=lists))

    def step(self, **sampled: list[int]) -> dict[str, int]:
        """One step; how many drafts of each request were verified."""
        output = self.schedule()
        result = SimpleNamespace(
            sampled_token_ids=list(sampled.values()),
            req_id_to_index={key: row for row, key in enumerate(sampled)},
        )
        self.update_from_output(output, result)
        return {key: len(tokens) for key, tokens in output.scheduled_spec_decode_tokens.items()}


@pytest.fixture
def scheduler() -> Verifying:
    made = Verifying()
    made.add("a", 101, 100)
    made.add("b", 51, 50)
    made._learner = StepCostLearner(DEAR, DEAR)
    return made


def test_drafts_that_are_not_worth_their_time_are_dropped(scheduler: Verifying) -> None:
    for _ in range(4):  # until confidences are old enough
        scheduler.draft(a=[0.99, 0.98, 0.97], b=[0.02, 0.02, 0.02])
        verified = scheduler.step(a=[1], b=[1])
    assert verified == {"a": 3}
    assert scheduler.judge is not None
    totals, positions = scheduler.judge.counts.totals, scheduler.judge.counts.positions
    assert totals["steps:no_history"] == 2 and totals["steps:scheduled"] == 2
    assert positions["drafted", 2] == 8 and positions["verified", 2] == 4 + 2
    assert totals["tokens"] == 4, "two steps with a prediction and two tokens each"
    assert totals["us_actual"] == 40_000


def test_what_was_accepted_is_told(scheduler: Verifying) -> None:
    scheduler.draft(a=[0.9] * 3, b=[0.9] * 3)
    scheduler.step(a=[7, 7, 5], b=[5])
    assert scheduler.judge is not None
    positions = scheduler.judge.counts.positions
    assert positions["verified", 0] == positions["verified", 2] == 2
    assert [positions.get(("accepted", place), 0) for place in range(3)] == [1, 1, 0]


def test_a_request_without_an_output_teaches_nothing(scheduler: Verifying) -> None:
    scheduler.draft(a=[0.9] * 3, b=[0.9] * 3)
    scheduler.step(a=[7], b=[])
    assert scheduler.judge is not None and scheduler.judge.counts.positions["verified", 0] == 1


def test_a_drafter_that_listens_is_told_when_nobody_would_verify() -> None:
    made = Verifying(PROPOSER)
    made.add("a", 101, 100)
    made._learner = StepCostLearner(DEAR, DEAR)
    rule = PauseRule(votes=2, first=5, tries=3, unknown=6)
    assert made.judge is not None and made.judge.pause is not None
    made.judge.pause = Pause(rule)
    learned = made._learner.observe
    wanted: list[bool] = []
    observed: list[float] = []

    def observe(features: Features, seconds: float) -> bool:
        observed.append(seconds)
        return learned(features, seconds)

    made._learner.observe = observe  # type: ignore[method-assign]
    made.tick_s = 0.012  # DEAR's own for one decode
    for _ in range(30):
        output = made.schedule()
        wanted.append(output.num_spec_tokens_to_schedule > 0)
        made.tick_s = 0.012 if wanted[-1] else 0.006
        result = SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"a": 0})
        made.update_from_output(output, result)
        made.draft(a=[0.01] * 3 if wanted[-1] else [])
    assert wanted[: rule.unknown] == [True] * 6 and wanted[6:9] == [False] * 3, "a try"
    paused = wanted.count(False)
    assert paused > 15, "each step without drafts takes half"
    assert len(observed) == 30 - paused, "a cost is learned from steps that draft"
    assert made.judge.counts.totals["paused"] == paused


def test_others_are_not_told() -> None:
    for made in (Verifying(), Verifying(PROPOSER, verification="everything")):
        assert made.judge is None or made.judge.pause is None
        made.add("a", 101, 100)
        for _ in range(40):
            made.draft(a=[0.01] * 3)
            output = made.schedule()
            assert output.num_spec_tokens_to_schedule == DRAFTS
            result = SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"a": 0})
            made.update_from_output(output, result)


def test_everything_is_verified_when_that_was_asked_for() -> None:
    made = Verifying(verification="everything")
    made.add("a", 101, 100)
    made._learner = StepCostLearner(DEAR, DEAR)
    for _ in range(4):
        made.draft(a=[0.01] * 3)
        assert made.step(a=[1]) == {"a": 3}
    assert made.judge is None
    assert made.make_stats().num_kv_fetch_reqs_by_stage == {}


def test_without_speculation_there_is_nothing_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "num_spec_tokens", 0)
    made = Verifying()
    made.add("a", 101, 100)
    assert made.judge is None and made.step(a=[1]) == {}


def test_steps_teach_its_own_cost_and_not_one_that_another_learns(scheduler: Verifying) -> None:
    learned: list[tuple[Features, float]] = []
    scheduler._learner = SimpleNamespace(  # type: ignore[assignment]
        fitted=DEAR, usable=False, observe=lambda features, seconds: learned.append((features, seconds))
    )
    scheduler.add("c", 40, 0)
    scheduler.draft(a=[0.9] * 3)
    scheduler.step(a=[1], b=[1], c=[1])
    [(features, seconds)] = learned
    assert (features.tokens, features.decodes) == (40 + 3, 2) and seconds == pytest.approx(0.020)
    assert features.decode_context == 150
    scheduler._own_costs = False
    scheduler.step(a=[1], b=[1])
    assert len(learned) == 1


def test_a_step_with_prefill_says_nothing_about_rounds(scheduler: Verifying) -> None:
    for _ in range(3):
        scheduler.draft(a=[0.9] * 3, b=[0.9] * 3)
        scheduler.step(a=[1], b=[1])
    assert scheduler.judge is not None
    before = scheduler.judge.counts.totals.get("us_actual", 0)
    scheduler.add("c", 40, 0)
    scheduler.draft(a=[0.9] * 3, b=[0.9] * 3)
    scheduler.step(a=[1], b=[1], c=[1])
    assert scheduler.judge.counts.totals.get("us_actual", 0) == before


def test_what_shares_the_step_is_counted(scheduler: Verifying) -> None:
    scheduler.add("c", 60, 20)
    scheduler.waiting = [SimpleNamespace(num_tokens=25), SimpleNamespace(num_tokens=1000)]
    scheduler.requests["a"].spec_token_ids = [1, 2]
    others = scheduler._others([scheduler.requests["a"]])
    assert others == Features(tokens=100 - 2, decodes=1, decode_context=50), "capped by what a step may hold"
    scheduler._own_costs = False  # a time budget: prefill gets what drafts leave
    assert scheduler._others([scheduler.requests["a"]]) == Features(decodes=1, decode_context=50)
    scheduler._own_costs = True
    scheduler.waiting = []
    assert scheduler._others([scheduler.requests["a"]]).tokens == 40
    scheduler.max_num_running_reqs = 3
    scheduler.waiting = [SimpleNamespace(num_tokens=5)]
    assert scheduler._others([scheduler.requests["a"]]).tokens == 40, "nobody waiting can join"


@pytest.mark.parametrize(("drafts", "verified"), [(6, 6), (4, 4), (0, 0)])
def test_a_budget_that_another_sets_is_kept(scheduler: Verifying, drafts: int, verified: int) -> None:
    """A step may take as long as one with so many drafts; what rows cost beyond that is not learned here."""
    assert scheduler.verification_limit() == math.inf
    limit = 1.0001 * DEAR.seconds(Features(tokens=drafts, decodes=2))
    scheduler._planner = SimpleNamespace(  # type: ignore[attr-defined]
        decodes_limit=lambda: limit, prefill_weight=lambda: 1.0
    )
    scheduler._clock = lambda: 0.0
    for _ in range(4):
        scheduler.draft(a=[0.99] * 3, b=[0.98] * 3)
        found = scheduler.step(a=[1], b=[1])
    assert sum(found.values()) == verified


def test_drafts_give_way_to_prefill_that_is_worth_more(scheduler: Verifying) -> None:
    """Two decodes take 14 ms, a draft 2: λ is 4.42 / 20 ms, and a draft pays from w · 0.44 tokens on."""
    weight = [1.0]
    scheduler._planner = SimpleNamespace(  # type: ignore[attr-defined]
        decodes_limit=lambda: 1.0, prefill_weight=lambda: weight[0]
    )
    scheduler._clock = lambda: 0.0
    scheduler._own_costs = False
    found = []
    for value in (1.0, 1.0, 1.0, 1.0, 1.5, 3.0, 1.0):
        weight[0] = value
        scheduler.draft(a=[0.95, 0.6, 0.6], b=[0.9, 0.4, 0.1])
        found.append(sum(scheduler.step(a=[1], b=[1]).values()))
    assert found == [6, 6, 3, 3, 2, 0, 3], "two steps have no confidences that are old enough"


def test_counts_come_with_the_stats_and_ended_requests_are_forgotten(scheduler: Verifying) -> None:
    scheduler.draft(a=[0.9] * 3, b=[0.9] * 3)
    scheduler.step(a=[1], b=[1])
    counts = VerificationCounts.take_from(scheduler.make_stats())
    assert counts is not None and counts.positions["drafted", 0] == 2
    assert scheduler.judge is not None and set(scheduler.judge._raw) == {"a", "b"}
    scheduler._free_request(scheduler.requests["a"])
    assert scheduler.freed == ["a"] and set(scheduler.judge._raw) == {"b"}
