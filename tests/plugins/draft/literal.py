"""The drafter under SWA Bounded Replay by the letter: dense arrays by position, nothing paged or left out.

The rule. A row has keys for the drafter if the target computed all of its tapped layers: layers behind the
last KV source compute the rows from ``kept`` on, all layers those from ``start`` on. An anchor at a sees the
keys in [max(first, a − W), a − 1], where ``first`` is the first row that has any.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_deepinfer_plugins.draft.blocks import Drafter
from vllm_deepinfer_plugins.draft.sampling import Block, draw_block
from vllm_deepinfer_plugins.draft.sequence import BlockSequence
from vllm_deepinfer_plugins.model.rope import Rotary
from vllm_deepinfer_plugins.model.sequence import Sequence
from vllm_deepinfer_plugins.model.tiles import ROWS, RowTiles

from tests.plugins.model.literal import Entries, literal

TILES = RowTiles(ROWS)


def first_row(model: Any, taps: tuple[int, ...], start: int, kept: int) -> int:
    """The first row that has keys for the drafter."""
    return max([start, *(kept for layer in taps if layer > model.last_source)])


@torch.no_grad()
def features(
    model: Any,
    taps: tuple[int, ...],
    ids: torch.Tensor,
    *,
    start: int = 0,
    hit: int = 0,
    kept: int = 0,
    cached: Entries | None = None,
) -> tuple[torch.Tensor, Entries]:
    """[length, taps × hidden] of token ids [length], NaN where the rule computes none; and the entries.

    Arguments as of `literal`.
    """
    found = []

    def tap(layer: int, streams: torch.Tensor, sequence: Sequence) -> None:
        if layer in taps:
            means = sequence.tiles(lambda rows: rows.mean(1), streams)
            whole = means.new_full((len(ids), means.shape[1]), torch.nan)
            whole[start:] = means
            whole[: first_row(model, (layer,), start, kept)] = torch.nan
            found.append(whole)

    model.tap = tap
    try:
        _, entries = literal(model, ids, start=start, hit=hit, kept=kept, cached=cached)
    finally:
        model.tap = None
    return torch.cat(found, dim=-1), entries


@torch.no_grad()
def drafts(
    model: Any, drafter: Drafter, ids: torch.Tensor, anchors: list[int], features: torch.Tensor, first: int
) -> Block:
    """Greedy drafts of anchors at those positions of token ids; ``features`` of all rows before the last."""
    positions = torch.arange(len(features))
    rotations = TILES(Rotary(model.config, compressed=False), positions)
    keys = TILES(drafter.context, features, rotations)

    def context(layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = places >= max(first, 0)
        rows = keys[layer - model.config.num_hidden_layers][places.clamp_min(0)]
        return rows.masked_fill(~seen.unsqueeze(-1), 0), seen

    at = torch.tensor(anchors)
    sequence = BlockSequence(model.config, at, TILES, context)
    hidden = drafter(ids[at], model.embed.weight, sequence)
    logits = TILES(model.logits, hidden).unflatten(0, (len(anchors), -1))
    return draw_block(
        drafter, hidden.unflatten(0, (len(anchors), -1)), logits, ids[at], logits.shape[1], TILES
    )
