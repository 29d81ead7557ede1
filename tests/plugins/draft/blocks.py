"""The target's `Blocks` with the drafter's stores beside them: drafts after any step, and rejected ones."""

from __future__ import annotations

from typing import Any

import torch
from vllm_deepinfer_plugins.draft.blocks import Drafter
from vllm_deepinfer_plugins.draft.paged import PagedDrafter, draft_stores
from vllm_deepinfer_plugins.draft.sampling import Block, draw_block
from vllm_deepinfer_plugins.model.paged import Stores

from tests.plugins.model.blocks import Blocks, Request


class DraftBlocks(Blocks):
    """A target and its drafter over paged stores, stepped by hand.

    Args:
        drafter: Of the same checkpoint.
        settings: As of `Blocks`.
    """

    def __init__(self, model: Any, drafter: Drafter, **settings: Any) -> None:
        self.drafter = drafter
        super().__init__(model, **settings)
        own = {
            key: store
            for key, store in self.stores.tokens.items()
            if key[1] >= model.config.num_hidden_layers
        }
        self.drafting = PagedDrafter(drafter, own, self.tiles)
        self.stepped: list[Request] = []

    def _make_stores(self, vllm_config: Any) -> Stores:
        stores = super()._make_stores(vllm_config)
        own = draft_stores(vllm_config, self.config, "", replayed=self.replayed)
        return Stores({**stores.tokens, **own}, stores.entries)

    @torch.no_grad()
    def step(self, *parts: tuple[Request, int]) -> None:
        """As of `Blocks`; what the drafter needs of it is written."""
        self.stepped = [request for request, _ in parts]
        self.model.tap = self.drafting.tap
        try:
            super().step(*parts)
        finally:
            self.model.tap = None

    @torch.no_grad()
    def draft(self, *requests: Request) -> Block:
        """Drafts of requests of the last step, each behind what it has computed."""
        self._poison()
        rows = torch.tensor([self.stepped.index(request) for request in requests])
        anchors = torch.stack([request.ids[request.computed] for request in requests])
        positions = torch.tensor([request.computed for request in requests])
        hidden = self.drafting.hidden(rows, anchors, positions, self.model.embed.weight)
        blocks = hidden.unflatten(0, (len(requests), -1))
        logits = self.tiles(self.model.logits, hidden).unflatten(0, (len(requests), -1))
        return draw_block(self.drafter, blocks, logits, anchors, blocks.shape[1], self.tiles)

    def verify(self, request: Request, drafts: list[int], accepted: int) -> None:
        """A step over the request's next token and drafts, of which the first ones are right."""
        truth, begin = request.ids, request.computed
        request.ids = torch.cat((truth[: begin + 1], torch.tensor(drafts)))
        self.step((request, 1 + len(drafts)))
        request.ids, request.computed = truth, begin + 1 + accepted
        request.hidden[-1] = request.hidden[-1][: 1 + accepted]
