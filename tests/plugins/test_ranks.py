"""Ranks without a compiler are the ranks with one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch


def test_what_is_replaced_is_still_as_it_was_read() -> None:
    """vLLM 0.32 compiles two plain operations. If this fails, look at `vllm.v1.sample.ops.logprobs` again."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    compiled = logprobs.batched_count_greater_than
    source = inspect.getsource(compiled._torchdynamo_orig_callable)
    assert source.startswith("@torch.compile(")
    assert source.rstrip().endswith("return (x >= values).sum(-1)")
    assert "batched_count_greater_than(" in inspect.getsource(sampler.Sampler.gather_logprobs)


def test_the_sampler_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs
    from vllm_deepinfer_plugins import ranks

    def compiling(*args: Any, **named: Any) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(sampler, "batched_count_greater_than", logprobs.batched_count_greater_than)
    monkeypatch.setattr("torch._dynamo.convert_frame.convert_frame", compiling)
    ranks.install()
    ranks.install()
    values = torch.tensor([[0.1, 0.7, 0.2, 0.2], [0.25, 0.25, 0.4, 0.1]]).log()
    found = sampler.Sampler().gather_logprobs(values, 2, torch.tensor([2, 1]))
    assert found.selected_token_ranks.tolist() == [3, 3]  # equal ones count, as in vLLM
    assert found.logprob_token_ids.tolist()[0][:2] == [2, 1]
