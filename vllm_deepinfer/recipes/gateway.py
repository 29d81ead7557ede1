"""The front door of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from vllm_deepinfer.gateway.settings import GatewayLimits, GatewaySettings
from vllm_deepinfer.policy.retention import Retention
from vllm_deepinfer.recipes.base import Port


class Gateway(GatewayLimits):
    """Where gateways listen, and their limits (those of GatewaySettings, by the same names).

    Attributes:
        host: address to listen on. port: of the first gateway on a node; the next has the next port. 0: any.
        per_node: gateway processes on a node, each with a core of its own.
        nodes: on Ray's head node only, or on every node.
        node_labels: on a node with these labels instead, such as {"pool": "gateway"}.
        api_keys: YAML list of keys made with `vllm-deepinfer gateway-key`; None: nobody needs one, and only
            loopback is served unless `allow_anonymous`. A relative path is relative to the recipe's file.
        allow_anonymous: listen beyond loopback without keys.
        metrics_port: the application's one metrics endpoint, on the same host; None: any free port.
        log_level: of the gateways.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    per_node: Annotated[int, Field(ge=1, le=256)] = 1
    nodes: Literal["head", "every"] = "head"
    node_labels: dict[str, str] = Field(default_factory=dict)
    api_keys: Path | None = None
    allow_anonymous: bool = False
    metrics_port: Port | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def settings(self, served_names: tuple[str, ...], classes: Retention) -> GatewaySettings:
        """What a gateway process is made with."""
        limits = {name: getattr(self, name) for name in GatewayLimits.model_fields}
        return GatewaySettings(served_names=served_names, classes=classes, **limits)
