"""An engine without a model, for tests, benchmarks and the simulator."""

from vllm_deepinfer.engine.simulated.config import SimulatedConfig, Speculation
from vllm_deepinfer.engine.simulated.engine import SimulatedEngine
from vllm_deepinfer.engine.simulated.faults import Faults
from vllm_deepinfer.engine.simulated.tokens import (
    TokenAt,
    TokenSource,
    chained_tokens,
    hashed_tokens,
    scripted_tokens,
)

__all__ = [
    "Faults",
    "SimulatedConfig",
    "SimulatedEngine",
    "Speculation",
    "TokenAt",
    "TokenSource",
    "chained_tokens",
    "hashed_tokens",
    "scripted_tokens",
]
