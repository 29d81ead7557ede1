"""EngineInfo from vLLM's configuration, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_deepinfer.engine import (
    ConstraintKind,
    EngineInfo,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    StructuredOutput,
)

info = pytest.importorskip("vllm_deepinfer_plugins.engine.info")
forced = pytest.importorskip("vllm_deepinfer_plugins.forced")


def llm_of(
    names: str | list[str] = "served",
    eos: int | None = 1,
    further: int | list[int] | None = None,
    max_logprobs: int = 20,
    tokens: int | None = 4_096,
    drafts: int | None = None,
    reasoning_parser: str = "",
    processors: list[str] | None = None,
) -> Any:
    generation = {} if further is None else {"eos_token_id": further}
    model = SimpleNamespace(
        served_model_name=names,
        model="/path",
        max_model_len=512,
        max_logprobs=max_logprobs,
        logits_processors=processors,
        get_vocab_size=lambda: 1_000,
        try_get_generation_config=lambda: generation,
    )
    config = SimpleNamespace(
        kv_transfer_config=None,
        model_config=model,
        cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=10, kv_cache_size_tokens=tokens),
        speculative_config=None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts),
        structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning_parser),
    )
    tokenizer = None if eos is None else SimpleNamespace(eos_token_id=eos)
    return SimpleNamespace(vllm_config=config, model_config=model, tokenizer=tokenizer)


def test_the_usual_engine() -> None:
    assert info.info_of(llm_of()) == EngineInfo(
        model="served",
        max_model_len=512,
        eos_token_ids=[1],
        block_size=32,
        kv_capacity_tokens=4_096,
        vocab_size=1_000,
        max_logprobs=20,
        draft_tokens=0,
    )


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"names": ["first", "alias"]}, "model", "first"),
        ({"names": []}, "model", "/path"),
        ({"eos": None}, "eos_token_ids", []),
        ({"further": 7}, "eos_token_ids", [1, 7]),
        ({"further": [9, 1, 7]}, "eos_token_ids", [1, 7, 9]),
        ({"eos": None, "further": [3]}, "eos_token_ids", [3]),
        ({"max_logprobs": -1}, "max_logprobs", 1_000),
        ({"tokens": None}, "kv_capacity_tokens", 320),
        ({"drafts": 5}, "draft_tokens", 5),
        ({"processors": ["a:B", forced.NAME]}, "forces_tokens", True),
        ({"processors": ["a:B"]}, "forces_tokens", False),
    ],
)
def test_variations(options: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(info.info_of(llm_of(**options)), field) == expected


def test_a_late_constraint_needs_a_reasoning_parser() -> None:
    late = StructuredOutput(kind=ConstraintKind.JSON_OBJECT, after_reasoning=True)
    request = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(structured=late))
    with pytest.raises(InvalidRequest, match="--reasoning-parser"):
        info.refuse_unsupported(request, llm_of())
    info.refuse_unsupported(request, llm_of(reasoning_parser="deepseek_v41"))
    info.refuse_unsupported(GenerateRequest(request_id="r", prompt_token_ids=[1]), llm_of())
