"""The latency that a request asks for, by headers.

    x-ttft-target-ms: 800     from its arrival to its first token
    x-itl-target-ms: 25       between tokens

The time-budget scheduler acts on them (`policy/prefill_order`, `policy/itl_control`); other engines serve the
request as any other.
"""

from __future__ import annotations

import math

from vllm_deepinfer.engine import Targets
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.http_io import Scope, header

TTFT_HEADER, ITL_HEADER = "x-ttft-target-ms", "x-itl-target-ms"


def targets_from_headers(scope: Scope) -> Targets | None:
    """What the two headers say; None: neither is there. Raises: ApiError 400: no positive number."""
    ttft, itl = (_milliseconds(scope, name) for name in (TTFT_HEADER, ITL_HEADER))
    return None if ttft is None and itl is None else Targets(ttft_ms=ttft, itl_ms=itl)


def _milliseconds(scope: Scope, name: str) -> float | None:
    text = header(scope, name.encode())
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ApiError(400, f"{name}: send a positive number of milliseconds, got {text[:40]!r}.", param=name)
    return value
