"""What is settled in vLLM's config before an engine with our class starts: refusals, and three corrections.

The corrections: vLLM takes every ``deepseek_v41`` for latent attention that only some CPU kernels can run,
and would force a block size, and without AMX switch chunked prefill and prefix caching off; it would ask a
quantisation method of its own for weights that `weights.decoded` reads; and outside the CPU it would pick its
own class.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig
from vllm.platforms import current_platform

from vllm_deepinfer.checkpoint.config import ConfigError, V41Config
from vllm_deepinfer.checkpoint.layout import verify_headers

from ..draft.settle import settle as settle_speculation
from ..kernels.prepare import prepare_kernels
from ..replay.settle import refuse_for_native, settle
from ..settings import Settings
from ..verification.settle import settle as settle_verification
from .hashes import engram_hash

NATIVE_NAME = "DeepseekV41ForCausalLM"
PORTABLE_NAME = "DeepInferV41ForCausalLM"
"""Always our class, also where ``NATIVE_NAME`` is vLLM's."""


def native_class_exists() -> bool:
    """Whether vLLM 0.32 has a V4.1 class of its own for this platform."""
    return bool(current_platform.is_cuda() or current_platform.is_rocm())


class V41ConfigHook(DeepseekV4ForCausalLMConfig):
    """vLLM's per-architecture hook for DeepSeek-V4.1, extended by ours."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Runs when the model's config is read, before quantisation is resolved."""
        if native_class_exists() and PORTABLE_NAME not in _architectures(model_config):
            DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        else:
            refuse_quantization(model_config)
            _correct(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Runs once when the engine's config is whole, before anything starts."""
        model = vllm_config.model_config
        settings = Settings.read(vllm_config.additional_config)
        portable = PORTABLE_NAME in _architectures(model) or settings.portable_model
        if native_class_exists() and not portable:
            refuse_for_native(settings)
            DeepseekV4ForCausalLMConfig.verify_and_update_config(vllm_config)
            return
        if settings.portable_model and native_class_exists():
            model.hf_config.architectures = [PORTABLE_NAME]
            model.quantization = None
        _correct(model)
        refuse(vllm_config)
        settle_speculation(vllm_config)
        settle(vllm_config)
        settle_verification(vllm_config)
        if current_platform.is_cpu() and str(model.dtype) == "torch.bfloat16" and not settings.invariant:
            prepare_kernels(wanted=settings.native_kernels)


def _architectures(model_config: ModelConfig) -> list[str]:
    return list(getattr(model_config.hf_config, "architectures", None) or [])


def _correct(model_config: ModelConfig) -> None:
    arch: Any = model_config.model_arch_config
    changes = {"is_deepseek_mla": False, "quantization_config": None}
    if dataclasses.is_dataclass(arch):
        model_config.model_arch_config = dataclasses.replace(arch, **changes)  # type: ignore[type-var]
    else:
        for name, value in changes.items():
            setattr(arch, name, value)
    for config in (model_config.hf_config, model_config.hf_text_config):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config


def refuse(vllm_config: VllmConfig) -> None:
    """Raise one sentence for what our class cannot do, and for a config or checkpoint that makes no model.

    Raises:
        ConfigError, CheckpointError: Names the flag, field or tensor and what to write instead.
    """
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    if parallel.tensor_parallel_size > 1:
        raise ConfigError(_only("--tensor-parallel-size", parallel.tensor_parallel_size, "1"))
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(_only("--pipeline-parallel-size", parallel.pipeline_parallel_size, "1"))
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "--enable-lora: the portable DeepSeek-V4.1 class has no LoRA layers, leave the flag out"
        )
    if cache.cache_dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"--kv-cache-dtype is {cache.cache_dtype}, but DeepSeek-V4.1 quantises its caches itself: write "
            "auto"
        )
    if str(model.dtype) not in ("torch.bfloat16", "torch.float32"):
        raise ConfigError(_only("--dtype", str(model.dtype).removeprefix("torch."), "bfloat16 or float32"))
    config = V41Config.from_dict(model.hf_config.to_dict())
    for plan in config.text_config.schedule():
        if plan.owns_kv and cache.block_size is not None and cache.block_size % plan.ratio:
            raise ConfigError(
                f"--block-size is {cache.block_size}, which compress_ratios[{plan.index}] = {plan.ratio} "
                "does not divide: write a multiple of it"
            )
    folder = Path(model.model)
    if folder.is_dir() and str(vllm_config.load_config.load_format) != "dummy":
        verify_headers(folder, config)
    if Path(model.tokenizer or folder).is_dir():
        engram_hash(model)


def refuse_quantization(model_config: ModelConfig) -> None:
    """Raise one sentence for `--quantization`, which this class would pass over.

    Called before vLLM resolves the method: what is there comes from the user.
    """
    if model_config.quantization is not None:
        raise ConfigError(
            f"--quantization is {model_config.quantization}, but the portable DeepSeek-V4.1 class decodes "
            "the released weights itself: leave the flag out"
        )


def _only(flag: str, value: object, legal: str) -> str:
    return f"{flag} is {value}, but the portable DeepSeek-V4.1 class runs with {legal} only: write that"
