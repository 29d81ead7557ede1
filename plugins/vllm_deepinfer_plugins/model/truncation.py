"""SWA Bounded Replay inside a step: where each request's window KV begins, and which rows go how far.

A replay starts at s: a query at i sees window keys in [max(s, i − W + 1), i]. After a prefix hit of H tokens
s is H − W, and what is recomputed below H must not write the cached entries again. Behind the last KV source
only the last rows of a prompt are computed, which is a replay of its own that starts with the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Truncation:
    """The step's requests, in the order of its block tables; all on the step's device.

    Attributes:
        floors: [requests] int64, s: the first position whose window KV is there; 0 without a replay.
        hits: [requests] int64, H: entries of tokens before it are cached already and are not written.
        kept: [requests] int64, the first position that goes behind the last KV source; 0 for all.
    """

    floors: torch.Tensor
    hits: torch.Tensor
    kept: torch.Tensor

    @property
    def behind(self) -> torch.Tensor:
        """[requests] int64: as ``floors``, for the layers behind the last KV source."""
        return torch.maximum(self.floors, self.kept)

    def rows_kept(self, positions: torch.Tensor, request: torch.Tensor) -> torch.Tensor | None:
        """Numbers of the rows that go behind the last KV source, or None for all of them.

        Args:
            positions, request: [tokens] int64.
        """
        goes = positions >= self.kept[request]
        return None if bool(goes.all()) else goes.nonzero().squeeze(1)
