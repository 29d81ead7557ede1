"""What a running AsyncLLM is, in the protocol's words."""

from __future__ import annotations

from vllm.v1.engine.async_llm import AsyncLLM

from vllm_deepinfer.engine import EngineInfo, GenerateRequest, InvalidRequest
from vllm_deepinfer_plugins.forced import forces_tokens
from vllm_deepinfer_plugins.hand_over.layout import hands_over, kv_layout


def info_of(llm: AsyncLLM) -> EngineInfo:
    """The fixed facts of a started engine."""
    config = llm.vllm_config
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    names = model.served_model_name or model.model
    capacity = cache.kv_cache_size_tokens or (cache.num_gpu_blocks or 0) * cache.block_size
    vocab_size = model.get_vocab_size()
    return EngineInfo(
        model=names if isinstance(names, str) else names[0],
        max_model_len=model.max_model_len,
        eos_token_ids=_eos_token_ids(llm),
        block_size=cache.block_size,
        kv_capacity_tokens=capacity,
        vocab_size=vocab_size,
        max_logprobs=vocab_size if model.max_logprobs == -1 else model.max_logprobs,
        draft_tokens=speculative.num_speculative_tokens if speculative is not None else 0,
        forces_tokens=forces_tokens(config),
        kv_layout=kv_layout(config),
        hands_over=hands_over(config),
    )


def refuse_unsupported(request: GenerateRequest, llm: AsyncLLM) -> None:
    """Refuse what vLLM would accept and then not do. Raises: InvalidRequest."""
    structured = request.sampling.structured
    parser = llm.vllm_config.structured_outputs_config.reasoning_parser
    if structured is not None and structured.after_reasoning and not parser:
        raise InvalidRequest(
            "a constraint after the reasoning needs an engine with a reasoning parser; start it with "
            "--reasoning-parser."
        )


def _eos_token_ids(llm: AsyncLLM) -> list[int]:
    tokenizer = llm.tokenizer
    ids = set() if tokenizer is None or tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    further = llm.model_config.try_get_generation_config().get("eos_token_id")
    if further is not None:
        ids |= {further} if isinstance(further, int) else set(further)
    return sorted(ids)
