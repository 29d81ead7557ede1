"""Memory for KV and weights, by arithmetic: what is refused here could not start, or could serve nothing."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.kv_size import KvForm, WeightBytes, request_bytes
from vllm_deepinfer.recipes.checks.context import Context, argument, on_cpu, workers
from vllm_deepinfer.recipes.cluster_view import GIB
from vllm_deepinfer.recipes.schema import Pool


def check_memory(context: Context) -> Iterator[str]:
    """Lower bounds only: no recipe that would run is refused."""
    config, weights = context.facts.config, context.facts.weights
    if config is None or weights is None:
        return
    for name, pool in context.recipe.pools.items():
        if pool.engine != "vllm":
            continue
        yield from _one_request(name, pool, config)
        if on_cpu(pool):
            yield from _host(name, pool, weights, context)
        else:
            yield from _device(name, pool, weights, config, context)


def kv_form(pool: Pool) -> KvForm:
    """The smallest form in which the pool's engines may keep KV."""
    return KvForm.PORTABLE if on_cpu(pool) else KvForm.PACKED


def longest(pool: Pool, config: V41Config) -> int:
    """Tokens of the longest request that the pool accepts."""
    return argument(pool, "max_model_len", config.text_config.max_position_embeddings)


def _one_request(name: str, pool: Pool, config: V41Config) -> Iterator[str]:
    if pool.kv_gib is None:
        return
    tokens = longest(pool, config)
    needed = request_bytes(config.text_config, tokens, kv_form(pool))
    if pool.kv_gib * GIB < needed:
        yield (
            f"pools.{name}.kv_gib is {pool.kv_gib:g}, but one request of max_model_len {tokens} needs "
            f"{_gib(needed)} GiB of KV: write more, or a smaller engine_args.max_model_len."
        )


def _host(name: str, pool: Pool, weights: WeightBytes, context: Context) -> Iterator[str]:
    needed = weights.total + (pool.kv_gib or 0) * GIB
    memory = pool.resources.memory_gib
    if memory is not None and memory * GIB < needed:
        yield (
            f"pools.{name}.resources.memory_gib is {memory:g}, but weights ({_gib(weights.total)} GiB) and "
            "KV "
            f"({pool.kv_gib or 0:g} GiB) take {_gib(needed)} GiB: write more."
        )
    elif memory is None and context.cluster is not None:
        largest = max((node.memory_gib for node in context.cluster.nodes if node.memory_gib), default=None)
        if largest is not None and largest * GIB < needed:
            yield (
                f"pools.{name} needs {_gib(needed)} GiB for weights and KV, but the largest node has "
                f"{largest:.1f} GiB: choose a smaller model or kv_gib, or larger nodes."
            )


def device_weights(pool: Pool, weights: WeightBytes) -> float:
    """Least bytes of weights on each GPU; the Engram tables lie in host memory, as in vLLM by default."""
    ranks = workers(pool) * (pool.placement.gang or 1)
    expert_ranks = ranks if pool.engine_args.get("enable_expert_parallel") is True else workers(pool)
    return weights.experts / expert_ranks + weights.rest / workers(pool)


def _device(
    name: str, pool: Pool, weights: WeightBytes, config: V41Config, context: Context
) -> Iterator[str]:
    nodes = () if context.cluster is None else context.cluster.nodes
    memory = max((node.gpu_memory_gib for node in nodes if node.gpu_memory_gib), default=None)
    own = device_weights(pool, weights)
    if memory is not None:
        share = pool.engine_args.get("gpu_memory_utilization", 0.92)
        share = float(share) if isinstance(share, int | float) and not isinstance(share, bool) else 0.92
        kv = (
            pool.kv_gib * GIB
            if pool.kv_gib
            else request_bytes(config.text_config, longest(pool, config), KvForm.PACKED)
        )
        if own + kv > memory * GIB * share:
            yield (
                f"pools.{name} needs {_gib(own + kv)} GiB on each GPU (weights {_gib(own)}, KV "
                f"{_gib(kv)}), but "
                f"{share:.0%} of {memory:g} GiB is {memory * share:.1f}: use more GPUs per replica, or "
                "enable_expert_parallel with a larger placement.gang."
            )
    host = max((node.memory_gib for node in nodes if node.memory_gib), default=None)
    if host is not None and host * GIB < weights.engram:
        yield (
            f"pools.{name} keeps {_gib(weights.engram)} GiB of Engram tables in host memory, but the largest "
            f"node has {host:.1f} GiB: choose larger nodes."
        )


def _gib(size: float) -> str:
    amount = size / GIB
    return f"{amount:.1f}" if amount >= 1 else f"{amount:.2g}"
