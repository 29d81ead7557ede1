"""The figures that the report names, each from the plain form or from the engine in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm_deepinfer.bench.figure import Figure

from .drafts import Drafts
from .exam import LONG
from .modes import FIRST
from .plain import Plain

if TYPE_CHECKING:
    from .command import Sitting

TARGETS = {
    "bits_per_token_code": "<= 3.2",
    "tool_calls_well_formed": ">= 0.95",
    "retrieval_exact": ">= 0.9",
    "accepted_length_json": ">= 3.0",
    "accepted_length_code": ">= 2.0",
    "confidence_auc": ">= 0.8",
    "replay_perplexity_ratio": "<= 1.01",
    "decoder_replay_perplexity_ratio": "<= 1.01",
}
EXAMINED = {
    "tool_calls_well_formed": ("tool_calls", "well_formed"),
    "tool_calls_exact": ("tool_calls", "exact"),
    "tool_answers_exact": ("tools", "exact"),
    "json_exact": ("json", "exact"),
    "arithmetic_exact": ("arithmetic", "exact"),
    "reasoning_exact": ("reasoning", "exact"),
    "copy_exact": ("copy", "exact"),
    "chat_exact": ("chat", "exact"),
    "retrieval_exact": ("retrieval", "exact"),
    **{f"retrieval_exact_{round(tokens / 1024)}k": (f"retrieval_{tokens}", "exact") for tokens in LONG},
}
NO_DRAFTER = "the checkpoint has no drafter"


def figures(plain: Plain, sittings: Mapping[str, Sitting]) -> Iterator[Figure]:
    """All of them, also those that could not be measured."""
    first = plain.losses[FIRST]
    for kind in ("code", "prose"):
        yield _figure(f"bits_per_token_{kind}", first[kind].bits_per_token, "bits")
        yield _figure(f"bits_per_character_{kind}", first[kind].bits_per_character, "bits")
    sitting = sittings[FIRST]
    for name, (topic, share) in EXAMINED.items():
        seen = sitting.shares.get(topic)
        reason = sitting.reason or "no question of it fits into the checkpoint's context"
        yield _figure(name, None if seen is None else float(seen[share]), "share", reason)
    for kind in ("json", "code", "prose", "shuffled"):
        drafts = plain.drafts.get(kind)
        length = drafts.accepted_length if drafts and drafts.blocks else None
        yield _figure(f"accepted_length_{kind}", length, "tokens", NO_DRAFTER)
    yield _figure("confidence_auc", _auc(plain.drafts), "share", NO_DRAFTER)
    code = plain.replays["code"]
    for name, way in (
        ("replay_perplexity_ratio", "encoder"),
        ("decoder_replay_perplexity_ratio", "decoder"),
    ):
        value = code.ratio(way) if code.cold.tokens else None
        yield _figure(name, value, "ratio", "no text is long enough for a replay")


def _figure(name: str, value: float | None, unit: str, reason: str = "") -> Figure:
    target = TARGETS.get(name)
    if value is None:
        return Figure.missing(name, unit, reason, target)
    return Figure(name=name, value=value, unit=unit, target=target)


def _auc(drafts: Mapping[str, Drafts]) -> float | None:
    """Over code, prose, JSON and tool calls together."""
    together = Drafts()
    for kind, seen in drafts.items():
        if kind != "shuffled":
            together.add(seen)
    return together.auc() if together.blocks else None
