"""What a replica needs of the cluster, and where its parts may lie."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_deepinfer.recipes.base import Count, NotNegative, Part, Positive

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class Replicas(Part):
    """How many replicas; a plain number stands for a fixed count.

    Attributes:
        min, max: bounds of the autoscaling; min 0 allows scaling to zero.
        initial: at start; None: `min`, or 1 when min is 0.
    """

    min: Annotated[int, Field(ge=0)] = 1
    max: Count = 1
    initial: Annotated[int, Field(ge=0)] | None = None

    @property
    def at_start(self) -> int:
        """Replicas that the application starts with."""
        return (self.min or 1) if self.initial is None else self.initial

    @property
    def scales(self) -> bool:
        """Whether the number may change."""
        return self.min < self.max


class Resources(Part):
    """Of one bundle of a replica; a bundle lies on one node.

    Attributes:
        cpus: logical CPUs, Ray's `CPU`. gpus: Ray's `GPU`.
        memory_gib: host memory in GiB, Ray's `memory`; None: not reserved.
        custom: Ray custom resources, such as {"prefill_node": 1}.
        node_labels: labels that the node must have, such as {"pool": "decode"}: Ray's label selector.
    """

    cpus: NotNegative = 1.0
    gpus: NotNegative = 0.0
    memory_gib: Positive | None = None
    custom: dict[str, Positive] = Field(default_factory=dict)
    node_labels: dict[str, str] = Field(default_factory=dict)


class Placement(Part):
    """Where bundles and replicas may lie.

    Attributes:
        bundles: bundles of `resources` per replica; more than one for an engine whose tensor- or
            pipeline-parallel workers need several nodes.
        strategy: of the bundles of one replica, Ray's placement group strategy.
        max_replicas_per_node: spreads the replicas; None: no bound.
        gang: replicas that are placed together, live and die together: the ranks of one data-parallel group.
            None: each for itself.
    """

    bundles: Count = 1
    strategy: Strategy = "PACK"
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    gang: Annotated[int, Field(ge=2)] | None = None
