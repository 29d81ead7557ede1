"""Hand-over in an engine's front end: what is held, what was fetched, what went wrong."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_deepinfer.engine import GenerateRequest, KvHandOver
from vllm_deepinfer_plugins.engine.entry import Entry
from vllm_deepinfer_plugins.hand_over.messages import EXPIRED, FAILED, RELEASED, STUCK

logger = logging.getLogger(__name__)


class Holds:
    """The requests whose KV is held, by their callers' ids and by vLLM's.

    Attributes:
        counts: ``expired`` holds; fetches that failed and were ``recomputed``; sources of a ``foreign``
            layout, computed here from the start; fetches that were ``stuck``.
    """

    def __init__(self, on_stuck: Callable[[str], None]) -> None:
        """
        Args:
            on_stuck: called with vLLM's id of a request whose fetch is overdue and cannot be stopped.
        """
        self.counts: Counter[str] = Counter()
        self._internal: dict[str, str] = {}
        self._external: dict[str, str] = {}
        self._on_stuck = on_stuck

    def __len__(self) -> int:
        return len(self._internal)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._internal

    def add(self, entry: Entry) -> None:
        """A request has ended and is held."""
        assert entry.internal_id is not None
        self._internal[entry.request.request_id] = entry.internal_id
        self._external[entry.internal_id] = entry.request.request_id

    def take(self, request_ids: list[str]) -> list[str]:
        """vLLM's ids of those that are held; they count as released from now on."""
        taken = [self._internal.pop(one) for one in request_ids if one in self._internal]
        for internal_id in taken:
            del self._external[internal_id]
        return taken

    def hear(self, events: Mapping[str, Any]) -> None:
        """What the connector reports of a step."""
        for internal_id in events.get(RELEASED, ()):
            external = self._external.pop(internal_id, None)
            if external is not None:
                del self._internal[external]
        self._count(
            "expired", len(events.get(EXPIRED, ())), "KV was held for a decode engine that never came."
        )
        self._count(
            "recomputed", len(events.get(FAILED, ())), "KV could not be fetched; the prompt is computed."
        )
        self._count("stuck", len(events.get(STUCK, ())), "A fetch of KV neither ends nor can be stopped.")
        for internal_id in events.get(STUCK, ()):
            self._on_stuck(internal_id)

    def usable(self, request: GenerateRequest, kv_layout: str) -> GenerateRequest:
        """The request without a source that this engine could not read."""
        source = request.hand_over.source if request.hand_over is not None else None
        if source is None or (source.get("layout") == kv_layout and isinstance(source.get("params"), dict)):
            return request
        self._count("foreign", 1, "KV of another layout was offered; the prompt is computed here.")
        return msgspec.structs.replace(request, hand_over=KvHandOver())

    def _count(self, name: str, number: int, text: str) -> None:
        if number and not self.counts[name]:
            logger.warning("%s (told once; the count of %s goes on)", text, name)
        self.counts[name] += number
