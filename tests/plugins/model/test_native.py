"""Selection and attention by kernels against the portable ones, call by call inside a model's steps.

A whole model in bfloat16 is no measure: random weights turn a last bit into other selections and other
tokens. So every call is compared where it is made, over chunks and decodes of several requests in blocks that
are shuffled and poisoned (`blocks.Blocks`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kernels import load
from vllm_deepinfer_plugins.model.attention import sink_attention
from vllm_deepinfer_plugins.model.indexer import index_scores
from vllm_deepinfer_plugins.model.native import NativePagedSequence, has_kernels_for
from vllm_deepinfer_plugins.model.selection import Candidates, top_positions
from vllm_deepinfer_plugins.model.sequence import Store

from vllm_deepinfer.checkpoint.config import LayerPlan

from . import engines
from .blocks import Blocks
from .engines import FIXTURES, NAMES
from .samples import golden, text_config, token_ids, variant
from .test_causal_lm import VOCAB, engine_logits


class Checked(NativePagedSequence):
    """Compares what kernels return with float32 arithmetic over gathered keys, row by row."""

    calls: dict[str, int]

    def __init__(self, *parts: Any, **_: Any) -> None:
        super().__init__(*parts, kernels=load())

    def _select(
        self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        kept = None if self._blocks is None else self._blocks.clone()
        chosen = super()._select(plan, queries, weights, visible)
        assert plan.kv_source is not None
        place, size = self.stores.entries[plan.kv_source], self.config.head_dim
        candidates = Candidates(self.config.candidate_topk_blocks, self.config.candidate_block_size, True)
        for row, count in enumerate(visible.tolist()):
            positions = torch.arange(count).unsqueeze(0) * plan.ratio
            keys = place.rows[self._rows_at(place, self.request[row : row + 1], positions)[0]][:, size:]
            one = slice(row, row + 1)
            scores = index_scores(queries[one].float(), weights[one].float(), keys.float())
            if plan.is_candidate_source and self._blocks is not None:
                wanted_blocks = candidates.choose(scores, visible[one])
                assert torch.equal(wanted_blocks[0], self._blocks[row])
            elif plan.uses_candidates and kept is not None:
                scores = candidates.keep(scores, kept[one])
            wanted = top_positions(scores, self.config.index_topk, by_position=True)[0]
            found = chosen[row]
            if not torch.equal(wanted, found):  # then sums in another order moved equal scores apart
                assert (wanted >= 0).sum() == (found >= 0).sum()
                a, b = (scores[0][ids[ids >= 0]].sort().values for ids in (wanted, found))
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        self.calls["select"] += 1
        return chosen

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        found = super().attend(plan, queries, sink)
        window = self.stores.tokens[Store.WINDOW, plan.index]
        for row, position in enumerate(self.positions.tolist()):
            request = self.request[row : row + 1]
            floors = self._floors(plan.index)
            floor = 0 if floors is None else int(floors[request])
            near = torch.arange(max(position - self.config.sliding_window + 1, floor), position + 1)
            keys = [window.rows[self._rows_at(window, request, near.unsqueeze(0))[0]]]
            if plan.kv_source is not None:
                place = self.stores.entries[plan.kv_source]
                chosen = self._selected[row][self._selected[row] >= 0] * plan.ratio
                entries = place.rows[self._rows_at(place, request, chosen.unsqueeze(0))[0]]
                keys.append(entries[:, : self.config.head_dim])
            gathered = torch.cat(keys).float().unsqueeze(0)
            seen = torch.ones(gathered.shape[:2], dtype=torch.bool)
            wanted = sink_attention(queries[row : row + 1].float(), gathered, seen, sink)[0]
            torch.testing.assert_close(found[row].float(), wanted, atol=2e-2, rtol=2e-2)
        self.calls["attend"] += 1
        return found


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize(
    ("changes", "block_size", "packed", "seed"),
    [
        ({}, 4, True, 0),
        ({}, 16, False, 1),
        ({"index_topk": 3, "candidate_topk_blocks": 2, "candidate_block_size": 2}, 2, False, 2),
        ({"index_topk": 64}, 6, True, 3),
        ({"sliding_window": 1}, 4, False, 4),
    ],
)
def test_each_call_over_chunks_and_decodes(
    name: str, changes: dict[str, Any], block_size: int, packed: bool, seed: int
) -> None:
    Checked.calls = {"select": 0, "attend": 0}
    model = variant(name, dtype=torch.bfloat16, **changes)
    blocks = Blocks(model, block_size=block_size, packed=packed, seed=seed, sequence=Checked)
    asked = [token_ids(length, seed=length) for length in (1, 2, 7, 33, 50, 90)]
    blocks.run_together(*asked, largest=40, seed=seed)
    assert Checked.calls["attend"] > 50 and Checked.calls["select"] > 5


def test_sizes_that_the_kernels_do_not_take() -> None:
    assert has_kernels_for(text_config())
    assert not has_kernels_for(text_config(head_dim=48, qk_rope_head_dim=16))
    assert not has_kernels_for(text_config(index_head_dim=16))


@pytest.mark.slow
@pytest.mark.long
def test_through_the_engine_as_near_to_float32_as_the_portable_form() -> None:
    """Mean divergence from the golden logits over all fixture prompts, which bfloat16 itself moves far."""
    found: dict[bool, list[float]] = {}
    for native in (True, False):
        found[native] = []
        for name in NAMES[:2]:
            wanted = golden(name)
            settings = {"deepinfer": {"native_kernels": native}}
            with engines.engine(
                FIXTURES / name,
                dtype="bfloat16",
                max_logprobs=VOCAB,
                max_num_batched_tokens=64,
                enable_prefix_caching=False,
                additional_config=settings,
            ) as llm:
                ours = engine_logits(llm, [ids.tolist() for ids, _ in wanted.values()])
            for (_, logits), row in zip(wanted.values(), ours, strict=True):
                log = logits.log_softmax(-1)
                found[native].append((log.exp() * (log - row)).sum(-1).mean().item())
    assert sum(found[True]) <= 1.5 * sum(found[False])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_each_call_of_a_replay(seed: int) -> None:
    """Hits with chunks and single rows in the replay, only the last rows behind the last KV source."""
    Checked.calls = {"select": 0, "attend": 0}
    model = variant(dtype=torch.bfloat16)
    blocks = Blocks(model, block_size=16, sequence=Checked, replayed=True, rows=20, seed=seed)
    base = blocks.start(token_ids(160))
    blocks.step((base, 160))
    asked = [torch.cat((base.ids[:hit], token_ids(9 + seed, seed=hit))) for hit in (32, 64, 160)]
    requests = [blocks.start(ids, base, hit // 16) for ids, hit in zip(asked, (32, 64, 160), strict=True)]
    blocks.step(*((request, 1) for request in requests))
    blocks.step(*zip(requests, (9, 1, 15), strict=True))
    for request in requests:
        blocks.step((request, request.left - 1))
        blocks.step((request, 1))
    assert Checked.calls["attend"] > 50
