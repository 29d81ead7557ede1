"""The planner on stand-ins for vLLM's requests."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_deepinfer_plugins.scheduler.planner import HOLD, LADDER, LOOK_AHEAD, PROBES, Planner
from vllm_deepinfer_plugins.scheduler.targets import ITL_TARGET_MS, TTFT_TARGET_MS
from vllm_deepinfer_plugins.scheduler.waiting import RankedQueue

from vllm_deepinfer.policy.itl_control import FIRST_MARGIN, ItlControl
from vllm_deepinfer.policy.prefill_budget import PATIENCE
from vllm_deepinfer.policy.prefill_order import Order
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner


def request(name: str, total: int, computed: int = 0, arrival: float = 0.0, **more: Any) -> Any:
    extra = more.pop("extra", None)
    fields = {
        "request_id": name,
        "num_tokens": total,
        "num_tokens_with_spec": total + more.pop("drafts", 0),
        "num_computed_tokens": computed,
        "num_output_placeholders": 0,
        "arrival_time": arrival,
        "priority": 0,
        "status": RequestStatus.WAITING,
        "sampling_params": SimpleNamespace(extra_args=extra),
    }
    return SimpleNamespace(**{**fields, **more})


def decode(name: str, context: int = 1_000, **more: Any) -> Any:
    return request(name, context + 1, context, status=RequestStatus.RUNNING, **more)


def planner(
    known: bool = True, order: Order = Order.SHORTEST, target: float | None = 0.04, **more: Any
) -> Planner:
    learner = StepCostLearner(StepCost(0, 0, tile=32), TWO_CORE_DENSE if known else None)
    given = {"budget": None, "by_priority": False, "most_decode": 1, **more}
    return Planner(learner, ItlControl(), order, target, **given)


def prepare(made: Planner, running: list[Any], waiting: list[Any] = [], most: int = 8_192) -> Any:  # noqa: B006
    """The step, and the whole order that its plan was made from."""
    queue = RankedQueue(made.rank)
    queue.prepend_requests(waiting)
    survey = made._survey(running, made._learner.cost())
    order = list(made._in_order(survey.prefills, ((), queue))) if made._learner.usable else []
    step, considered = made.prepare(running, ((), queue), most)
    assert considered == order[: len(considered)]
    return step, order


def test_decodes_are_charged_first_and_prefills_get_what_is_left() -> None:
    made = planner()
    step, order = prepare(made, [decode("d"), request("p", 9_000, 512, status=RequestStatus.RUNNING)])
    assert step.limit == pytest.approx(0.04 / FIRST_MARGIN) and step.decodes == 1
    assert (step.live.used.decodes, step.live.used.decode_context) == (1, 1_000)
    assert [p.key for p in order] == ["p"] and (step.plan["p"] + 1) % 32 == 0
    step.charge("p", 512, step.plan["p"])
    assert 0.8 * step.limit < step.live.predicted <= step.limit


def test_without_decodes_there_is_nobody_to_protect() -> None:
    step, _ = prepare(planner(), [], [request("p", 9_000)])
    assert step.limit == math.inf and step.plan == {"p": 8_192}


def test_the_cap_keeps_room_for_every_decode_wherever_it_stands_in_the_list() -> None:
    running = [request("p", 9_000, 32, status=RequestStatus.RUNNING), *[decode(str(i)) for i in range(60)]]
    step, _ = prepare(planner(target=10.0), running, most=100)
    assert step.plan == {"p": 40}


def test_a_short_waiting_prompt_goes_before_a_long_running_one() -> None:
    long = request("long", 20_000, 1_024, arrival=0.0, status=RequestStatus.RUNNING)
    made = planner()
    step, order = prepare(made, [decode("d"), long], [request("short", 200, arrival=1.0)])
    assert [p.key for p in order] == ["short", "long"]
    assert step.running("long", 10_000) == step.plan["long"]
    assert step.plan["short"] == 200
    step.charge("long", 1_024, step.plan["long"])
    assert step.waiting("short", 0, 200) == 200  # its share was kept for it


def test_first_come_first_served_keeps_it_waiting() -> None:
    long = request("long", 20_000, 1_024, arrival=0.0, status=RequestStatus.RUNNING)
    waiting = [request("short", 200, arrival=1.0)]
    step, _ = prepare(planner(order=Order.FCFS), [decode("d"), long], waiting)
    assert "short" not in step.plan and step.plan["long"] > 0


def test_what_vllm_could_not_admit_is_not_reserved_for_a_while() -> None:
    made = planner()
    long = request("long", 20_000, 1_024, status=RequestStatus.RUNNING)
    running, waiting = [decode("d"), long], [request("short", 300, arrival=1.0)]
    step, order = prepare(made, running, waiting)
    step.charge("long", 1_024, step.plan["long"])
    made.settle(step, order, {"d", "long"}.__contains__)
    reserved = []
    for _ in range(HOLD + 1):
        step, order = prepare(made, running, waiting)
        reserved.append("short" in step.plan)
        step.charge("long", 1_024, step.plan["long"])
        made.settle(step, order, {"d", "long"}.__contains__)
    assert reserved == [False] * HOLD + [True]


def test_a_waiting_prompt_whose_prefix_is_cached_counts_what_is_left_of_it() -> None:
    made = planner()
    hit, other = request("hit", 5_000, arrival=0.1), request("other", 1_000)
    made.expect(hit, 4_960)
    _, order = prepare(made, [decode("d")], [other, hit])
    assert [(p.key, p.context, p.remaining) for p in order] == [("hit", 4_960, 40), ("other", 0, 1_000)]
    made.forget("hit")
    assert made.rank(hit) > made.rank(other)


def test_one_token_is_left_of_a_prompt_that_is_cached_whole() -> None:
    made = planner()
    whole = request("whole", 64)
    made.expect(whole, 64)
    _, [prefill] = prepare(made, [decode("d")], [whole])
    assert (prefill.context, prefill.remaining) == (63, 1)


def test_a_request_that_owes_tokens_goes_first_and_blocked_ones_are_passed_over() -> None:
    waiting = [
        request("blocked", 10, status=RequestStatus.WAITING_FOR_REMOTE_KVS),
        request("new", 10),
        request("owes", 9_000, status=RequestStatus.PREEMPTED),
    ]
    _, order = prepare(planner(), [decode("d")], waiting)
    assert [p.key for p in order] == ["owes", "new"]


def test_a_plan_looks_at_the_front_of_a_long_queue_only() -> None:
    _, order = prepare(planner(), [decode("d")], [request(str(i), 50) for i in range(1_000)])
    assert len(order) == LOOK_AHEAD


def test_requests_with_loaded_kv_are_planned_too() -> None:
    made = planner()
    loaded = request("loaded", 2_000, 1_984)
    queue = RankedQueue(made.rank)
    queue.add_request(request("new", 5_000))
    _, order = made.prepare([decode("d")], ([loaded], queue), 8_192)
    assert [(p.key, p.remaining) for p in order] == [("loaded", 16), ("new", 5_000)]
    _, order = made.prepare([decode("d")], ([], queue), 8_192)
    assert [p.key for p in order] == ["new"]


def test_the_tightest_running_itl_target_sets_the_budget() -> None:
    made = planner()
    hurried = decode("h", extra={ITL_TARGET_MS: 20})
    made.expect(hurried, 0)
    step, _ = prepare(made, [decode("d"), hurried], [request("p", 9_000)])
    assert step.limit == pytest.approx(0.02 / FIRST_MARGIN)
    made.forget("h")
    step, _ = prepare(made, [decode("d")], [request("p", 9_000)])
    assert step.limit == pytest.approx(0.04 / FIRST_MARGIN)


def test_a_looser_target_of_its_own_changes_nothing() -> None:
    made = planner()
    relaxed = decode("r", extra={ITL_TARGET_MS: 400})
    made.expect(relaxed, 0)
    assert prepare(made, [relaxed], [request("p", 9_000)])[0].limit == pytest.approx(0.04 / FIRST_MARGIN)


def test_a_fixed_budget_is_taken_as_it_is_unless_a_request_wants_less() -> None:
    made = planner(target=None, budget=0.03)
    assert prepare(made, [decode("d")])[0].limit == 0.03
    hurried = decode("h", extra={ITL_TARGET_MS: 20})
    made.expect(hurried, 0)
    assert prepare(made, [decode("d"), hurried])[0].limit == pytest.approx(0.02 / FIRST_MARGIN)


def test_a_ttft_target_moves_a_prefill_forward() -> None:
    made = planner()
    hurried = request("h", 20_000, arrival=1.0, extra={TTFT_TARGET_MS: 100})
    made.expect(hurried, 0)
    _, order = prepare(made, [decode("d")], [request("a", 400, arrival=0.0), hurried])
    assert [p.key for p in order] == ["h", "a"]


def test_ignored_targets_are_counted() -> None:
    made = planner()
    made.expect(request("x", 10, extra={ITL_TARGET_MS: -1, TTFT_TARGET_MS: "soon"}), 0)
    assert made.ignored_targets == 2


@pytest.mark.parametrize("order", list(Order))
def test_vllm_s_priorities_come_first_where_they_are_on(order: Order) -> None:
    made = planner(order=order, by_priority=True)
    late, early = request("late", 5_000, arrival=9.0, priority=0), request("early", 10, priority=1)
    assert min((late, early), key=made.rank) is late


def test_drafts_are_part_of_a_decode() -> None:
    made = planner(most_decode=4)
    step, order = prepare(made, [decode("d", drafts=3)], [request("p", 9_000)])
    assert (step.decodes, step.live.used.tokens) == (1, 3)
    assert step.live.used.attended == 3 * 1_000 + 4.5
    assert [p.key for p in order] == ["p"]


def test_when_decodes_leave_no_room_every_eighth_step_is_forced() -> None:
    made = planner(target=0.001)
    forced = []
    for _ in range(3 * PATIENCE):
        step, order = prepare(made, [decode("d")], [request("p", 9_000)])
        tokens = step.waiting("p", 0, 9_000)
        step.charge("p", 0, tokens)
        made.settle(step, order, ({"d", "p"} if tokens else {"d"}).__contains__)
        forced.append(tokens)
    assert forced == ([0] * (PATIENCE - 1) + [32]) * 3
    assert made.patience.forced == 3


def test_until_there_is_a_model_chunks_take_a_few_sizes_and_then_are_vllm_s_own() -> None:
    made = planner(known=False)
    sizes = []
    for _ in range(PROBES + 3):
        step, order = prepare(made, [decode("d")], [request("p", 90_000)])
        tokens = step.waiting("p", 0, 8_000)
        step.charge("p", 0, tokens)
        made.settle(step, order, bool)
        sizes.append(tokens)
    assert sizes[: len(LADDER)] == [32 * tiles for tiles in LADDER]
    assert sizes[PROBES:] == [8_000] * 3
    assert step.limit == math.inf and order == []


def test_without_a_model_the_queue_is_first_come_first_served() -> None:
    made = planner(known=False)
    assert made.rank(request("long", 9_000, arrival=0.0)) < made.rank(request("short", 9, arrival=1.0))


def test_drafts_may_take_what_decodes_may() -> None:
    made = planner(target=None, budget=0.03)
    assert made.decodes_limit() == 0.03 and made.prefill_weight() == 1.0
    made.expect(request("h", 10, extra={ITL_TARGET_MS: 20}), 0)
    assert made.decodes_limit() == pytest.approx(0.02 / FIRST_MARGIN), "also before it decodes"
    made.forget("h")
    assert made.decodes_limit() == 0.03


def test_drafts_give_way_to_a_prompt_that_gets_nothing() -> None:
    """Its time is worth more with every such step; in the eighth they leave room for one tile of it."""
    made = planner(target=0.001)
    limits, weights = [], []
    for _ in range(PATIENCE + 1):
        limits.append(made.decodes_limit())
        weights.append(made.prefill_weight())
        step, order = prepare(made, [decode("d")], [request("p", 9_000)])
        tokens = step.waiting("p", 0, 9_000)
        step.charge("p", 0, tokens)
        made.settle(step, order, ({"d", "p"} if tokens else {"d"}).__contains__)
    tile = 32 * TWO_CORE_DENSE.per_token
    assert limits[: PATIENCE - 1] == [limits[0]] * (PATIENCE - 1)
    assert limits[PATIENCE - 1] == pytest.approx(limits[0] - tile) and limits[PATIENCE] == limits[0]
    assert weights == [1.0 + n for n in range(PATIENCE)] + [1.0]
