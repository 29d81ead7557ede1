"""NIXL and the prefix store in one engine: vLLM's MultiConnector, which knows our two connectors.

It bears vLLM's name because vLLM asks for that name wherever a connector may have children.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as VllmMultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from ..hand_over.connector import NixlConnector
from .connector import PrefixStoreConnector

CHILDREN = {one.__name__: one for one in (NixlConnector, PrefixStoreConnector)}


class MultiConnector(VllmMultiConnector):
    """Children load in the order in which they are named, and all of them save."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """vLLM finds a child's class by its name alone, which is vLLM's own NIXL connector, or nobody's."""
        rebuilt: dict[str, Any] = {}
        for name, value in (data or {}).items():
            child = CHILDREN.get(name)
            if child is not None and not isinstance(value, KVConnectorStats):
                value = child.build_kv_connector_stats(value)
            rebuilt[name] = value
        foreign = {name for name, value in rebuilt.items() if not isinstance(value, KVConnectorStats)}
        if foreign:
            further = super().build_kv_connector_stats({name: rebuilt.pop(name) for name in foreign})
            rebuilt |= {} if further is None else further.data
        return MultiKVConnectorStats(data=rebuilt)
