"""The application: one deployment per pool, and the gateways on top of them."""

from __future__ import annotations

import hashlib
from typing import Any

from ray import serve

from vllm_deepinfer.cluster.channel import ChannelKeys
from vllm_deepinfer.recipes.schema import Recipe

from .gateway_replica import GatewayReplica
from .placement import ROUTER, gateway_options, pool_options
from .replica import EngineReplica
from .specs import GatewaySpec, ReplicaSpec
from .updates import for_gateway, for_pool


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
    pools = {}
    for name, pool in recipe.pools.items():
        told = ReplicaSpec(
            pool=name,
            recipe=for_pool(recipe, name).model_dump_json(),
            session=session,
            keys=keys,
            commands=commands,
        )
        options = pool_options(name, pool, recipe, router=router)
        pools[name] = _versioned(serve.deployment(EngineReplica, **options), told.recipe).bind(told)
    spec = GatewaySpec(recipe=for_gateway(recipe).model_dump_json(), session=session, keys=keys)
    gateway = serve.deployment(GatewayReplica, **gateway_options(recipe, nodes))
    return _versioned(gateway, spec.recipe).bind(spec, pools)


def _versioned(deployment: Any, told: str) -> Any:
    """With a version of its own: Serve takes a deployment without one for another each time it is deployed.

    Serve's public options have none (ray 2.60, serve/_private/client.py: `deployment._version or random`).
    """
    return deployment.options(version=hashlib.sha256(told.encode()).hexdigest()[:16], _internal=True)
