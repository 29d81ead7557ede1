"""Everything is verified and written down: by request, with its confidences, nothing censored."""

from __future__ import annotations

import numpy as np
from vllm_deepinfer_plugins.verification.calibrate.recorder import Recorder

from vllm_deepinfer.policy.step_cost import StepCost


def test_all_drafts_are_verified_whatever_they_cost() -> None:
    recorder = Recorder(3)
    recorder.drafted("a", [0.01, 0.01, 0.01])
    dear = StepCost(per_step=1e-3, per_token=1.0)
    decision = recorder.choose(["a", "b"], [100, 5], [3, 1], dear)
    assert decision.lengths.tolist() == [3, 1] and decision.seconds is None


def test_rounds_carry_the_confidences_that_they_were_drafted_with() -> None:
    recorder = Recorder(3)
    recorder.drafted("a", [0.9, 0.8, 0.7])
    recorder.drafted("b", [0.5])
    recorder.verified(["a", "b"], [3, 1], [2, 0])
    recorder.drafted("a", [0.6, 0.5])
    recorder.verified(["a"], [2], [2])
    recorder.verified([], [], [])
    keys, records = recorder.records()
    assert keys == ["a", "b", "a"] and recorder.rounds == 3
    np.testing.assert_array_equal(
        records.confidences, [[0.9, 0.8, 0.7], [0.5, np.nan, np.nan], [0.6, 0.5, np.nan]]
    )
    assert records.verified.tolist() == [3, 1, 2] and records.accepted.tolist() == [2, 0, 2]
    assert len(records.usable().verified) == 3, "what was not drafted is not verified either"


def test_rounds_without_drafts_or_confidences_say_nothing() -> None:
    recorder = Recorder(2)
    recorder.drafted("a", [])
    recorder.drafted("b", [0.5, 0.5])
    recorder.verified(["a", "b"], [2, 0], [1, 0])
    assert recorder.unsure == 1 and recorder.rounds == 0
    keys, records = recorder.records()
    assert keys == [] and records.confidences.shape == (0, 2)


def test_a_request_that_has_ended_is_forgotten() -> None:
    recorder = Recorder(1)
    recorder.drafted("a", [0.5])
    recorder.forget("a")
    recorder.verified(["a"], [1], [1])
    assert recorder.unsure == 1 and recorder.rounds == 0
