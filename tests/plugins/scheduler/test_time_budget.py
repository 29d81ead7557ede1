"""The scheduler in real engines: stock's tokens, within the budget, whatever else vLLM is doing."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.scheduler.harness import TARGET_MS, Arrival, Served, serve, tiny, traffic, use_model_clock
from vllm_deepinfer.errors import UserError

pytestmark = pytest.mark.slow

OURS = {"itl_target_ms": TARGET_MS}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny(tmp_path_factory.mktemp("models")) as made:
        yield made


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def stock(llm: Any, arrivals: list[Arrival], **settings: Any) -> Served:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    swap(core(llm), Scheduler, **settings)
    return serve(llm, arrivals)


def ours(
    llm: Any, arrivals: list[Arrival], deepinfer: dict[str, Any] = OURS, known: bool = True, **settings: Any
) -> Served:
    from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    with tempfile.TemporaryDirectory() as folder:
        given = {"step_cost_file": f"{folder}/fit.json", **deepinfer}
        use_model_clock(swap(core(llm), TimeBudgetScheduler, deepinfer=given, **settings), known=known)
        return serve(llm, arrivals)


def within_budget(served: Served) -> None:
    """Every step that decodes keeps its budget, as predicted and, with this clock, as measured."""
    limited = [r for r in served.records if r.decodes and r.chunks]
    assert len(limited) > 10
    assert all(r.predicted <= r.budget * (1 + 1e-9) for r in limited)


@pytest.mark.parametrize("seed", range(3))
def test_the_answers_are_stock_s_and_the_steps_are_not(llm: Any, seed: int) -> None:
    arrivals = traffic(seed)
    expected, found = stock(llm, arrivals), ours(llm, arrivals)
    assert found.answers == expected.answers
    assert found.steps != expected.steps
    assert max(sum(step.values()) for step in expected.steps) > 300
    within_budget(found)


def test_decodes_are_in_every_step_and_a_long_prompt_does_not_hold_them_up(llm: Any) -> None:
    decodes = [Arrival(0, [30 + i] * 5, 60) for i in range(4)]
    found = ours(llm, [*decodes, Arrival(5, list(range(20, 270)) * 2, 2)])
    while_prefilling = [s for s in found.steps if "4" in s and s["4"] > 1]
    assert len(while_prefilling) >= 5
    assert all(s[str(i)] == 1 for s in while_prefilling for i in range(4))
    assert all((s["4"] + 4) % 32 == 0 for s in while_prefilling[:-1])
    sizes = [s["4"] for s in while_prefilling]
    assert sizes[0] >= sizes[-2]  # the same time buys less at a longer context
    within_budget(found)


def test_a_short_prompt_passes_a_long_one(llm: Any) -> None:
    decode = Arrival(0, [40] * 5, 80)
    long, short = Arrival(4, [50] * 480, 1), Arrival(5, [60] * 120, 1)
    found = ours(llm, [decode, long, short])
    assert found.first[2] < found.first[1]
    fcfs = ours(llm, [decode, long, short], {**OURS, "prefill_order": "fcfs"})
    assert fcfs.first[2] >= fcfs.first[1]
    assert found.answers == fcfs.answers


def test_a_request_s_own_itl_target_shrinks_the_steps_that_it_is_in(llm: Any) -> None:
    hurried = Arrival(0, [40] * 5, 40, {"extra_args": {"deepinfer_itl_target_ms": 6}})
    usual = replace(hurried, extra={})
    prompt = Arrival(4, [50] * 480, 1)
    small = [r.budget for r in ours(llm, [hurried, prompt]).records if r.decodes and r.chunks]
    large = [r.budget for r in ours(llm, [usual, prompt]).records if r.decodes and r.chunks]
    assert max(small) <= 0.006 < 0.008 < min(large) <= max(large) <= 0.0125


def test_a_request_s_ttft_target_lets_it_pass(llm: Any) -> None:
    decode, short = Arrival(0, [40] * 5, 80), Arrival(4, [60] * 200, 1)
    long = Arrival(5, [50] * 480, 1, {"extra_args": {"deepinfer_ttft_target_ms": 1}})
    found = ours(llm, [decode, short, long])
    assert found.first[2] < found.first[1]


def test_targets_that_are_none_are_ignored(llm: Any) -> None:
    arrivals = traffic(3, count=6)
    odd = [replace(a, extra={"extra_args": {"deepinfer_itl_target_ms": "soon"}}) for a in arrivals]
    assert ours(llm, odd).answers == ours(llm, arrivals).answers
    assert core(llm).scheduler._planner.ignored_targets == 0
    ours(llm, odd)
    assert core(llm).scheduler._planner.ignored_targets == 6


def test_decodes_that_leave_no_room_do_not_starve_a_prompt(llm: Any) -> None:
    """Bug class 32b: the budget is below what the decodes take alone."""
    decodes = [Arrival(0, [30 + i] * 5, 200) for i in range(8)]
    found = ours(llm, [*decodes, Arrival(5, [50] * 200, 1)], {"step_budget_ms": 1.0})
    assert found.first[8] - 5 <= 8 * (200 // 32 + 1)
    assert core(llm).scheduler._planner.patience.forced > 0


def test_with_the_prefix_cache(llm: Any) -> None:
    rng = random.Random(5)
    shared = [rng.randrange(20, 270) for _ in range(256)]
    arrivals = [replace(a, prompt=shared + a.prompt[:150]) for a in traffic(7, count=12)]
    expected, found = stock(llm, arrivals), ours(llm, arrivals)
    assert found.answers == expected.answers
    assert found.cached >= 5 * 256 and expected.cached >= 5 * 256
    within_budget(found)


def test_with_priorities(llm: Any) -> None:
    arrivals = [replace(a, priority=n % 3) for n, a in enumerate(traffic(11, spacing=1))]
    settings: dict[str, Any] = {"policy": "priority"}
    expected, found = stock(llm, arrivals, **settings), ours(llm, arrivals, **settings)
    assert found.answers == expected.answers
    late = [Arrival(0, [40] * 5, 90), *[Arrival(3, [50 + i] * 300, 1, priority=1) for i in range(3)]]
    urgent = Arrival(5, [70] * 480, 1, priority=0)
    served = ours(llm, [*late, urgent], **settings)
    assert served.first[4] < min(served.first[i] for i in (2, 3))


def test_max_num_batched_tokens_stays_a_hard_cap(llm: Any) -> None:
    arrivals = traffic(13, count=10)
    found = ours(llm, arrivals, {"itl_target_ms": 1e6}, chunk=96)
    assert max(sum(step.values()) for step in found.steps) <= 96
    assert found.answers == stock(llm, arrivals, chunk=96).answers


def test_it_learns_from_nothing_and_answers_the_same_meanwhile(llm: Any) -> None:
    arrivals = traffic(17, count=40, spacing=2)
    found = ours(llm, arrivals, known=False)
    learner = core(llm).scheduler._learner
    assert learner.usable and learner.refits >= 1
    assert learner.error is not None and learner.error.median < 0.05  # the clock is exact
    assert found.records[0].predicted == 0.0 and found.records[-1].predicted > 0.0
    assert found.answers == stock(llm, arrivals).answers


def test_the_fit_is_saved_and_taken_again(llm: Any, tmp_path: Path) -> None:
    said = {**OURS, "step_cost_file": str(tmp_path / "fit.json")}
    ours(llm, traffic(19, count=40, spacing=2), said, known=False)
    first = core(llm).scheduler
    first._keeper.offer(first._learner, float("inf"))
    assert (tmp_path / "fit.json").exists()
    from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    again = swap(core(llm), TimeBudgetScheduler, deepinfer=said)
    assert again._learner.usable and again._learner.refits == 0
    with pytest.raises(UserError, match="below one decode step of this model"):
        swap(core(llm), TimeBudgetScheduler, deepinfer={**said, "itl_target_ms": 0.01})


def test_reports_reach_vllm_s_stats(llm: Any) -> None:
    from vllm_deepinfer_plugins.scheduler.report import StepReport

    ours(llm, [])
    scheduler, seen = core(llm).scheduler, []
    make = scheduler.make_stats

    def made(*args: Any, **kwargs: Any) -> Any:
        stats = make(*args, **kwargs)
        if stats is not None and (report := StepReport.take_from(stats)):
            seen.append(report)
        return stats

    scheduler.make_stats = made
    served = serve(llm, traffic(23, count=8))
    assert len(seen) == len(served.steps)
    assert [sum(r.chunks) + r.decodes for r in seen] == [sum(s.values()) for s in served.steps]
    assert all(abs(r.actual - r.predicted) <= 1 for r in seen if r.predicted)  # microseconds


@pytest.mark.parametrize(
    ("deepinfer", "message"),
    [
        ({}, 'needs additional_config["deepinfer"]["itl_target_ms"]'),
        ({"itl_target_ms": 0}, "itl_target_ms"),
        ({"itl_target": 40}, "did you mean itl_target_ms"),
        ({"itl_target_ms": 40, "step_budget_ms": 40}, "give one of the two"),
    ],
)
def test_settings_that_cannot_work(llm: Any, deepinfer: dict[str, Any], message: str) -> None:
    from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    with pytest.raises(UserError, match=re.escape(message)):
        swap(core(llm), TimeBudgetScheduler, deepinfer=deepinfer)


def test_the_wrong_class_is_refused(llm: Any) -> None:
    """A CPU schedules synchronously."""
    from vllm_deepinfer_plugins.scheduler import AsyncTimeBudgetScheduler, TimeBudgetScheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    with pytest.raises(UserError, match=r"say --scheduler-cls .*\.TimeBudgetScheduler$"):
        swap(core(llm), AsyncTimeBudgetScheduler, deepinfer=OURS)
    with pytest.raises(UserError, match=r"say --scheduler-cls .*\.AsyncTimeBudgetScheduler$"):
        swap(core(llm), TimeBudgetScheduler, deepinfer=OURS, async_scheduling=True)
