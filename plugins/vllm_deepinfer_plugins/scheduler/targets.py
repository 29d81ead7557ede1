"""Targets that a request carries: `vllm_xargs` of the HTTP API, or `SamplingParams.extra_args`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from vllm.v1.request import Request

TTFT_TARGET_MS = "deepinfer_ttft_target_ms"
ITL_TARGET_MS = "deepinfer_itl_target_ms"


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: none of its own.

    Attributes:
        ttft: from arrival to the first token.
        itl: between tokens.
        ignored: names whose value is no positive number.
    """

    ttft: float | None = None
    itl: float | None = None
    ignored: tuple[str, ...] = ()


NONE = Targets()


def targets_of(request: Request) -> Targets:
    """What the request asks for. A value that cannot be acted on is named, and the request is served."""
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    if not extra or not (TTFT_TARGET_MS in extra or ITL_TARGET_MS in extra):
        return NONE
    ttft, itl = _seconds(extra.get(TTFT_TARGET_MS)), _seconds(extra.get(ITL_TARGET_MS))
    bad = [(TTFT_TARGET_MS, ttft), (ITL_TARGET_MS, itl)]
    return Targets(ttft, itl, tuple(name for name, value in bad if value is None and name in extra))


def _seconds(milliseconds: object) -> float | None:
    """None for what is no positive finite number; HTTP's extra arguments may arrive as text."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float | str):
        return None
    try:
        value = float(milliseconds)
    except ValueError:
        return None
    return value / 1e3 if isfinite(value) and value > 0 else None
