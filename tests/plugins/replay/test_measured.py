"""A scheduler without a time budget learns what steps cost, on a clock of the test's own."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.replay.bounded import BoundedReplay
from vllm_deepinfer_plugins.replay.measured import Measured
from vllm_deepinfer_plugins.replay.scheduler import AsyncReplayScheduler, ReplayScheduler

from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(2e-3, 1e-4, per_pair=1e-8, per_decode=3e-4, tile=32)


class Fake:
    """As much of vLLM's scheduler as the mixin asks: each step has what the test puts into it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.prefix_replay_tokens, self.num_spec_tokens, self.stopped = 128, 0, False
        self.requests: dict[str, Any] = {}
        self.next: dict[str, tuple[int, int, int]] = {}

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """By request: its prompt's tokens, those before the step and those in it."""
        for key, (prompt, before, count) in self.next.items():
            self.requests[key] = SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=before + count)
        counts = {key: count for key, (_, _, count) in self.next.items()}
        return SimpleNamespace(
            num_scheduled_tokens=counts, scheduled_encoder_inputs={}, has_sync_kv_loads=False
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return model_runner_output

    def shutdown(self) -> None:
        self.stopped = True


class Scheduler(Measured, Fake):
    """What is tested."""


def made(path: Path) -> Any:
    model = SimpleNamespace(
        model="tiny",
        dtype="bfloat16",
        quantization=None,
        enforce_eager=True,
        hf_config=SimpleNamespace(to_json_string=lambda: "{}"),
        hf_text_config=SimpleNamespace(index_topk=512),
    )
    config = SimpleNamespace(
        additional_config={"deepinfer": {"step_cost_file": str(path), "prefill_tile": 32}},
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    return Scheduler(config, SimpleNamespace(kv_cache_groups=[]))


def taught(path: Path, steps: int = 64) -> Any:
    """A scheduler whose steps take what COST says."""
    scheduler, now = made(path), [10.0]
    scheduler._clock = lambda: now[0]
    for number, count in zip(range(steps), itertools.cycle((32, 64, 256, 1, 512, 33, 1)), strict=False):
        context = number * 16
        scheduler.next = {"a": (10**6 if count > 1 else 5, 5 + context, count)}
        output = scheduler.schedule()
        now[0] += COST.seconds(scheduler._step(output).features)
        assert scheduler.update_from_output(output, "answer") == "answer"
        now[0] += 1.0  # idle: no part of any step
    return scheduler


def test_the_cost_is_learned_and_its_estimate_is_right(tmp_path: Path) -> None:
    assert made(tmp_path / "none").replay_cost() is None, "nobody knows yet"
    found = taught(tmp_path / "fit").replay_cost()
    assert found is not None and found.tile == 32
    for count, context in ((128, 0), (256, 512), (500, 2048)):
        work = COST.features(_prefill(context, count))
        assert found.seconds(work) == pytest.approx(COST.seconds(work), rel=0.1)


def _prefill(context: int, tokens: int) -> Any:
    from vllm_deepinfer.policy.step_cost import Work

    return Work(context, prefill_tokens=tokens)


def test_what_counts_as_prefill(tmp_path: Path) -> None:
    """The last token of a prompt is prefill, an answer's a decode, a resumed request's many are prefill."""
    scheduler = made(tmp_path / "fit")
    scheduler.next = {"last": (40, 39, 1), "decode": (40, 40, 1), "resumed": (40, 0, 60)}
    record = scheduler._step(scheduler.schedule())
    assert record.chunks == [1, 60] and record.decodes == 1
    assert record.features.tokens == 61 and record.features.decode_context == 40


def test_without_replayed_groups_nothing_is_measured(tmp_path: Path) -> None:
    scheduler = made(tmp_path / "fit")
    scheduler.prefix_replay_tokens, scheduler.next = 0, {"a": (9, 0, 9)}
    output = scheduler.schedule()
    assert scheduler._meter.ended(id(output), 1.0) is None


def test_the_fit_is_kept_for_the_next_start(tmp_path: Path) -> None:
    scheduler = taught(tmp_path / "fit")
    scheduler.shutdown()
    assert scheduler.stopped
    known = made(tmp_path / "fit").replay_cost()
    assert known is not None and known == scheduler._learner.fitted


def test_both_classes_measure_around_the_replays() -> None:
    for cls in (ReplayScheduler, AsyncReplayScheduler):
        assert cls.__mro__[1:3] == (Measured, BoundedReplay)
