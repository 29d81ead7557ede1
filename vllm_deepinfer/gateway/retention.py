"""What a request says about how long the prefix store keeps its prompt.

    headers            x-prefix-store-class: chat        x-prefix-store-ttl: 86400   (seconds)
    metadata           {"prefix_store_class": "chat", "prefix_store_ttl_s": "86400"}
    cache_control      {"type": "ephemeral", "ttl": "1h"} of Anthropic's API; the longest of a request counts

A header outranks metadata, metadata outranks cache_control. A cache_control without ttl asks for nothing that
the class does not give: most agents send it with every request. `policy/retention` has the classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.http_io import Scope, header
from vllm_deepinfer.policy.retention import Retention

CLASS, TTL = "prefix_store_class", "prefix_store_ttl_s"
CLASS_HEADER, TTL_HEADER = "x-prefix-store-class", "x-prefix-store-ttl"
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PERIOD = re.compile(r"(\d{1,9})([smhd])")
_ANY = Retention()  # where no class is named


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asked for; None: nothing.

    Attributes:
        traffic_class: name of a class.
        ttl_s: seconds, positive.
    """

    traffic_class: str | None = None
    ttl_s: float | None = None

    def over(self, other: Wanted) -> Wanted:
        """This, and where it says nothing the other."""
        return Wanted(
            other.traffic_class if self.traffic_class is None else self.traffic_class,
            other.ttl_s if self.ttl_s is None else self.ttl_s,
        )


NOTHING = Wanted()


def from_headers(scope: Scope, classes: Retention) -> Wanted:
    """The two headers. Raises: ApiError 400 for a class that does not exist, or a time that is none."""
    name, ttl = (header(scope, text.encode()) for text in (CLASS_HEADER, TTL_HEADER))
    if name is None and ttl is None:
        return NOTHING
    return _checked(name, ttl, (CLASS_HEADER, TTL_HEADER), classes)


def from_body(body: Mapping[str, Any], classes: Retention) -> Wanted:
    """`metadata`, then `cache_control` of any block. Raises: ApiError 400."""
    metadata = body.get("metadata")
    wanted = NOTHING
    if isinstance(metadata, dict) and (CLASS in metadata or TTL in metadata):
        names = f"metadata.{CLASS}", f"metadata.{TTL}"
        wanted = _checked(metadata.get(CLASS), metadata.get(TTL), names, classes)
    return wanted


def with_cache_control(wanted: Wanted, body: Mapping[str, Any]) -> Wanted:
    """The longest `ttl` of a Messages request's blocks where `wanted` has none. Raises: ApiError 400."""
    periods = [_period(where, block["cache_control"]) for where, block in _marked(body)]
    longest = max((period for period in periods if period is not None), default=None)
    if longest is None:
        return wanted
    return wanted.over(_checked(None, longest, ("", "cache_control.ttl"), _ANY))


def _marked(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Everything that carries a cache_control: the request, tools, system and message blocks."""
    if body.get("cache_control") is not None:
        yield "cache_control", body
    for name in ("tools", "system"):
        yield from _blocks(body.get(name), name)
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            yield from _blocks(message.get("content"), f"messages.{i}.content")


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict) and block.get("cache_control") is not None:
            yield f"{where}.{i}.cache_control", block


def _period(where: str, control: Any) -> int | None:
    """Seconds of a `ttl` such as 5m or 1h."""
    ttl = control.get("ttl") if isinstance(control, dict) else None
    if ttl is None:
        return None
    match = _PERIOD.fullmatch(ttl) if isinstance(ttl, str) else None
    if match is None or not int(match[1]):
        raise ApiError(
            400, f"{where}.ttl: send a time such as 5m, 1h or 3d, got {str(ttl)[:40]!r}.", param=where
        )
    return int(match[1]) * _UNITS[match[2]]


def _checked(name: Any, ttl: Any, where: tuple[str, str], classes: Retention) -> Wanted:
    try:
        classes.choose(None if name is None else str(name)[:100])
    except ValueError as error:
        raise ApiError(400, f"{where[0]}: {error}", param=where[0]) from None
    if ttl is None:
        return Wanted(name)
    try:
        seconds = math.nan if isinstance(ttl, bool) else float(ttl)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ApiError(
            400, f"{where[1]}: send a positive number of seconds, got {str(ttl)[:40]!r}.", param=where[1]
        )
    return Wanted(name, seconds)
