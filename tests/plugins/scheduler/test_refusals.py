"""One sentence for every start that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_deepinfer_plugins.scheduler.refusals import check_class, check_reachable, check_target
from vllm_deepinfer_plugins.settings import Settings

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE


def sentence(function: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value) and ". " not in str(error.value)
    return str(error.value)


def test_the_wrong_class_names_the_right_one() -> None:
    assert sentence(check_class, False, True) == (
        "vLLM schedules asynchronously here, so TimeBudgetScheduler cannot be used: "
        "say --scheduler-cls vllm_deepinfer_plugins.scheduler.AsyncTimeBudgetScheduler"
    )
    assert sentence(check_class, True, False).endswith("vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_right_class_is_silent(asynchronous: bool) -> None:
    check_class(asynchronous, asynchronous)


def test_no_target() -> None:
    assert sentence(check_target, Settings()) == (
        'the time-budget scheduler needs additional_config["deepinfer"]["itl_target_ms"], such as 40, '
        'or "step_budget_ms" there'
    )


def test_two_targets() -> None:
    assert "give one of the two" in sentence(check_target, Settings(itl_target_ms=40, step_budget_ms=30))


@pytest.mark.parametrize("settings", [Settings(itl_target_ms=40), Settings(step_budget_ms=40)])
def test_one_target(settings: Settings) -> None:
    check_target(settings)


@pytest.mark.parametrize("key", ["itl_target_ms", "step_budget_ms"])
def test_a_target_below_one_decode_step_of_a_known_model(key: str) -> None:
    """7.25 ms + 0.28 ms."""
    assert sentence(check_reachable, Settings.read({"deepinfer": {key: 7.5}}), TWO_CORE_DENSE) == (
        f'additional_config["deepinfer"]["{key}"] is 7.5, below one decode step of this model, 7.53 ms: '
        "write a larger one"
    )
    check_reachable(Settings.read({"deepinfer": {key: 7.54}}), TWO_CORE_DENSE)
