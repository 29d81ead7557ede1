"""Where a prompt's rows go behind the last KV source, also on the two sides of a hand-over."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm_deepinfer_plugins.replay.prompt import start_behind


def params(transfer: dict[str, Any] | None = None, logprobs: int | None = None) -> SamplingParams:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(prompt_logprobs=logprobs, extra_args=extra)


@pytest.mark.parametrize("given", [None, params(), params({}), params({"do_remote_prefill": True})])
def test_it_follows_from_the_prompt(given: Any) -> None:
    assert start_behind(1000, 140, given) == 860
    assert start_behind(100, 140, given) == 0
    assert start_behind(1000, None, given) == 0


def test_prompt_logprobs_need_every_row() -> None:
    assert start_behind(1000, 140, params(logprobs=0)) == 0


def test_both_sides_of_a_hand_over_begin_with_the_same_row() -> None:
    """vLLM takes the last token off the prefill side's prompt and leaves this mark."""
    assert start_behind(999, 140, params({"_p_side_truncated": True})) == start_behind(1000, 140, params())
    source = inspect.getsource(NixlBaseConnectorScheduler)
    assert 'params["_p_side_truncated"] = True' in source
    assert "1 if self._has_mamba or self._bounded_replay else 0" in source
