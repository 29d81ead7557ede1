"""What is refused at start-up, in one sentence each."""

from __future__ import annotations

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.step_cost import Features, StepCost

from ..settings import Settings

HERE = 'additional_config["deepinfer"]'
PACKAGE = "vllm_deepinfer_plugins.scheduler"


def check_class(schedules_ahead: bool, async_scheduling: bool) -> None:
    """UserError if this class does not fit how vLLM schedules here."""
    if schedules_ahead == async_scheduling:
        return
    right, wrong = ("AsyncTimeBudgetScheduler", "TimeBudgetScheduler")
    mode = "asynchronously"
    if schedules_ahead:
        right, wrong, mode = wrong, right, "synchronously"
    raise UserError(
        f"vLLM schedules {mode} here, so {wrong} cannot be used: say --scheduler-cls {PACKAGE}.{right}"
    )


def check_target(settings: Settings) -> None:
    """UserError unless exactly one of the two targets is given."""
    given = [settings.itl_target_ms is not None, settings.step_budget_ms is not None]
    if not any(given):
        raise UserError(
            f'the time-budget scheduler needs {HERE}["itl_target_ms"], such as 40, or "step_budget_ms" there'
        )
    if all(given):
        raise UserError(f"{HERE} has itl_target_ms and step_budget_ms: give one of the two")


def check_reachable(settings: Settings, cost: StepCost) -> None:
    """UserError if the target is below one decode step of this model, as far as that is known."""
    target = settings.itl_target_ms or settings.step_budget_ms
    least = 1e3 * cost.seconds(Features(decodes=1))
    if target is not None and target < least:
        key = "itl_target_ms" if settings.itl_target_ms else "step_budget_ms"
        raise UserError(
            f'{HERE}["{key}"] is {target:g}, below one decode step of this model, {least:.3g} ms: '
            "write a larger one"
        )
