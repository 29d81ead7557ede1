"""The drafter beside both replays in an engine: answers and drafts are those of the rule by the letter.

The rule knows nothing of speculation: an answer that follows it is the one without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_deepinfer_plugins.draft.worker import DraftRunner
from vllm_deepinfer_plugins.verification.scheduler import VerifyingScheduler

from tests.plugins.replay.oracle import ENGINES, Log, check, engine, scheduler_of
from tests.plugins.replay.test_engine import DOCUMENT, WINDOW, answer, ids, serve
from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from .proposals import Proposals

pytestmark = pytest.mark.slow
TOKENS = 12
LENGTHS = (0, 15, 16, 17, 31, 32, 33, 48, 64, 95, 96, 111) if ENGINES else (16, 33, 111)
CASES = [(17, "adaptive"), (64, "everything")]
CASES += [(5, "adaptive"), (1000, "adaptive"), (17, "everything"), (5, "off")] if ENGINES else []


def runner_of(llm: Any) -> Any:
    """The engine's model runner."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(tmp_path_factory.mktemp("checkpoint"), blocks=2, deepinfer={"window_tier_mib": 1}) as made:
        yield made


@pytest.fixture
def log(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """A document in the prefix cache, and nothing in host memory unless a test turns that on."""
    scheduler = scheduler_of(llm)
    assert scheduler.reset_prefix_cache()
    monkeypatch.setattr(scheduler._windows, "_on", False)
    cost = StepCost(per_step=5e-3, per_token=1e-3, per_decode=1e-3)
    monkeypatch.setattr(scheduler, "_learner", StepCostLearner(cost, cost))
    budget, log = scheduler.max_num_scheduled_tokens, Log(scheduler)
    serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
    yield log
    del scheduler.schedule
    scheduler.max_num_scheduled_tokens = budget


@pytest.fixture
def proposals(llm: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals(llm, log, monkeypatch)


def prompts() -> dict[str, list[int]]:
    """Hits of nothing, a window, one more, many blocks, all of the prompt; prompts shorter than the rows."""
    found = {f"at {n}": DOCUMENT[:n] + ids(1 + n % 23, seed=n) for n in LENGTHS}
    return found | {"whole": DOCUMENT, "long": ids(90, seed=2), "short": ids(3, seed=3)}


def verified(llm: Any, log: Log, proposals: Proposals, outputs: dict[str, Any], asked: Any) -> int:
    """How many drafts were compared."""
    checked = 0
    for name, prompt in asked.items():
        whole = prompt + answer(outputs[name])
        check(llm, prompt, answer(outputs[name]), log.admissions[name], DOCUMENT)
        checked += proposals.check(llm, name, whole, len(prompt), log.admissions[name], DOCUMENT)
    return checked


def test_what_runs(llm: Any) -> None:
    runner = runner_of(llm)
    assert isinstance(runner, DraftRunner) and isinstance(scheduler_of(llm), VerifyingScheduler)
    assert scheduler_of(llm).prefix_replay_tokens == WINDOW and runner.truncations.rows == WINDOW + 12
    groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
    replayed = {
        name for group in groups if group.kv_cache_spec.prefix_replay_tokens for name in group.layer_names
    }
    assert replayed == {f"layers.{layer}.attn.window" for layer in range(6)}, "the drafter's are 4 and 5"


@pytest.fixture(scope="module")
def truth(llm: Any) -> dict[str, list[int]]:
    """What the prompts are answered without drafts."""
    scheduler, drafter = scheduler_of(llm), runner_of(llm).drafter
    on, scheduler._windows._on, drafter.drafting = scheduler._windows._on, False, False
    serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
    outputs = serve(llm, prompts(), tokens=TOKENS)
    scheduler._windows._on, drafter.drafting = on, True
    assert scheduler._ledger.counts.trimmed_rows > 0 < scheduler._ledger.counts.replayed_tokens
    return {name: prompt + answer(outputs[name]) for name, prompt in prompts().items()}


@pytest.mark.parametrize(("budget", "verification"), CASES)
def test_hits_of_any_length_in_chunks_and_in_company(
    llm: Any,
    truth: dict[str, list[int]],
    log: Log,
    proposals: Proposals,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    verification: str,
) -> None:
    scheduler, proposals.truth = scheduler_of(llm), list(truth.values())
    scheduler.max_num_scheduled_tokens = budget
    if verification == "everything":
        monkeypatch.setattr(scheduler, "judge", None)
    monkeypatch.setattr(runner_of(llm).drafter, "drafting", verification != "off")
    counts = scheduler._ledger.counts
    replayed, trimmed, drafted = counts.replayed_tokens, counts.trimmed_rows, log.drafted
    outputs = serve(llm, prompts(), tokens=TOKENS)
    assert {name: prompt + answer(outputs[name]) for name, prompt in prompts().items()} == truth
    checked = verified(llm, log, proposals, outputs, prompts())
    hits = {name: log.admissions[name][0].hit for name in prompts()}
    assert hits["at 16"] == 0 and hits["at 33"] == 32 and hits["at 111"] == hits["whole"] == 96
    if verification == "off":
        assert checked == 0 and log.drafted == drafted
    else:
        assert log.drafted > drafted
        assert 2 * len(prompts()) <= checked < 0.7 * TOKENS * len(prompts()), "drafts were to be accepted"
    assert counts.replayed_tokens - replayed == WINDOW * sum(hit > 0 for hit in hits.values())
    assert counts.trimmed_rows > trimmed
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("restores", [False, True], ids=["computed again", "restored"])
def test_a_preempted_request(
    llm: Any, log: Log, proposals: Proposals, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    """In its replay and among its drafts. With its windows back it drafts what it would have drafted."""
    from vllm import SamplingParams

    scheduler, core = scheduler_of(llm), llm.llm_engine
    monkeypatch.setattr(scheduler._windows, "_on", restores)
    scheduler.max_num_scheduled_tokens = 24
    prompt, params = (
        DOCUMENT[:64] + ids(29, seed=4),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    )
    answers: dict[str, list[int]] = {}
    restored = scheduler._ledger.counts.restored_windows
    given: dict[str, list[int]] = {"alone": [], "again": [12, 19]} if restores else {"again": [1, 12, 19]}
    for name, steps in given.items():
        core.add_request(name, {"prompt_token_ids": prompt}, params)
        for step in range(200):
            if step in steps and scheduler.running:
                request = scheduler.running.pop()
                scheduler._preempt_request(request, time.monotonic())
                scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            for output in core.step():
                if output.finished:
                    answers[name] = answer(output)
            if name in answers:
                break
    assert len(log.admissions["again"]) == (3 if restores else 4)
    if not restores:
        check(llm, prompt, answers["again"], log.admissions["again"], DOCUMENT)
        whole = prompt + answers["again"]
        assert proposals.check(llm, "again", whole, len(prompt), log.admissions["again"], DOCUMENT) > 5
        return
    assert scheduler._ledger.counts.restored_windows >= restored + 2
    assert answers["again"] == answers["alone"]
    alone = {each.known: (each.tokens, each.confidences) for each in proposals.made["alone"]}
    again = [each for each in proposals.made["again"] if each.known in alone]
    assert len(again) > 3
    assert all((each.tokens, each.confidences) == alone[each.known] for each in again)


def test_a_turn_behind_a_restored_window(
    llm: Any, log: Log, proposals: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn drafts from restored windows alone: a row that nobody wrote would make it no number."""
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler._windows, "_on", True)
    prompt = ids(55, seed=6)
    whole = prompt + answer(serve(llm, {"turn": prompt}, tokens=26)["turn"])
    before = scheduler._ledger.counts.restored_windows
    turn = whole[:80] + ids(9, seed=5)
    outputs = serve(llm, {"next": turn}, tokens=TOKENS)
    assert scheduler._ledger.counts.restored_windows == before + 1
    assert len(answer(outputs["next"])) == TOKENS and proposals.made["next"]
    assert all(0 < sure < 1 for each in proposals.made["next"] for sure in each.confidences)
