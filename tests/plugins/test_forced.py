"""Forced tokens in vLLM: an answer forced up to any point goes on as it did: seed, grammar, penalties."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm_deepinfer_plugins.engine.build import build
from vllm_deepinfer_plugins.forced import FORCED, ForcedTokens, force

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.engine import (
    ConstraintKind,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    collect,
)


def test_only_the_next_forced_token_is_left() -> None:
    logits = torch.randn(8)
    assert force([3, 5], [3], logits).argmax() == 5
    assert logits[5] == 0 and torch.isinf(logits).sum() == 7
    free = torch.randn(8)
    assert torch.equal(force([3, 5], [3, 5], free.clone()), free)


@pytest.mark.parametrize("forced", [3, "3", [1, "2"], [-1], [1.5]])
def test_anything_but_token_ids_is_refused(forced: Any) -> None:
    with pytest.raises(VLLMValidationError, match="must be a list of token ids"):
        ForcedTokens.validate_params(VllmSampling(extra_args={FORCED: forced}))
    ForcedTokens.validate_params(VllmSampling())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TinyOptions()).folder


@pytest.fixture
async def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    flags = "--enforce-eager --max-model-len 512 --max-num-seqs 4 --dtype float32 --no-enable-prefix-caching"
    made = build(folder, flags.split())
    await made.start()
    yield made
    await made.close()


async def answer(engine: Any, name: str, forced: Sequence[int] = (), **sampling: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": 24, **sampling}, forced=forced)
    request = GenerateRequest(request_id=name, prompt_token_ids=list(range(30, 50)), sampling=params)
    return list((await collect(engine, request)).token_ids)


REGEX = StructuredOutput(kind=ConstraintKind.REGEX, value="[a-c]{4}(xy|yx)[0-9]{6}")


@pytest.mark.slow
async def test_an_answer_goes_on_as_it_did(engine: Any) -> None:
    """Whatever part of it is forced: draws of the seed, states of the grammar and penalties are the same."""
    assert engine.info.forces_tokens
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
    cases: dict[str, Any] = {
        "seed": {"seed": 5, "temperature": 1.0, "ignore_eos": True},
        "seeded grammar": {"seed": 6, "temperature": 1.0, "structured": REGEX},
        "greedy grammar": {"temperature": 0.0, "structured": REGEX},
        "penalties": {"temperature": 0.0, "ignore_eos": True, **penalties},
    }
    for case, sampling in cases.items():
        whole = await answer(engine, f"{case} whole", **sampling)
        assert len(whole) >= 6
        for count in (1, 5, len(whole) - 1):
            again = await answer(engine, f"{case} {count}", whole[:count], **sampling)
            assert again == whole, (case, count)
    other = await answer(engine, "other", [77, 78], seed=5, temperature=1.0, ignore_eos=True)
    assert other[:2] == [77, 78] and len(other) == 24
