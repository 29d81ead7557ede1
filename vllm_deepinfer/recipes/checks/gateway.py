"""The front door: who may come in, and where it keeps things."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator

from vllm_deepinfer.gateway.limits.keys import KeyFileError, KeyRing
from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.schema import Gateway


def check_gateway(context: Context) -> Iterator[str]:
    """Keys where others can reach it, files that can be used, and a store that all its processes share."""
    gateway = context.recipe.gateway
    if not is_loopback(gateway.host) and gateway.api_keys is None and not gateway.allow_anonymous:
        yield (
            f"gateway.host is {gateway.host}, which other machines reach: give gateway.api_keys, or "
            "allow_anonymous: true."
        )
    if gateway.api_keys is not None:
        try:
            KeyRing.load(gateway.api_keys)
        except KeyFileError as error:
            yield f"gateway.api_keys: {str(error).rstrip('.')}."
        except ValueError:
            yield f"gateway.api_keys is {gateway.api_keys}: this is no file's name."
    yield from _check_database(gateway)
    if gateway.node_labels and gateway.nodes == "every":
        yield "gateway has node_labels and nodes: every, which contradict each other: leave one out."
    yield from _check_labels(context)
    if gateway.nodes == "every" and is_loopback(gateway.host) and _nodes(context) > 1:
        yield (
            f"gateway.nodes is every, but {gateway.host} is reached from its own machine only: write host: "
            "0.0.0.0 "
            "and api_keys."
        )


def _check_labels(context: Context) -> Iterator[str]:
    labels, cluster = context.recipe.gateway.node_labels, context.cluster
    if not labels or cluster is None:
        return
    if not any(labels.items() <= node.labels.items() for node in cluster.nodes):
        wanted = ", ".join(f"{key}={value}" for key, value in labels.items())
        yield (
            f"gateway.node_labels wants {wanted}, which none of the {len(cluster.nodes)} nodes has: label "
            "one."
        )


def _nodes(context: Context) -> int:
    """Machines, as far as is known."""
    if context.cluster is None or context.cluster.local:
        return 1
    return len(context.cluster.nodes)


def _check_database(gateway: Gateway) -> Iterator[str]:
    path = gateway.response_db
    if path is None:
        return
    if "\0" in str(path):
        yield "gateway.response_db has a zero byte: this is no file's name."
        return
    try:
        if path.is_dir():
            yield f"gateway.response_db is {path}, a folder: name a file."
        elif not path.parent.is_dir():
            yield f"gateway.response_db is {path}: there is no folder {path.parent}, make it first."
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            yield f"gateway.response_db is {path}, which cannot be written: name another file."
    except (OSError, ValueError):
        yield f"gateway.response_db is {path}: this is no file's name."


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
