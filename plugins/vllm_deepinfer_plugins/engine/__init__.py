"""VllmEngine: the library's Engine protocol on vLLM's AsyncLLM."""

from vllm_deepinfer_plugins.engine.vllm_engine import VllmEngine

__all__ = ["VllmEngine"]
