"""One small engine: the target writes what is known, and every setting verifies what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_deepinfer_plugins.bench.verification.driver import Driver
from vllm_deepinfer_plugins.bench.verification.plan import (
    ADAPTIVE,
    DRAFTS,
    NO_REPLAY,
    OFF,
    SCRIPTED,
    TOO_SURE,
    UNSURE,
    engine,
)
from vllm_deepinfer_plugins.bench.verification.script import Confidences, Scripts, said
from vllm_deepinfer_plugins.bench.verification.scripted import prompt_of
from vllm_deepinfer_plugins.bench.verification.successor import write_successor
from vllm_deepinfer_plugins.bench.verification.traffic import numbered
from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler
from vllm_deepinfer_plugins.scheduler.bench.swap import swap
from vllm_deepinfer_plugins.verification.calibrate.run import Traffic, recorded
from vllm_deepinfer_plugins.verification.judge import Judge

from tests.plugins.model import engines
from tests.plugins.scheduler.harness import TARGET_MS, Arrival, serve, use_model_clock
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

pytestmark = pytest.mark.slow

VOCAB = 1024
MODEL = TinyOptions(
    ratios=(0, 2, 2, 1),
    kv_sources=(1, 3),
    index_sources=(1, 3),
    candidate_source=3,
    engram_layers=(1,),
    vocab=VOCAB,
    context_length=1024,
    encoding="bf16",
)
DEAR = StepCost(per_step=5e-3, per_token=1e-3, per_decode=1e-3)
SCRIPTS = Scripts.of("mixed", 4, seed=1)
PROMPTS = numbered(4, VOCAB, seed=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = write_successor(tmp_path_factory.mktemp("successor") / "model", MODEL)
    with engines.engine(path, **engine(SCRIPTED, concurrency=6), num_gpu_blocks_override=64) as made:
        yield made


@pytest.fixture
def driver(llm: Any) -> Driver:
    return Driver(llm.llm_engine)


def measure(driver: Driver, setting: str, steps: int = 12, **more: Any) -> Any:
    return driver.measure(setting, PROMPTS, scripts=SCRIPTS, outputs=900, steps=steps, trace=True, **more)


def test_the_target_writes_the_next_id_whatever_is_drafted(llm: Any, driver: Driver) -> None:
    driver.minds.put_in("fixed 5")
    driver.minds.proposer.scripts = SCRIPTS
    wanted = [[512 + (p[-1] - 512 + k) % (VOCAB - 512) for k in range(1, 31)] for p in PROMPTS]
    assert engines.greedy(llm, PROMPTS, 30) == wanted
    driver.minds.put_in(OFF)
    assert engines.greedy(llm, PROMPTS, 30) == wanted


def test_settings_verify_what_they_say_and_the_script_is_kept(driver: Driver) -> None:
    """Tokens are as many as the script has of right drafts in a row, and one of the target's."""
    off = measure(driver, OFF)
    assert off.drafts == 0 and off.tokens == off.steps * 4 == off.expected
    for drafts in (1, 3, 5):
        seen = measure(driver, f"fixed {drafts}", steps=16)
        assert {tuple(lengths) for _, lengths in seen.trace} == {(drafts,) * 4}
        assert (
            seen.tokens == pytest.approx(seen.expected, rel=0.25) and seen.expected > off.expected / 12 * 16
        )
        assert seen.rate == seen.expected / seen.seconds
    pinned = measure(driver, "pinned 6")
    assert {tuple(lengths) for _, lengths in pinned.trace} == {(2, 2, 1, 1)}


def test_adaptive_verifies_less_of_what_is_hard(driver: Driver) -> None:
    """Requests of mixed traffic take turns: the first and third are easy."""
    # Known from the start, so that it does not hang on how steady this machine is.
    driver.minds._known[ADAPTIVE] = (Judge(DRAFTS), StepCostLearner(DEAR, DEAR))
    measure(driver, ADAPTIVE, steps=16)
    seen = measure(driver, ADAPTIVE, steps=24)
    judge, learner = driver.minds._known[ADAPTIVE]
    assert judge.counts.totals["steps:scheduled"] > 0
    means = np.mean([lengths for _, lengths in seen.trace], axis=0)
    assert means.max() <= DRAFTS and means[[0, 2]].sum() >= means[[1, 3]].sum()
    measure(driver, OFF)
    measure(driver, ADAPTIVE, steps=2)
    assert driver.minds._known[ADAPTIVE] == (judge, learner), "what it has learned stays with it"
    for setting in (TOO_SURE, UNSURE):
        assert measure(driver, setting).steps == 12
    assert set(driver.minds._known) == {ADAPTIVE, TOO_SURE, UNSURE}


def test_without_a_script_a_slice_ends_with_its_answers(driver: Driver) -> None:
    measure(driver, OFF)
    driver.minds.proposer.scripts = None
    seen = driver.measure("fixed 5", PROMPTS, outputs=10)
    assert seen.expected == 0.0 and seen.tokens == 4 * 10 - 4, "the first ones come with the prefill"
    two = driver.measure(OFF, PROMPTS, outputs=10, at_once=2)
    assert two.tokens == 4 * 10 - 4 and two.steps == 18, "two at a time, twice"


def test_what_is_recorded_is_what_the_script_says(driver: Driver) -> None:
    seen = measure(driver, "record", confidences=Confidences.TOO_SURE)
    recorder = driver.minds.recorder
    assert recorder is not None
    keys, records = recorder.records()
    assert len(set(keys)) == 4 and len(keys) >= 4 * seen.steps
    assert (records.verified == DRAFTS).all() and records.accepted.sum() > 0
    first = said(SCRIPTS.chances(np.arange(4), np.array([17] * 4), DRAFTS), Confidences.TOO_SURE)
    assert first is not None
    order = [keys.index(key) for key in dict.fromkeys(keys)]
    np.testing.assert_allclose(records.confidences[order], first, rtol=1e-6)


def test_calibrate_answers_prompts_and_refuses_a_drafter_that_says_nothing(llm: Any, driver: Driver) -> None:
    driver.minds.put_in("record")
    driver.minds.proposer.scripts = SCRIPTS
    done: list[int] = []
    found = recorded(llm.llm_engine, Traffic(PROMPTS, tokens=12, temperature=0.0, concurrency=2), done.append)
    assert done[-1] == 4 and len(set(found.keys)) == 4
    assert found.target.startswith("sha256:") and found.drafter.endswith("ScriptedProposer")
    driver.minds.proposer.confidences = Confidences.ABSENT
    with pytest.raises(UserError, match="ScriptedProposer gives no confidences"):
        recorded(llm.llm_engine, Traffic(PROMPTS, tokens=6), done.append)
    driver.minds.proposer.drafting = False
    with pytest.raises(UserError, match="No draft was verified"):
        recorded(llm.llm_engine, Traffic(PROMPTS, tokens=6), done.append)


def test_drafts_and_prefill_share_the_budget_of_a_step(llm: Any, driver: Driver, tmp_path: Path) -> None:
    """Three requests decode when longer prompts come. Time passes as a cost model says."""
    driver.minds.put_in(ADAPTIVE)
    driver.minds.proposer.scripts = Scripts.of("mixed", 6, seed=5)
    given = {**NO_REPLAY, "itl_target_ms": TARGET_MS, "step_cost_file": str(tmp_path / "fit.json")}
    made = swap(llm.llm_engine.engine_core.engine_core, TimeBudgetScheduler, deepinfer=given)
    use_model_clock(made)
    arrivals = [
        Arrival(6 * max(n - 2, 0), prompt_of(n, [600] * (14 if n < 3 else 220)), tokens=40) for n in range(6)
    ]
    served = serve(llm, arrivals)
    assert served.answers == [[(601 + k) for k in range(40)]] * 6
    limited = [record for record in served.records if record.decodes and record.chunks]
    assert len(limited) >= 4
    assert all(record.predicted <= record.budget * (1 + 1e-9) for record in limited)
    assert any(record.features.tokens > sum(record.chunks) for record in limited), "no drafts beside chunks"
    counts = made.judge.counts
    assert counts.totals["steps:scheduled"] > 0
    assert 0 < counts.positions["verified", 4] < counts.positions["drafted", 4]
