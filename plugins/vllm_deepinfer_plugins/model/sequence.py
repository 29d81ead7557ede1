"""Where the keys of a forward pass lie: the interface of the layers to a whole sequence or to paged caches.

Layers work on flat rows, one per token. A `Sequence` lasts for one forward pass. It takes what the layers
write (window KV, compressor input, compressed entries, token ids), finds the rows of a token's history, and
computes selection and attention over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .rope import Rotary
from .tiles import RowTiles


class Store(Enum):
    """What a token leaves behind, one row per token each."""

    WINDOW = "window"
    """Window KV of a layer, [head_dim]."""
    POOL = "pool"
    """Compressor input of a KV source whose ratio is above 1, [2 × head_dim] float32."""
    IDS = "ids"
    """Token ids for Engram, [1] int32; one store for all layers."""


class Sequence(ABC):
    """One forward pass over flat token rows.

    Args:
        config: The language model's config.
        positions: [tokens] int64, each token's position in its own sequence.
        tiles: How row functions are run.
        image: [tokens] bool, True at image positions, or None for text alone.

    Attributes:
        taken: numbers of these rows in the step that `narrow` took them from; None: it is the whole step.
    """

    def __init__(
        self, config: TextConfig, positions: torch.Tensor, tiles: RowTiles, image: torch.Tensor | None = None
    ) -> None:
        self.config, self.positions, self.tiles, self.image = config, positions, tiles, image
        self.taken: torch.Tensor | None = None
        self._rotations: dict[tuple[bool, int], torch.Tensor] = {}

    def rotations(self, ratio: int, first_of_group: bool = False) -> torch.Tensor:
        """[tokens, pairs] for a layer of that ratio, at each token or at the first token of its group."""
        back = ratio - 1 if first_of_group else 0
        key = (ratio > 0, back)
        if key not in self._rotations:
            rotary = Rotary(self.config, compressed=ratio > 0)
            self._rotations[key] = self.tiles(rotary, (self.positions - back).clamp_min(0))
        return self._rotations[key]

    def visible(self, ratio: int) -> torch.Tensor:
        """[tokens]: how many entries of a cache of that ratio each token may see."""
        return (self.positions + 1) // ratio

    def kept(self) -> torch.Tensor | None:
        """Numbers of the rows that go behind the last KV source, or None for all of them."""
        return None

    def narrow(self, rows: torch.Tensor) -> Sequence:
        """The same forward pass over some of its rows only, as `kept` gave them."""
        raise NotImplementedError

    @abstractmethod
    def put(self, store: Store, layer: int, rows: torch.Tensor) -> None:
        """Keep one row per token: [tokens, channels]."""

    @abstractmethod
    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the ``count`` tokens that end at each token, itself last.

        Returns:
            [tokens, count, channels] and [tokens, count] bool, False before the beginning of a sequence (such
            rows hold arbitrary finite values).
        """

    @abstractmethod
    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        """Keep the entries [tokens, channels] of those tokens that complete a group."""

    @abstractmethod
    def select(self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """Choose entries for each token; this layer and its followers attend to them.

        Args:
            queries: [tokens, index heads, index_head_dim].
            weights: [tokens, index heads].
        """

    @abstractmethod
    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        """Attention of queries [tokens, heads, head_dim] over the window and the selected entries."""
