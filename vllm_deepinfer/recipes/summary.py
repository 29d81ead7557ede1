"""What a recipe would place, as a table."""

from __future__ import annotations

from rich.table import Table

from vllm_deepinfer.checkpoint.kv_size import token_bytes
from vllm_deepinfer.recipes.checks.memory import kv_form
from vllm_deepinfer.recipes.checks.placement import needs
from vllm_deepinfer.recipes.cluster_view import GIB, ClusterView
from vllm_deepinfer.recipes.facts import model_facts
from vllm_deepinfer.recipes.schema import Pool, Recipe


def summary(recipe: Recipe, cluster: ClusterView | None) -> Table:
    """A row per pool and one for the gateways."""
    where = "no cluster looked at" if cluster is None else f"{len(cluster.nodes)} nodes"
    table = Table(title=f"{recipe.name}: {recipe.served_names[0]} on {where}", title_justify="left")
    for column in ("pool", "role", "engine", "replicas", "each replica", "KV per worker"):
        table.add_column(column)
    for name, pool in recipe.pools.items():
        table.add_row(name, pool.role, pool.engine, _replicas(pool), _each(pool), _kv(recipe, pool))
    gateway = recipe.gateway
    last = gateway.port + gateway.per_node - 1
    ports = (
        "any port" if not gateway.port else f"port {gateway.port}" + (f" to {last}" * (gateway.per_node > 1))
    )
    nodes = "every node" if gateway.nodes == "every" else "the head"
    if gateway.node_labels:
        nodes = ", ".join(f"{key}={value}" for key, value in gateway.node_labels.items())
    table.add_row("gateway", "", "", f"{gateway.per_node} on {nodes}", f"{gateway.host} {ports}", "")
    return table


def _replicas(pool: Pool) -> str:
    counts, gang = pool.replicas, pool.placement.gang
    text = f"{counts.min} to {counts.max}, first {counts.at_start}" if counts.scales else str(counts.min)
    return text + (f", in gangs of {gang}" if gang else "")


def _each(pool: Pool) -> str:
    need = ", ".join(f"{amount:g} {name}" for name, amount in needs(pool).items()) or "nothing reserved"
    labels = "".join(f", {key}={value}" for key, value in pool.resources.node_labels.items())
    many = "" if pool.placement.bundles == 1 else f"{pool.placement.bundles} × "
    return f"{many}{need}{labels}"


def _kv(recipe: Recipe, pool: Pool) -> str:
    """Tokens by arithmetic: an upper bound, because a cache holds windows and unfilled blocks too."""
    if pool.engine == "simulated":
        return f"{pool.simulated.kv_capacity_tokens:,} tokens" if pool.simulated else "the default"
    if pool.kv_gib is None:
        return "vLLM decides"
    config = model_facts(recipe.model).config
    if config is None:
        return f"{pool.kv_gib:g} GiB"
    per_token = token_bytes(config.text_config, kv_form(pool))
    most = f" (< {int(pool.kv_gib * GIB / per_token):,} tokens)" if per_token else ""
    return f"{pool.kv_gib:g} GiB{most}"
