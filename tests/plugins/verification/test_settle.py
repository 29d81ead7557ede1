"""Settings of verification that nobody would follow are refused before weights are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_deepinfer_plugins.verification.settle import settle

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration import Calibration, dumps

OURS = "vllm_deepinfer_plugins.verification.scheduler.VerifyingScheduler"
TIMED = "vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler"
AHEAD = "vllm_deepinfer_plugins.scheduler.AsyncTimeBudgetScheduler"


class SchedulerConfig(SimpleNamespace):
    def get_scheduler_cls(self) -> Any:
        return resolve_obj_by_qualname(self.scheduler_cls or "vllm.v1.core.sched.scheduler.Scheduler")


def config(scheduler: str | None = OURS, drafts: int = 5, **deepinfer: Any) -> Any:
    speculative = SimpleNamespace(method="custom_class", model="a.P", num_speculative_tokens=drafts)
    return SimpleNamespace(
        additional_config={"deepinfer": deepinfer},
        model_config=SimpleNamespace(model="/models/v41"),
        speculative_config=speculative if drafts else None,
        scheduler_config=SchedulerConfig(scheduler_cls=scheduler),
    )


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    path.write_text(dumps(Calibration.identity(5), "/models/v41", "custom_class:a.P"))
    return str(path)


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config(None, 0),
        config(TIMED),
        config(TIMED, verification="adaptive"),
        config(AHEAD),
        config(verification="adaptive"),
        config(verification="everything"),
        config(TIMED, verification="everything"),
    ],
)
def test_what_can_be_followed(given: Any) -> None:
    settle(given)


def test_a_calibration_that_fits(saved: str) -> None:
    settle(config(calibration_file=saved))
    settle(config(calibration_file=saved, verification="adaptive"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (config(None, 0, verification="adaptive"), '"verification"] is adaptive, but nothing is drafted'),
        (config(None, 0, calibration_file="/c"), '"calibration_file"] is /c, but nothing is drafted'),
        (config(AHEAD, verification="adaptive"), f"--scheduler-cls is {AHEAD}, which verifies every draft"),
        (config(None, verification="adaptive"), "which verifies every draft"),
        (config(calibration_file="/c", verification="everything"), "but verification is everything"),
        (config(calibration_file="/no/such/file"), "which cannot be read (No such file or directory)"),
        (config(verification="off"), "'off'"),
    ],
)
def test_what_cannot(given: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        settle(given)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_calibration_for_another_number_of_drafts(saved: str) -> None:
    with pytest.raises(UserError, match="for 5 drafts, and num_speculative_tokens is 3"):
        settle(config(drafts=3, calibration_file=saved))
