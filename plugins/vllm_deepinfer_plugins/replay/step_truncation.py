"""From vLLM's input batch to the model's `Truncation`: one per step, in the order of the block tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..model.truncation import Truncation
from .message import Start
from .prompt import start_behind

NOTHING = Start()


@dataclass
class Truncations:
    """What a runner remembers of its requests.

    Attributes:
        window: W, tokens.
        rows: of a prompt that go behind the last KV source; None: all of them.
        depth: ids that Engram needs in front of a row; 0: none, or they are paged.
        starts: by request id.
    """

    window: int
    rows: int | None
    depth: int
    starts: dict[str, Start] = field(default_factory=dict)

    def truncation(self, batch: Any, params: Mapping[str, Any]) -> Truncation | None:
        """The step's, or None where nothing is cut: decodes never are.

        Args:
            batch: vLLM's InputBatch.
            params: sampling parameters by request id.
        """
        ids = batch.req_ids
        begins = batch.num_computed_tokens_cpu[: len(ids)].astype(np.int64)
        starts = [self.starts.get(key, NOTHING) for key in ids]
        floors = np.array([start.floor for start in starts], dtype=np.int64)
        hits = np.array([start.hit for start in starts], dtype=np.int64)
        kept = np.zeros(len(ids), dtype=np.int64)
        if self.rows is not None:
            prompts = batch.num_prompt_tokens[: len(ids)].tolist()
            kept[:] = [
                start_behind(prompt, self.rows, params.get(key))
                for key, prompt in zip(ids, prompts, strict=True)
            ]
        bounds = np.maximum(floors, kept)
        reached = np.where(bounds > 0, bounds + self.window - 1, 0)  # whose rows see no bound any more
        if (begins >= np.maximum(reached, hits)).all():
            return None
        return Truncation(torch.from_numpy(floors), torch.from_numpy(hits), torch.from_numpy(kept))

    def lookback(self, batch: Any) -> torch.Tensor | None:
        """[requests, depth] int64 ids in front of each request's first row, −1 where there is none.

        Scheduling is synchronous, so that the host's table has every token before the step.
        """
        if not self.depth:
            return None
        begins = batch.num_computed_tokens_cpu[: len(batch.req_ids), None]
        positions = begins + np.arange(-self.depth, 0)
        rows = np.arange(len(begins))[:, None]
        ids = batch.token_ids_cpu[rows, positions.clip(min=0)]
        return torch.from_numpy(np.where(positions >= 0, ids, -1).astype(np.int64))
