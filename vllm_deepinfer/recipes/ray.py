"""The Ray cluster that a recipe runs on, and how long its steps may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_deepinfer.recipes.base import NotNegative, Part, Port, Positive
from vllm_deepinfer.recipes.model import Text
from vllm_deepinfer.recipes.placement import Resources


class Deadlines(Part):
    """Seconds.

    Attributes:
        place_s: until all placement groups of a pool are placed, or the start fails and says what is missing.
        start_s: until every engine is ready after that.
        drain_s: a stop waits this long for running requests.
    """

    place_s: Positive = 60.0
    start_s: Positive = 900.0
    drain_s: NotNegative = 30.0


class HealthChecks(Part):
    """Of every replica, in seconds.

    Attributes:
        period_s: between two checks. timeout_s: of one; three failures in a row and the replica is replaced.
        wedge_after_s: work, and no token for this long: the engine is replaced though its health answers.
            Longer than the longest prefill step.
        stale_load_s: a load older than this no longer ranks its replica among the fresh ones.
        mark_s: a replica that refused or failed is avoided for this long.
    """

    period_s: Positive = 2.0
    timeout_s: Positive = 10.0
    wedge_after_s: Positive = 60.0
    stale_load_s: Positive = 2.0
    mark_s: Positive = 5.0


class Ray(Part):
    """Attributes:
    address: `local` starts a cluster of its own and stops it at the end; `auto` or host:port joins one.
    namespace: of the application's actors; None: the recipe's name.
    num_cpus: logical CPUs of the local cluster; None: the machine's.
    object_store_gib: of each local node; tokens and KV do not pass through it.
    local_nodes: further nodes of the local cluster, as processes on this machine, with these resources:
        a cluster for tests. `node_labels` are then the labels that the node gets.
    dashboard_port: of the local cluster; None: no dashboard.
    deadlines, health: see there.
    """

    address: Text = "local"
    namespace: Text | None = None
    num_cpus: Annotated[int, Field(ge=1)] | None = None
    object_store_gib: Positive = 0.25
    local_nodes: tuple[Resources, ...] = ()
    dashboard_port: Port | None = None
    deadlines: Deadlines = Deadlines()
    health: HealthChecks = HealthChecks()
