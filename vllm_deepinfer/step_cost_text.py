"""A fitted step cost as JSON text, with the fingerprint of what it was fitted on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from vllm_deepinfer.policy.step_cost import AttentionBound, StepCost

FORMAT = 1


class ForeignFit(ValueError):
    """Text that holds no fit for this model and machine; the message says in a clause why."""


def dumps(cost: StepCost, fingerprint: Mapping[str, str]) -> str:
    """JSON text that `loads` reads back exactly."""
    document = {"format": FORMAT, "fingerprint": dict(fingerprint), "cost": asdict(cost)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def loads(text: str, fingerprint: Mapping[str, str]) -> StepCost:
    """The fit.

    Raises:
        ForeignFit: It is damaged, of another format, or was fitted on something else.
    """
    try:
        document = json.loads(text)
    except ValueError:
        raise ForeignFit("it is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ForeignFit(f"it is not of format {FORMAT}")
    saved = document.get("fingerprint")
    if not isinstance(saved, dict):
        raise ForeignFit("it has no fingerprint")
    for key in sorted({*saved, *fingerprint}):
        if saved.get(key) != fingerprint.get(key):
            raise ForeignFit(
                f"it was fitted with {key} {saved.get(key)!r}, and this is {fingerprint.get(key)!r}"
            )
    return _cost(document.get("cost"))


def _cost(saved: object) -> StepCost:
    try:
        fields = dict(saved)  # type: ignore[call-overload]
        attention = AttentionBound(**fields.pop("attention"))
        return StepCost(attention=attention, **fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ForeignFit(f"its coefficients cannot be used ({error})") from None
