"""What `--speculative-config` may say, and the one sentence about what it may not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_deepinfer_plugins.draft.settle import PROPOSER, SCHEDULER, WORKER, settle, uses_dspark
from vllm_deepinfer_plugins.draft.worker import DraftWorker
from vllm_deepinfer_plugins.replay.settle import WORKERS
from vllm_deepinfer_plugins.replay.settle import settle as settle_replays

from tests.plugins.model.engines import FIXTURES
from vllm_deepinfer.errors import UserError


class SchedulerConfig(SimpleNamespace):
    def get_scheduler_cls(self) -> Any:
        return resolve_obj_by_qualname(self.scheduler_cls)


def config(name: str = "deepseek-v4.1-tiny-dspark", deepinfer: Any = None, **speculative: Any) -> Any:
    fields = json.loads((FIXTURES / name / "config.json").read_text())
    said = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 5,
        "rejection_sample_method": "standard",
        "uses_draft_model": lambda: speculative.get("method") == "draft_model",
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**said, **speculative}),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: fields)),
        additional_config={"deepinfer": deepinfer or {}},
        parallel_config=SimpleNamespace(worker_cls="auto"),
        scheduler_config=SchedulerConfig(scheduler_cls=None, async_scheduling=False),
        cache_config=SimpleNamespace(swa_bounded_replay=True, enable_prefix_caching=True),
        kv_transfer_config=None,
        use_v2_model_runner=False,
    )


def refusal(given: Any) -> str:
    with pytest.raises(UserError) as error:
        settle(given)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_drafter_gets_its_worker_and_scheduler() -> None:
    given = config()
    settle(given)
    assert uses_dspark(given)
    assert given.parallel_config.worker_cls == WORKER
    assert resolve_obj_by_qualname(WORKER) is DraftWorker and WORKER in WORKERS
    assert given.scheduler_config.scheduler_cls == SCHEDULER
    assert given.additional_config == {"deepinfer": {}}


@pytest.mark.parametrize(
    ("deepinfer", "wanted"),
    [
        ({}, (True, True)),
        ({"encoder_replay": True, "decoder_replay": True}, (True, True)),
        ({"encoder_replay": False}, (False, False)),
        ({"decoder_replay": False}, (True, False)),
        ({"batch_invariant": True}, (False, False)),
        ({"batch_invariant": True, "encoder_replay": True, "decoder_replay": True}, (True, True)),
    ],
)
@pytest.mark.parametrize("scheduler", [None, "vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler"])
def test_replays_are_settled_as_without_a_drafter(
    deepinfer: Any, wanted: tuple[bool, bool], scheduler: str | None
) -> None:
    given = config(deepinfer=deepinfer)
    given.scheduler_config.scheduler_cls = scheduler
    settle(given)
    settle_replays(given)
    part = given.additional_config["deepinfer"]
    assert (part["encoder_replay"], part["decoder_replay"]) == wanted
    assert given.parallel_config.worker_cls == WORKER, "which hands replays to the model, and temperatures"
    assert given.scheduler_config.scheduler_cls == (scheduler or SCHEDULER)


def test_without_speculation_nothing_is_settled() -> None:
    given = config()
    given.speculative_config = None
    settle(given)
    assert given.parallel_config.worker_cls == "auto" and not uses_dspark(given)


def test_ngram_needs_nothing() -> None:
    given = config(method="ngram", model="ngram")
    settle(given)
    assert given.parallel_config.worker_cls == "auto" and given.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("count", [0, 6])
def test_more_drafts_than_a_block_has(count: int) -> None:
    assert refusal(config(num_speculative_tokens=count)).endswith("write 1 to 5")


def test_a_checkpoint_without_blocks() -> None:
    assert "has no DSpark blocks" in refusal(config("deepseek-v4.1-tiny"))


@pytest.mark.parametrize("method", ["mtp", "eagle3", "dspark"])
def test_methods_of_other_classes(method: str) -> None:
    message = refusal(config(method=method, model="x"))
    assert f"the method {method}," in message and PROPOSER in message


def test_synthetic_acceptance() -> None:
    assert "rejection_sample_method synthetic" in refusal(config(rejection_sample_method="synthetic"))


def test_another_worker() -> None:
    given = config()
    given.parallel_config.worker_cls = "mine.Worker"
    assert refusal(given).startswith("--worker-cls is mine.Worker")


def test_model_runner_v2() -> None:
    given = config()
    given.use_v2_model_runner = True
    assert '"method": "dspark"' in refusal(given)
