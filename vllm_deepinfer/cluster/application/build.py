"""The application: one deployment per pool, and the gateways on top of them."""

from __future__ import annotations

from typing import Any

from ray import serve

from vllm_deepinfer.cluster.channel import ChannelKeys
from vllm_deepinfer.recipes.schema import Recipe

from .gateway_replica import GatewayReplica
from .placement import ROUTER, gateway_options, pool_options
from .replica import EngineReplica
from .specs import GatewaySpec, ReplicaSpec


def build_application(
    recipe: Recipe,
    session: str,
    *,
    keys: ChannelKeys | None = None,
    nodes: int = 1,
    commands: bool = False,
    router: str = ROUTER,
) -> Any:
    """What `serve.run` takes.

    Args:
        session: of this run; names lock files.
        keys: of the token channel; None: everything is on the loopback.
        nodes: how many nodes get gateways when the recipe says "every".
        commands: let tests reach into simulated engines.
        router: the pools' request router, for benchmarks that compare.
    """
    whole = recipe.model_dump_json()
    pools = {
        name: serve.deployment(EngineReplica, **pool_options(name, pool, recipe, router=router)).bind(
            ReplicaSpec(pool=name, recipe=whole, session=session, keys=keys, commands=commands)
        )
        for name, pool in recipe.pools.items()
    }
    gateway = serve.deployment(GatewayReplica, **gateway_options(recipe, nodes))
    return gateway.bind(GatewaySpec(recipe=whole, session=session, keys=keys), pools)
