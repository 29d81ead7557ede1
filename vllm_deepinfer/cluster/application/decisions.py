"""Scaling decisions, from Serve's controller to whoever shows them, through Ray's key-value store."""

from __future__ import annotations

import json
import time

import msgspec
from ray.experimental import internal_kv

NAMESPACE = b"vllm-deepinfer"


class ScalingRecord(msgspec.Struct, frozen=True):
    """What has been decided for one pool.

    Attributes:
        target: replicas wanted now.
        ups, downs: decisions, ever, to grow and to shrink.
        reason: of the newest change. at: when, as seconds since 1970.
    """

    target: int
    ups: int = 0
    downs: int = 0
    reason: str = ""
    at: float = 0.0

    def then(self, target: int, reason: str) -> ScalingRecord:
        """After a decision for another number."""
        return ScalingRecord(
            target,
            self.ups + (target > self.target),
            self.downs + (target < self.target),
            reason,
            time.time(),
        )


def write(application: str, pool: str, record: ScalingRecord) -> None:
    """Replace the pool's record."""
    internal_kv._internal_kv_put(_key(application, pool), msgspec.json.encode(record), namespace=NAMESPACE)


def read(application: str, pool: str) -> ScalingRecord | None:
    """The pool's record; None before the first decision."""
    data = internal_kv._internal_kv_get(_key(application, pool), namespace=NAMESPACE)
    return None if data is None else msgspec.json.decode(data, type=ScalingRecord)


def _key(application: str, pool: str) -> bytes:
    return json.dumps([application, "scaling", pool]).encode()
