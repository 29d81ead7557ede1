"""Everything that the plain form measures, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.lessons.encoder import Encoder

from ...draft.load import load_drafter
from ...model.weights import load_backbone
from .drafts import Drafts, drafts_of
from .perplexity import Loss, Replays, loss_of, replays_of, unquantised_caches
from .texts import Text, heldout, shuffled

SUFFIX = 128
"""Tokens of code and prose behind a hit whose loss is compared."""
WHOLE = 10_000
"""The answers of a lesson may be far behind."""
DRAFT_SHARE = 3
"""Drafts are taken from one of so many tokens of code."""


@dataclass(frozen=True)
class Plain:
    """Attributes:
    losses: by mode and kind of text. replays: by kind. drafts: by kind; empty without a drafter.
    """

    losses: dict[str, dict[str, Loss]]
    replays: dict[str, Replays]
    drafts: dict[str, Drafts]


def measure(folders: Mapping[str, Path], encoder: Encoder, tokens: int, say: Callable[[str], None]) -> Plain:
    """Losses, replays and drafts on ``tokens`` tokens of held-out code and a share of everything else.

    Args:
        folders: The checkpoint by encoding.
    """
    texts = {"code": heldout(encoder, "code", tokens), "prose": heldout(encoder, "prose", tokens // 4)}
    lessons = {kind: heldout(encoder, kind, tokens // 4) for kind in ("retrieval", "tools")}
    losses: dict[str, dict[str, Loss]] = {}

    def lost(mode: str, folder: Path, dtype: torch.dtype) -> None:
        say(f"{mode}: losses in the plain form")
        model = load_backbone(folder, dtype)
        losses[mode] = {kind: loss_of(model, some) for kind, some in (texts | lessons).items()}

    folder = folders["as_stored"]
    lost("float32", folder, torch.float32)
    lost("bfloat16", folder, torch.bfloat16)
    if "released" in folders:
        lost("released_encoding", folders["released"], torch.float32)
    with unquantised_caches():
        lost("unquantised_caches", folder, torch.float32)
    say("losses behind replays")
    model = load_backbone(folder)
    replays = {kind: replays_of(model, some, SUFFIX) for kind, some in texts.items()}
    replays |= {kind: replays_of(model, some, WHOLE) for kind, some in lessons.items()}
    return Plain(losses, replays, _drafts(folder, encoder, texts, tokens, say))


def _drafts(
    folder: Path,
    encoder: Encoder,
    texts: Mapping[str, list[Text]],
    tokens: int,
    say: Callable[[str], None],
) -> dict[str, Drafts]:
    if not V41Config.load(folder).text_config.num_nextn_predict_layers:
        return {}
    say("drafts in the plain form")
    drafter, model = load_drafter(folder), load_backbone(folder)
    some = {kind: found[: max(1, len(found) // DRAFT_SHARE)] for kind, found in texts.items()}
    some["shuffled"] = shuffled(some["prose"])
    some["json"] = [
        text for kind in ("json", "tools") for text in heldout(encoder, kind, tokens // (2 * DRAFT_SHARE))
    ]
    return {kind: drafts_of(drafter, model, found) for kind, found in some.items()}
