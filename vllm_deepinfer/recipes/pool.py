"""One pool: replicas of one engine with one role."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vllm_deepinfer.recipes.base import Part, Positive
from vllm_deepinfer.recipes.model import Text
from vllm_deepinfer.recipes.placement import Placement, Replicas, Resources
from vllm_deepinfer.recipes.scaling import Autoscaling
from vllm_deepinfer.recipes.simulated import Simulated

Role = Literal["prefill", "decode", "aggregated", "encoder"]
EngineName = Literal["vllm", "simulated"]


class Pool(Part):
    """Attributes:
    role: what its replicas do with a request; `encoder` is reserved and refused by `check`.
    engine: what a replica runs.
    replicas: a number, or {min, max, initial}.
    resources: of each bundle of a replica. placement: of bundles and replicas.
    model_path: another place of the same weights, where nodes keep their own copy; compared by fingerprint.
    engine_args: vLLM's EngineArgs by their names in Python, such as max_num_seqs. What the application sets
        itself (model, kv_transfer_config, …) is refused by `check`.
    simulated: sizes and speed of a simulated engine; a pool of vLLM engines may have them for a rehearsal.
    env: environment of each replica.
    cpu_binds: the cores of each of the pool's replicas on a node, in turn, as VLLM_CPU_OMP_THREADS_BIND takes
        them, such as ["0", "1"].
    kv_gib: memory for KV per engine worker in GiB; None: vLLM decides, on a GPU by gpu_memory_utilization.
    max_ongoing: requests that a replica is given at once; None: max_num_seqs and as many waiting.
    autoscaling: None: the defaults, which matter when replicas.min < replicas.max.
    """

    role: Role
    engine: EngineName = "vllm"
    replicas: Replicas = Replicas()
    resources: Resources = Resources()
    placement: Placement = Placement()
    model_path: Text | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    simulated: Simulated | None = None
    env: dict[str, str] = Field(default_factory=dict)
    cpu_binds: tuple[Text, ...] = ()
    kv_gib: Positive | None = None
    max_ongoing: Annotated[int, Field(ge=1)] | None = None
    autoscaling: Autoscaling | None = None

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        return value
