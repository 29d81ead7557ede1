"""The Engine protocol and its simulated implementation: tokens in, token deltas out."""

from vllm_deepinfer.engine.base import Engine, Sink
from vllm_deepinfer.engine.errors import (
    EngineDead,
    EngineDraining,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from vllm_deepinfer.engine.messages import (
    LOST,
    UNBUILT,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    KvHandOver,
    Load,
    Targets,
    TokenDelta,
    TokenLogprobs,
)
from vllm_deepinfer.engine.sampling import ConstraintKind, SamplingParams, StructuredOutput
from vllm_deepinfer.engine.stream import Completion, collect, stream

__all__ = [
    "LOST",
    "UNBUILT",
    "Completion",
    "ConstraintKind",
    "Engine",
    "EngineDead",
    "EngineDraining",
    "EngineError",
    "EngineInfo",
    "EngineUnavailable",
    "FinishReason",
    "GenerateRequest",
    "Health",
    "HealthState",
    "InvalidRequest",
    "KvHandOver",
    "Load",
    "Overloaded",
    "SamplingParams",
    "Sink",
    "StructuredOutput",
    "Targets",
    "TokenDelta",
    "TokenLogprobs",
    "collect",
    "stream",
]
