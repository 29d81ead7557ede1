"""Decisions are made, and timed, on what changes from step to step. Their time is the benchmark's matter."""

from __future__ import annotations

from vllm_deepinfer_plugins.bench.verification.decisions import times


def test_every_decision_is_timed() -> None:
    policy, whole = times(6)
    assert len(policy) == len(whole) == 3 and min(policy + whole) > 0
