"""Orders go with vLLM's SchedulerOutput, also through pickle, as between engine core and worker."""

from __future__ import annotations

import pickle

from vllm.v1.core.sched.output import SchedulerOutput
from vllm_deepinfer_plugins.replay.message import ReplayStep, Start, WindowCopy


def test_survives_pickle() -> None:
    output = SchedulerOutput.make_empty()
    assert ReplayStep.of(output) is None
    step = ReplayStep({"a": Start(3, 9)}, [WindowCopy(0, 16, {1: (4, 5)})], [], [7])
    step.put_into(output)
    assert ReplayStep.of(pickle.loads(pickle.dumps(output))) == step
