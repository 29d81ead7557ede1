"""Top-k selection with two rules for ties, and the candidate blocks of the two-level indexer.

ReLU and four-bit keys make equal scores common, so which of them is taken is part of the function.
`torch.topk` takes them as its algorithm happens to run over a row of that width: the released reference does
so, and only the same call over the same width agrees with it. But then the same query picks other positions
in a longer row. The other rule, lower positions first, depends on the scores alone; batch-invariant mode
needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def top_positions(scores: torch.Tensor, k: int, *, by_position: bool) -> torch.Tensor:
    """Positions of the k largest scores of each row, increasing; −1 for every one that is −inf.

    Args:
        scores: [rows, width]; −inf marks what may not be chosen.
        k: Number of columns of the result.
        by_position: Of equal scores take the lower positions, whatever the row's width.

    Returns:
        [rows, k] int64.
    """
    if by_position and scores.shape[1] > k:
        return _compact(_keep_lowest(scores, k), k)
    if scores.shape[1] <= k:
        return _compact(scores > -torch.inf, k)
    chosen = scores.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    return torch.where(scores.gather(1, chosen) > -torch.inf, chosen, -1)


def _keep_lowest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, width] bool: everything above the k-th value, and the first of those that equal it."""
    smallest = scores.topk(k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = scores > smallest
    level = (scores == smallest) & (scores > -torch.inf)
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


def _compact(keep: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, k] int64: the marked positions of [rows, width], increasing, then −1."""
    rows, width = keep.shape
    place = torch.where(keep, keep.cumsum(dim=-1) - 1, k)
    chosen = torch.full((rows, k + 1), -1, dtype=torch.int64, device=keep.device)
    positions = torch.arange(width, device=keep.device).expand(rows, width)
    return chosen.scatter_(1, place, positions)[:, :k]


def all_visible(visible: torch.Tensor, k: int) -> torch.Tensor:
    """Every visible position of each row: what `top_positions` returns when no row has more than k of them.

    Args:
        visible: [rows] counts.
    """
    positions = torch.arange(k, device=visible.device).expand(len(visible), k)
    return torch.where(positions < visible.unsqueeze(-1), positions, -1)


def selection_mask(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, width] bool from positions [rows, k], −1 for none."""
    mask = torch.zeros(len(chosen), width + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, torch.where(chosen >= 0, chosen, width), True)[:, :width]


@dataclass(frozen=True)
class Candidates:
    """The two-level indexer's filter: ``blocks`` blocks of ``size`` positions are kept per query.

    ``by_position`` is the rule for equal blocks, as in `top_positions`.
    """

    blocks: int
    size: int
    by_position: bool = False

    def choose(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Block ids [rows, blocks], increasing, then −1; the latest visible block is always among them.

        Args:
            scores: [rows, width], −inf beyond what a row may see.
            visible: [rows], how many positions a row may see.
        """
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % self.size), value=-torch.inf)
        best = padded.unflatten(1, (-1, self.size)).amax(dim=-1)
        latest = (visible.unsqueeze(-1) - 1) // self.size
        numbers = torch.arange(best.shape[1], device=scores.device)
        return top_positions(
            best.masked_fill(numbers == latest, torch.inf), self.blocks, by_position=self.by_position
        )

    def keep(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The scores with −inf outside the chosen blocks."""
        width = scores.shape[1]
        blocks = -(-width // self.size)
        allowed = selection_mask(chosen, blocks)
        mask = allowed.repeat_interleave(self.size, dim=1)[:, :width]
        return scores.masked_fill(~mask, -torch.inf)
