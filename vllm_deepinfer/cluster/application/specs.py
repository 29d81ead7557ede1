"""What the processes of an application are started with: plain data that Ray carries to their nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray

from vllm_deepinfer.cluster.channel import ChannelKeys
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost
from vllm_deepinfer.recipes.schema import Pool, Recipe

LOOPBACK = "127.0.0.1"


def node_host(local: bool) -> str:
    """The address at which this node's processes are reached."""
    return LOOPBACK if local else str(ray.util.get_node_ip_address())


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica of a pool.

    Attributes:
        pool: its name. recipe: as much of it as the replica uses (`updates.for_pool`), as JSON.
        keys: of the token channel, where it goes beyond the loopback.
        commands: whether tests may reach into its simulated engine.
        session: of this run of the application; names its lock files.
        beat_s: interval of signs of life on the channel.
    """

    pool: str
    recipe: str
    session: str
    keys: ChannelKeys | None = field(default=None, repr=False)
    commands: bool = False
    beat_s: float = 0.5

    @property
    def whole(self) -> Recipe:
        """The recipe, without what is other pools'."""
        return Recipe.model_validate_json(self.recipe)

    @property
    def settings(self) -> Pool:
        """The pool's part of the recipe."""
        return self.whole.pools[self.pool]

    @property
    def most_active(self) -> int:
        """Requests that a replica has at once."""
        return most_active(self.settings)

    @property
    def cost(self) -> StepCost:
        """Of a step, where the engine does not know better: the recipe's, or that of two CPU cores."""
        simulated = self.settings.simulated
        if simulated is not None and simulated.cost is not None:
            return simulated.cost.step_cost()
        return TWO_CORE_DENSE

    def host(self) -> str:
        """Where the replica's end of the token channel listens."""
        return node_host(self.keys is None)


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """One gateway process. Attributes as of `ReplicaSpec`; see `updates.for_gateway`."""

    recipe: str
    session: str
    keys: ChannelKeys | None = field(default=None, repr=False)

    @property
    def whole(self) -> Recipe:
        """The recipe."""
        return Recipe.model_validate_json(self.recipe)


def most_active(pool: Pool) -> int:
    """Requests that one replica of the pool is given at once."""
    if pool.max_ongoing is not None:
        return pool.max_ongoing
    if pool.engine == "simulated":
        running = (pool.simulated.max_num_seqs if pool.simulated else None) or 256
    else:
        running = int(pool.engine_args.get("max_num_seqs") or 256)
    return 2 * running
